"""The graph engine: on a GPU, decode steps of whole batches as CUDA graphs, with exact drafts. See README.md.

engine.py         GraphEngine and its sessions: the asynchronous face
scheduler.py      frames wait for a slot, are decoded, are handed out
slots.py          device state of the slots of a batch: prefill, begin frames, swap
step.py           one decode step, by a backend of torch or of Triton kernels
kv_cache.py       keys and values of all slots
weights.py        the model's weights as steps read them
quantization.py   weights and activations in 8 bits
reference.py      the operations of a step in torch
cuda_graph.py     capture and replay
transfers.py      copies for which the host does not wait
kernels/          the operations of a step as Triton kernels
"""
