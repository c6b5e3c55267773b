"""Sets defaults of vLLM's environment variables; imported before vLLM, which reads some of them at import."""

import logging
import os
import warnings

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in a thread of this process
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # processes of tensor parallelism: a fork of a thread of many may hang
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1" if (os.cpu_count() or 1) > 1 else "0",  # for everything but the engine core
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)

# vLLM looks at every attribute of every module when it starts, deprecated ones too.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")

# Said on every CPU machine: that Triton has no CPU backend, that there is no CUDA runtime.
for _name in ("vllm", "torch.utils.cpp_extension"):
    logging.getLogger(_name).setLevel(logging.ERROR)
