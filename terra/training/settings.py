"""The settings of the training loop, shared by all trainers, and those of `terra tokenize`."""

from typing import Literal, Self

from pydantic import model_validator

from terra.dataset.checks import Names
from tokenizer.settings import Count, Device, Dtype, FilePath, Fraction, Natural, NonNegative, Positive, Settings, Text


class LoopConfig(Settings):
    """Settings of the training loop.

    Attributes:
        output: folder for `log.jsonl`, `tensorboard/` and `state/`.
        batch_size: samples that one process puts through the model at once.
        accumulate: batches whose gradients are averaged before an update: a step sees batch_size x accumulate x
            processes samples.
        max_steps, max_seconds: the run ends at the first of the two that it meets. Seconds are those spent in the loop,
            compilation and saving included, over all resumed parts of the run.
        schedule: what the cosine decay of the learning rate and all else that changes over a run follow: "steps", or
            "time", from the end of the first step (which compiles) to `max_seconds`.
        learning_rate: peak, after `warmup_steps` of linear warm-up.
        final_learning_rate: the end of the cosine, as a fraction of the peak.
        muon: Muon (Jordan et al. 2024; scaled to the root mean square of AdamW's updates, as in Liu et al. 2025, arXiv
            2502.16982) updates the weight matrices of a transformer's layers, with this multiple of the learning rate;
            None: AdamW updates them as all other parameters. Not for adapters.
        weight_decay: on parameters of two and more axes.
        clip_norm: bound of the gradient's norm.
        ema_decay: decay of the averaged weights (EMA) in each step.
        ema_every_steps: steps between two updates of the EMA, each with the decay of that many steps.
        compile_model: torch.compile the model's forward.
        save_every_seconds, log_every_seconds: intervals, in seconds spent in the loop.
        peak_flops: the device's peak FLOPs a second, for the model FLOPs utilization (MFU); 989e12 is the dense bf16
            peak of an H100 or H200 SXM (NVIDIA's data sheets).
        seed: seed of the drawn samples; the caller initializes the weights, the same in every process.
    """

    output: FilePath
    batch_size: Count
    accumulate: Count = 1
    max_steps: Count | None = None
    max_seconds: Positive | None = None
    schedule: Literal["steps", "time"] = "steps"
    learning_rate: Positive = 3e-4
    final_learning_rate: Fraction = 0.05
    warmup_steps: Natural = 100
    muon: Positive | None = None
    weight_decay: NonNegative = 0.01
    beta2: Fraction = 0.95
    clip_norm: Positive = 1.0
    ema_decay: Fraction = 0.999
    ema_every_steps: Count = 1
    compile_model: bool = False
    save_every_seconds: NonNegative = 120.0
    log_every_seconds: Positive = 10.0
    peak_flops: Positive = 989e12
    seed: Natural = 0

    @model_validator(mode="after")
    def _ends(self) -> Self:
        needed = "max_steps" if self.schedule == "steps" else "max_seconds"
        if getattr(self, needed) is None:
            raise ValueError(f"{needed}: expected a number with schedule={self.schedule}, got null")
        return self


class TokenizeSettings(Settings):
    """The whole of conf/tokenize.yaml.

    Attributes:
        data: folder of driving.
        checkpoint: the tokenizer, see `terra.training.start.find_tokenizer`.
        output: folder of the tokens; complete files in it are kept.
        splits: splits of `data`.
        device: where the tokenizer computes; None takes GPUs if there are any.
        workers: videos decoded at once by each process; 0 decodes one after another.
        batch_size: frames that the tokenizer encodes at once.
        dtype: of the encoder.
        compile_model: whether the encoder is compiled.
    """

    data: FilePath
    checkpoint: Text
    output: FilePath
    splits: Names
    device: Device | None
    workers: Natural
    batch_size: Count
    dtype: Dtype
    compile_model: bool
