"""Tests of the Triton kernels in Triton's interpreter, on a CPU: `TRITON_INTERPRET=1 pytest tests/interpreted`.

Triton decides at its import whether kernels are compiled or interpreted, so these tests need a process of their own.
Without the variable nothing is collected here; `tests/test_graph_interpreted.py` starts that process.
"""

import dataclasses
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(autouse=True)
def _correct_rounding_to_fp8(monkeypatch):
    """The interpreter's own rounding to 8 bits loses carries (triton 3.7)."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def converted(values, kind, to, mode):
        if kind != tl.float32 or to != tl.float8e4nv:
            return convert(values, kind, to, mode)
        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@pytest.fixture(autouse=True, scope="session")
def _language_replaced_once():
    """The interpreter replaces Triton's functions at each call of a kernel's function: a fifth of the time."""
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set()

    def replace_once(function):
        if id(function.__globals__) not in replaced:
            replaced.add(id(function.__globals__))
            replace(function)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", replace_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_discarded_work():
    """The interpreter checks sums and products for overflow, and drops the result: most of the time.

    Kernels are compiled without that check, too. It also makes a table of numpy's types at each use of it.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    assert not options.debug, "an overflow would be an error"
    numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def numpy_type_once(dtype):
        kind = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(kind, tl.pointer_type):
            return numpy_type(kind)
        if kind.name not in numpy_types:
            numpy_types[kind.name] = numpy_type(kind)
        return numpy_types[kind.name]

    with pytest.MonkeyPatch.context() as monkeypatch:
        without = dataclasses.replace(options, sanitize_overflow=False)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", without)
        monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type_once)
        yield


@pytest.fixture(autouse=True)
def _few_partials(monkeypatch):
    """So few in a bundle, and loaded together, that both loops come round again at the lengths of these tests.

    And 16 queries are many, and four blocks of 32 are wider, which take less time.
    """
    from terra.engine.graph.kernels import attention

    monkeypatch.setattr(attention, "_BUNDLE", 2)
    monkeypatch.setattr(attention, "_FINE_BUNDLE", 1)
    monkeypatch.setattr(attention, "_FINE_BLOCKS", 2)
    monkeypatch.setattr(attention, "_BLOCKS_AHEAD", 2)
    monkeypatch.setattr(attention, "_WIDE_BLOCKS_AHEAD", 2)
    monkeypatch.setattr(attention, "_WIDE_AHEAD", 2)
    monkeypatch.setattr(attention, "_WIDE", dataclasses.replace(attention._WIDE, block_queries=16))
    monkeypatch.setattr(attention, "_WIDER", dataclasses.replace(attention._WIDER, block_queries=32))
    monkeypatch.setattr(attention, "_MIN_WIDER_BLOCKS", 4)
