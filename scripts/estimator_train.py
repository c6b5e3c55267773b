"""Train the motion estimator: `python scripts/estimator_train.py data=DIR output=DIR checkpoint=DIR device=cuda`.

Settings: conf/train_estimator.yaml. The same command resumes an interrupted run.
"""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from terra.cli import command


def train(config: DictConfig) -> None:
    """Check the settings, load the recordings, train and evaluate."""
    values: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    from terra.evaluation.estimator import EstimatorConfig
    from terra.evaluation.estimator_training import load_recordings, train_estimator
    from terra.training.processes import start_processes
    from terra.training.settings import LoopConfig
    from tokenizer import LFQTokenizer

    loop = LoopConfig.from_values(values)
    accelerator = start_processes(values["device"])
    tokenizer = None
    if values["checkpoint"] is not None:
        tokenizer = LFQTokenizer.from_pretrained(Path(values["checkpoint"])).to(accelerator.device)
    size = (int(values["estimator"]["image_size"][0]), int(values["estimator"]["image_size"][1]))
    options = {"window": values["window"], "workers": values["workers"]}
    options |= {"tokenizer": tokenizer, "device": accelerator.device}
    recordings, held_out = (
        load_recordings(Path(values["data"]), values[split], size, max_frames=count, corruption=corruption, **options)
        for split, count, corruption in (
            ("train_split", values["max_frames"], values["corruption"]),
            ("held_out_split", values["held_out_frames"], 0.0),
        )
    )
    model = EstimatorConfig(fps=recordings.fps, **{**values["estimator"], "image_size": size})
    train_estimator(
        recordings,
        held_out,
        model,
        loop,
        accelerator,
        window=values["window"],
        evaluation_windows=values["evaluation_windows"],
    )


if __name__ == "__main__":
    command("train_estimator", train)
