"""Triton kernels of a decode step; nothing else imports triton.

backend.py      the kernels as a `terra.engine.graph.step.Backend`
gemm.py         matrix products: split-K, SwiGLU, lm head
attention.py    attention over the filled part of the KV cache
rope.py         rotary position embedding, keys and values into the cache
epilogues.py    what follows a GEMM: sums of split-K parts, residual and RMS norm, SiLU
sampling.py     tokens to states, logits to tokens, acceptance of drafts
launch.py       programmatic dependent launch, and the limits of a GPU
"""
