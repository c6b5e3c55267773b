"""The console scripts. What a user can cause ends as one line on stderr and exit code 2."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from terra.config_files import config_dir, register_resolvers
from terra.errors import ConfigError, TerraError


def generate() -> None:
    """`terra-generate`: see `terra.generate`."""
    command("generate", _generate)


def _generate(config: DictConfig) -> None:
    # Only now: `--help` and a mistyped key should not wait for torch.
    from rich.console import Console

    from terra.generate import run

    run(config, Console(stderr=True))


def train() -> None:
    """`terra-train`: see `terra.training.world_model`."""
    command("train_world_model", _train)


def _train(config: DictConfig) -> None:
    values = _plain(config)
    from terra.training.world_model import run

    run(values)


def train_tokenizer() -> None:
    """`terra-train-tokenizer`: see `terra.training.tokenizer`."""
    command("train_tokenizer", _train_tokenizer)


def _train_tokenizer(config: DictConfig) -> None:
    values = _plain(config)
    from terra.training.tokenizer import run

    run(values)


def _plain(config: DictConfig) -> Any:
    """The settings as dictionaries and lists, none of them missing."""
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def evaluate() -> None:
    """`terra-evaluate`: see `terra.evaluation.evaluate`."""
    command("evaluate", _evaluate)


def _evaluate(config: DictConfig) -> None:
    from rich.console import Console

    from terra.evaluation.evaluate import run

    run(config, Console(stderr=True))


def rollout() -> None:
    """`terra-rollout`: see `terra.rollouts.batch`."""
    command("rollout", _rollout)


def _rollout(config: DictConfig) -> None:
    _plain(config)
    from terra.rollouts.batch import run

    if code := run(config):
        sys.exit(code)


def serve() -> None:
    """`terra-serve`: see `terra.serving.run`."""
    command("serve", _serve)


def _serve(config: DictConfig) -> None:
    with _needing("serve", "fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn"):
        from terra.serving.run import run
    run(config)


def check() -> None:
    """`terra-check`: see `terra.check`."""
    command("check", _check)


def _check(config: DictConfig) -> None:
    from terra.check import check

    if code := check(config):
        sys.exit(code)


def act_bench() -> None:
    """`terra-act-bench`: see `terra.act_bench.run`."""
    command("act_bench", _act_bench)


def _act_bench(config: DictConfig) -> None:
    _plain(config)
    from rich.console import Console

    with _needing("train", "matplotlib"):
        from terra.act_bench.run import run
    if code := run(config, Console(stderr=True)):
        sys.exit(code)


@contextmanager
def _needing(extra: str, *packages: str) -> Iterator[None]:
    """Name the extra, if one of its packages is not there to be imported in the block. Raises ConfigError."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in packages:
            raise
        raise ConfigError(f'this needs the package {error.name}: pip install "terra-world-model[{extra}]"') from None


def command(config_name: str, job: Callable[[DictConfig], None]) -> None:
    """Run `job` as a Hydra application over conf/CONFIG_NAME.yaml: composed settings in, one-line errors out."""
    register_resolvers()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise instead of printing several lines
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported, which is later
    guarded = _Guarded(job)
    entry = hydra.main(version_base="1.3", config_path=str(config_dir()), config_name=config_name)(guarded)
    try:
        entry()
    except (HydraException, OmegaConfBaseException) as error:
        _exit(_one_line(error))
    except ValueError as error:
        # Hydra's word for a group set to null; one of the job's own is a bug and keeps its traceback.
        if guarded.has_begun:
            raise
        _exit(_one_line(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


class _Guarded:
    """The job with its errors turned into exits at once: Hydra would print lines of its own around them."""

    def __init__(self, job: Callable[[DictConfig], None]) -> None:
        functools.update_wrapper(self, job)
        self._job = job
        self.has_begun = False

    def __call__(self, config: DictConfig) -> None:
        self.has_begun = True
        try:
            self._job(config)
        except TerraError as error:
            _exit(str(error))
        except OmegaConfBaseException as error:
            _exit(_one_line(error))


def _one_line(error: Exception) -> str:
    """Hydra's message without its layout and its search path: what was wrong, and the choices there are."""
    message = str(error).split("Config search path")[0]
    if error.__cause__ is not None:
        message += "\n" + str(error.__cause__).splitlines()[0]
    lines = [line.strip() for line in message.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("full_key", "object_type"))]
    return " ".join(dict.fromkeys(lines))


def _exit(message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
