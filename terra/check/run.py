"""What `terra check` does: both checkpoints, the pair, and the bit order, each as far as the files allow."""

from dataclasses import asdict

from rich.console import Console

from terra.check.bit_order import MIN_MARGIN, BitOrderLosses, measure_bit_orders
from terra.check.checkpoints import Tokenizer, WorldModel, check_pair, check_tokenizer, check_world_model
from terra.check.report import PAIR, Findings, print_findings, write_findings
from terra.check.settings import CheckSettings
from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineSpec
from terra.errors import ConfigError
from terra.inputs import action_file
from terra.rollout import load_inputs
from terra.world_model import load_world_model
from tokenizer import LFQTokenizer

BIT_ORDER = "bit order"


def check(settings: CheckSettings) -> int:
    """Check as conf/check.yaml says, print the findings, and return the exit status: 0, or 1 if anything failed.

    A checkpoint is compared with what is published if the settings, or its class and counts, say that it is published.

    Raises:
        TerraError: a setting, the context frames or the actions can't be used, or the report can't be written.
    """
    torch_device(settings.device)
    findings = Findings()
    with Console(stderr=True).status("reading the checkpoints"):
        tokenizer = check_tokenizer(settings.tokenizer, findings, hashes=settings.hashes)
        world_model = check_world_model(settings, findings, hashes=settings.hashes)
        losses = None
        if tokenizer is not None and world_model is not None and check_pair(tokenizer, world_model, findings):
            losses = _check_bit_order(settings, tokenizer, world_model, findings)
    print_findings(Console(), findings)
    if settings.report is not None:
        bit_order = None if losses is None else asdict(losses) | {"meant": losses.meant}
        write_findings(settings.report, findings, {"bit_order": bit_order})
    return int(findings.failed)


def _check_bit_order(
    settings: CheckSettings, tokenizer: Tokenizer, world_model: WorldModel, findings: Findings
) -> BitOrderLosses | None:
    if settings.context is None:
        needed = "real frames, context=, and trajectory= or actions="
        findings.add(PAIR, BIT_ORDER, "unknown", f"not looked at: needs {needed}")
        return None
    model, num_frames = world_model.config, settings.num_frames
    if settings.window > model.layout.max_frames:
        raise ConfigError(f"window: expected at most the model's {model.layout.max_frames}, got {settings.window}")
    spec = EngineSpec.of(model)
    inputs = load_inputs(
        settings.context,
        action_file(spec.space, trajectory=settings.trajectory, actions=settings.actions),
        sample_id=settings.sample_id,
        num_frames=num_frames,
        num_context=num_frames,
        image_size=tokenizer.config.image_size,
        spec=spec,
    )
    device = torch_device(settings.device)
    losses = measure_bit_orders(
        load_world_model(world_model.folder, dtype=torch_dtype(settings.dtype, device), device=device),
        LFQTokenizer.from_pretrained(tokenizer.folder).to(device),
        inputs.context_frames,
        inputs.actions,
        window=settings.window,
        num_windows=settings.num_windows,
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
