"""The engine of CUDA graphs, for one rollout or many on a GPU: no host between two passes, several tokens a pass.

engine.py                            sessions; one thread makes the frames that they ask for
lanes.py                             their windows side by side on the device, and the passes over them
layers.py                            the Llama's layers with a KV cache of fixed size
matrix.py                            weights in half precision or in 8 bits
attention.py, attention_kernel.py    attention over as much of the cache as is filled
one_row.py, many_rows.py             passes of one token and of several, with what both do alike in alike.py
tokens.py                            both ends of a pass: tokens to states, logits to tokens
launch.py                            kernels that begin before the one ahead of them is done
capture.py                           work as a CUDA graph
"""
