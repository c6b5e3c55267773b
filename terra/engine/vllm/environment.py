"""Defaults of vLLM's environment variables; to be imported before vLLM, which reads some when it is imported."""

import os
import warnings

DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in a thread of ours
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

for _name, _value in DEFAULTS.items():
    os.environ.setdefault(_name, _value)

# vLLM looks at every attribute of every module when it starts, deprecated ones too.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
