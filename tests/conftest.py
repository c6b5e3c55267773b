"""Small random models and the engines over them, built once for all tests."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Two threads on two busy cores make vLLM wait for itself; one is enough for models of this size.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# vLLM would bind each process of tensor parallelism to a NUMA node of its own. It reads the variable once.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["TERRA_WORLDS"] = os.devnull  # worlds that someone has unpacked stay out

import pytest
from hypothesis import HealthCheck, settings

# torch, tiny and terra are imported where they are used: the process that starts the workers needs none of them, and
# the workers wait for it.
if TYPE_CHECKING:
    from terra.engine.base import Engine

# Garbage collection takes a third of the time of the tests' imports, whose objects stay to the end.
gc.disable()

# A busy machine is no failure.
settings.register_profile("terra", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("terra")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files whose every test is slow unread in the fast lane: their imports, vLLM among them, take 10 s."""
    if "not slow" not in config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    marks = re.search(r"^pytestmark = (\[.*?^\]|.*?$)", collection_path.read_text(), re.MULTILINE | re.DOTALL)
    return True if marks is not None and "pytest.mark.slow" in marks[1] else None


def pytest_collection_finish() -> None:
    """Turn garbage collection on again, with the million objects that exist by now frozen for good.

    vLLM collects garbage several times whenever an engine starts or ends, a second each time, and unfreezes all objects
    at each end.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that starts vLLM as slow, and put files with slow tests first, so that workers end together."""
    for item in items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        named = any(isinstance(value, str) and value == "vllm" for value in parameters)
        if named or "vllm_engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `needs_cuda` run where TERRA_TEST_DEVICE says that there is a GPU, and fail where there is none."""
    if item.get_closest_marker("needs_cuda") is None:
        return
    import torch
    from tiny import DEVICE

    if DEVICE == "cpu":
        pytest.skip("needs an NVIDIA GPU, and TERRA_TEST_DEVICE=cuda")
    if not torch.cuda.is_available():
        pytest.fail(f"TERRA_TEST_DEVICE={DEVICE}, but no CUDA device is available", pytrace=False)


@pytest.fixture(autouse=True)
def _restore_torch_rng() -> Iterator[None]:
    import torch

    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def _remove_log_handlers() -> Iterator[None]:
    """Take away the log handlers that a command run in this process leaves, since their stream ends with the test."""
    root = logging.getLogger()
    before = list(root.handlers)
    yield
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import save_tiny

    from terra.world_model import LlamaActionV2ForCausalLM

    return save_tiny(tmp_path_factory.mktemp("models") / "v2", LlamaActionV2ForCausalLM)


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from tiny import tiny_tokenizer_config

    from tokenizer import LFQTokenizer

    folder = tmp_path_factory.mktemp("models") / "tokenizer"
    torch.manual_seed(0)
    LFQTokenizer(tiny_tokenizer_config()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with asyncio.Runner() as runner:
        yield runner.get_loop()


@pytest.fixture(scope="session")
def wait(loop: asyncio.AbstractEventLoop) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return loop.run_until_complete


@pytest.fixture(scope="session")
def hf_engine(tiny_model: Path, wait: Callable[..., Any]) -> Iterator[Engine]:
    from tiny import DEVICE

    from terra.engine.hf import HFEngine

    engine = HFEngine(tiny_model, device=DEVICE)
    yield engine
    wait(engine.close())


@pytest.fixture(scope="session")
def jacobi_engine(tiny_model: Path, wait: Callable[..., Any]) -> Iterator[Engine]:
    from tiny import DEVICE

    from terra.engine.jacobi import JacobiEngine

    engine = JacobiEngine(tiny_model, drafts=4, device=DEVICE)
    yield engine
    wait(engine.close())


@pytest.fixture(scope="session")
def graph_engine(tiny_model: Path, wait: Callable[..., Any]) -> Iterator[Engine]:
    from tiny import DEVICE

    from terra.engine.graph.engine import GraphEngine

    engine = GraphEngine(tiny_model, drafts=4, max_sessions=5, dtype="float32", device=DEVICE)
    yield engine
    wait(engine.close())


# One vLLM engine a process at a time: a module's is closed before the next module's starts.
@pytest.fixture(scope="module")
def vllm_engine(tiny_model: Path, wait: Callable[..., Any]) -> Iterator[Engine]:
    from tiny import FEW_BLOCKS

    from terra.engine.vllm.engine import VllmEngine

    engine = VllmEngine(tiny_model, max_sessions=32, engine_args=FEW_BLOCKS)
    yield engine
    wait(engine.close())


@pytest.fixture(scope="session")
def persistence_engine(tiny_model: Path, wait: Callable[..., Any]) -> Iterator[Engine]:
    from terra.engine.persistence import PersistenceEngine

    engine = PersistenceEngine.from_pretrained(tiny_model)
    yield engine
    wait(engine.close())


@pytest.fixture(scope="session")
def accelerator():
    """The one process of a training on the CPU."""
    from terra.training.processes import start_processes

    return start_processes("cpu")
