"""What `terra-check` does: both checkpoints, the pair, and the bit order, each as far as the files allow."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from terra.check.bit_order import MIN_MARGIN, BitOrderLosses, measure_bit_orders
from terra.check.checkpoints import Tokenizer, WorldModel, check_pair, check_tokenizer, check_world_model
from terra.check.report import PAIR, Findings, print_findings, write_findings
from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineSpec
from terra.errors import ConfigError
from terra.rollout import load_inputs
from terra.world_model import load_world_model
from tokenizer import LFQTokenizer

BIT_ORDER = "bit order"


def check(config: DictConfig) -> int:
    """Check as conf/check.yaml says, print the findings, and return the exit status: 0, or 1 if anything failed.

    A checkpoint is compared with what is published of it if its `subfolder` is that of a published one.

    Raises:
        TerraError: a setting, the context frames or the trajectory can't be used, or the report can't be written.
    """
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    _check_settings(values)
    findings = Findings()
    with Console(stderr=True).status("reading the checkpoints"):
        tokenizer = check_tokenizer(config.tokenizer, findings, hashes=values["hashes"])
        world_model = check_world_model(config.world_model, findings, hashes=values["hashes"])
        losses = None
        if tokenizer is not None and world_model is not None and check_pair(tokenizer, world_model, findings):
            losses = _check_bit_order(values, tokenizer, world_model, findings)
    print_findings(Console(), findings)
    if values["report"] is not None:
        bit_order = None if losses is None else asdict(losses) | {"meant": losses.meant}
        write_findings(Path(values["report"]), findings, {"bit_order": bit_order})
    return int(findings.failed)


def _check_settings(values: dict[str, Any]) -> None:
    for name, least in (("num_frames", 2), ("window", 2), ("num_windows", 1)):
        if type(values[name]) is not int or values[name] < least:
            raise ConfigError(f"{name}: expected a whole number of at least {least}, got {values[name]!r}")
    if values["window"] > values["num_frames"]:
        raise ConfigError(f"window: expected at most num_frames={values['num_frames']}, got {values['window']}")
    if (values["context"] is None) != (values["trajectory"] is None):
        raise ConfigError("context and trajectory: expected both or neither, got one")
    if not isinstance(values["hashes"], bool):
        raise ConfigError(f"hashes: expected true or false, got {values['hashes']!r}")
    torch_dtype(values["dtype"])
    torch_device(values["device"])


def _check_bit_order(
    values: dict[str, Any], tokenizer: Tokenizer, world_model: WorldModel, findings: Findings
) -> BitOrderLosses | None:
    if values["context"] is None:
        findings.add(PAIR, BIT_ORDER, "unknown", "not looked at: needs real frames, context= and trajectory=")
        return None
    model, num_frames = world_model.config, values["num_frames"]
    if values["window"] > model.layout.max_frames:
        raise ConfigError(f"window: expected at most the model's {model.layout.max_frames}, got {values['window']}")
    inputs = load_inputs(
        values["context"],
        values["trajectory"],
        sample_id=values["sample_id"],
        num_frames=num_frames,
        num_context=num_frames,
        image_size=tokenizer.config.image_size,
        spec=EngineSpec.of(model),
    )
    device = torch_device(values["device"])
    losses = measure_bit_orders(
        load_world_model(world_model.folder, dtype=torch_dtype(values["dtype"]), device=device),
        LFQTokenizer.from_pretrained(tokenizer.folder).to(device),
        inputs.context_frames,
        inputs.actions,
        window=values["window"],
        num_windows=values["num_windows"],
    )
    _judge(losses, tokenizer, findings)
    return losses


def _judge(losses: BitOrderLosses, tokenizer: Tokenizer, findings: Findings) -> None:
    configured = tokenizer.config.quantizer_config.bit_order
    measured = ", ".join(f"{loss:.3f} as {order}" for order, loss in losses.losses.items())
    measured = f"nats a token: {measured}, {losses.chance:.3f} by chance"
    if losses.meant is None:
        undecided = f"neither is {MIN_MARGIN} nats better than the other and than chance"
        findings.add(PAIR, BIT_ORDER, "unknown", f"{undecided}; {measured}")
    elif losses.meant == configured:
        findings.add(PAIR, BIT_ORDER, "passed", f"{configured}, better by {losses.margin:.3f}; {measured}")
    else:
        wrong = f"expected quantizer_config.bit_order {losses.meant!r}, got {configured!r}"
        wrong = f"{tokenizer.folder / 'config.json'}: {wrong}, which is worse by {losses.margin:.3f}"
        findings.add(PAIR, BIT_ORDER, "failed", f"{wrong}; {measured}")
