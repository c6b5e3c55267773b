#!/usr/bin/env bash
# PEFT's conversion of a PiSSA adapter to LoRA loses what modules_to_save names, and marks the first factors as plain LoRA.
#
# Versions: peft 0.21.2, torch 2.13.0, transformers 5.19.0; Python 3.11. Seen 2026-11-29.
# Guess before: a converted adapter holds all that the trained one held, and the folder of the first factors is only read.
# Behavior: save_pretrained(path_initial_model_for_weight_conversion=FIRST) writes lora_A and lora_B alone. A module of
# modules_to_save is in adapter_config.json and not in the file, so that from_pretrained ends with a KeyError. It also writes
# init_lora_weights=true into FIRST/adapter_config.json, whose factors belong to a base weight that they were taken out
# of: whoever loads FIRST later is no longer told that it is PiSSA.
# Output seen:
#     unconverted: head, lora_A, lora_B; converted: lora_A, lora_B
#     modules_to_save of the converted adapter: ['head']; loaded by PEFT: KeyError
#     init_lora_weights of FIRST: pissa before, True after
# Exit code: 0 while this holds, 1 once it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check peft==0.21.2 torch==2.13.0 transformers==5.19.0
cat > "$folder/run.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file



def make_base() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("body", torch.nn.Linear(8, 8))
    model.add_module("head", torch.nn.Linear(8, 8))
    return model


lora = LoraConfig(r=2, target_modules=["body"], modules_to_save=["head"], init_lora_weights="pissa")
adapted = get_peft_model(make_base(), lora)


def config(folder: str) -> dict:
    return json.loads((Path(folder) / "adapter_config.json").read_text())


def kinds(folder: str) -> list[str]:
    names = load_file(f"{folder}/adapter_model.safetensors")
    return sorted({kind for kind in ("lora_A", "lora_B", "head") for name in names if f".{kind}." in name})


adapted.save_pretrained("first")
before = config("first")["init_lora_weights"]
with torch.no_grad():
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.add_(0.1 * torch.randn_like(parameter))
adapted.save_pretrained("trained")
adapted.save_pretrained("converted", path_initial_model_for_weight_conversion="./first")
after = config("first")["init_lora_weights"]
print(f"unconverted: {', '.join(kinds('trained'))}; converted: {', '.join(kinds('converted'))}")
loaded = "fine"
try:
    PeftModel.from_pretrained(make_base(), "./converted")
except KeyError as error:
    loaded = type(error).__name__
print(f"modules_to_save of the converted adapter: {config('converted')['modules_to_save']}; loaded by PEFT: {loaded}")
print(f"init_lora_weights of FIRST: {before} before, {after} after")
found = (kinds("trained"), kinds("converted"), config("converted")["modules_to_save"], loaded, before, after)
expected = (["head", "lora_A", "lora_B"], ["lora_A", "lora_B"], ["head"], "KeyError", "pissa", True)
sys.exit(0 if found == expected else 1)
PYTHON
cd "$folder" && "$folder/venv/bin/python" run.py 2>"$folder/log"
