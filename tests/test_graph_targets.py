"""The Triton kernels compile for every supported GPU, without one at hand, and fit its shared memory."""

import dataclasses

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction, MockTensor
from triton.tools.tensor_descriptor import TensorDescriptor

from terra.benchmark.measure import SAMPLING
from terra.benchmark.model import SHAPES
from terra.engine.graph.kernels import gemm
from terra.engine.graph.kernels.backend import TritonBackend
from terra.engine.graph.kernels.launch import DeviceLimits
from terra.engine.graph.quantization import FP8, Matrix
from terra.engine.graph.slots import Slots
from terra.engine.graph.step import DecodeSteps
from terra.engine.graph.weights import Norm
from terra.world_model import ARCHITECTURES, LlamaActionConfig

# Compute capability: streaming multiprocessors of such a GPU, and KiB of shared memory that a CTA can have (CUDA C++
# Programming Guide, "Technical Specifications per Compute Capability").
GPUS = {80: (108, 163), 86: (84, 99), 89: (128, 99), 90: (132, 227), 100: (148, 227), 120: (170, 99)}
pytestmark = pytest.mark.slow

FIRST_WITH_FP8, HOPPER = 89, 90
FLOAT32 = (86, 90)  # the most and the least pressed for shared memory

NARROWEST_AND_WIDEST = [(1, 0), (8, 31)]
"""Slots and drafts that take tiles of the fewest and the most tokens, and attention with and without partials."""
BETWEEN = [(64, 0), (1, 31), (4, 31)]  # tiles of 64, 32 and 128 tokens
ALL_WIDTHS = (86, 90)  # a GPU of each kind; a GPU that compiles and fits the widest tile takes those between, too
LIKE_86 = (80, 89)  # of one kind with it: in bfloat16 they compile what is widest
LIKE_90 = (100, 120)  # with its instructions and more: in 8 bits they compile what is widest


class _Driver:
    """As if a GPU of this compute capability were there, whose number is its capability."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


def without_contents(argument):
    """What stands for an argument of a kernel when it is compiled alone."""
    if isinstance(argument, TensorDescriptor):
        return dataclasses.replace(argument, base=MockTensor(argument.base.dtype, argument.shape))
    return MockTensor(argument.dtype) if isinstance(argument, torch.Tensor) else argument


@pytest.fixture
def compiled(request, monkeypatch):
    """All kernels that are launched in the test, compiled for the GPU of this capability instead."""
    found = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        args = [without_contents(arg) for arg in args]
        found.append(run(self, *args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", _Driver(request.getfixturevalue("capability")))
    monkeypatch.setattr(knobs.compilation, "disable_line_info", True)  # which nobody reads here, and takes time
    return found


def meta_slots(num_slots, drafts, dtype, *, fp8):
    """Slots of one layer of Terra v1's shape, whose tensors have no contents."""
    config = LlamaActionConfig(**{**SHAPES["terra_v1"], "num_hidden_layers": 1}, dtype=dtype)
    with torch.device("meta"):
        model = ARCHITECTURES["LlamaActionForCausalLM"](config).to(dtype)
    slots = Slots(model, num_slots, drafts, step_tokens=256, fp8_cache=fp8)
    if fp8:
        weights = slots.weights
        weights.lm_head, weights.layers = quantized(weights.lm_head), [quantized(layer) for layer in weights.layers]
        weights.norms = [quantized(norm) for norm in weights.norms]
    return slots


def quantized(part):
    """A matrix, a norm or a layer as in 8 bits."""
    if isinstance(part, Matrix):
        scale = torch.empty(len(part.weight), device="meta")
        return Matrix(torch.empty_like(part.weight, dtype=FP8), part.dtype, scale, input_scale=1.0)
    if isinstance(part, Norm):
        return dataclasses.replace(part, output_scale=1.0)
    return type(part)(*(quantized(getattr(part, field.name)) for field in dataclasses.fields(part)))


@pytest.mark.parametrize(
    ("capability", "dtype", "fp8"),
    [
        (capability, dtype, fp8)
        for capability in GPUS
        for dtype, fp8 in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False))
        if (not fp8 or capability >= FIRST_WITH_FP8) and (dtype != torch.float32 or capability in FLOAT32)
    ],
    ids=lambda value: {torch.bfloat16: "bf16", torch.float32: "fp32", True: "fp8", False: "wide"}.get(
        value, str(value)
    ),
)
def test_kernels_compile_and_fit(compiled, capability, dtype, fp8, monkeypatch):
    num_sms, kib = GPUS[capability]
    limits = DeviceLimits(num_sms, kib << 10, pdl=capability >= HOPPER, tma=capability >= HOPPER)
    between = BETWEEN if capability in ALL_WIDTHS and dtype != torch.float32 else []
    widest_alone = capability in (LIKE_90 if fp8 else LIKE_86)
    ends = NARROWEST_AND_WIDEST[1:] if widest_alone else NARROWEST_AND_WIDEST
    for num_slots, drafts in ends + between:
        slots = meta_slots(num_slots, drafts, dtype, fp8=fp8)
        steps = DecodeSteps(slots, TritonBackend(limits, capture=lambda work, mutated: work))
        steps.step(frozenset({SAMPLING}), num_slots)()
    if between:  # slots that share a context
        slots = meta_slots(64, 0, dtype, fp8=fp8)
        steps = DecodeSteps(slots, TritonBackend(limits, capture=lambda work, mutated: work))
        steps.step(frozenset({SAMPLING}), 64, True)()
        # GEMMs that sum their splits, which take 1,024 tokens.
        monkeypatch.setattr(gemm, "_MIN_SUMMED_TOKENS", 256)
        slots = meta_slots(8, 31, dtype, fp8=fp8)
        steps = DecodeSteps(slots, TritonBackend(limits, capture=lambda work, mutated: work))
        steps.step(frozenset({SAMPLING}), 8)()
    kernels = {kernel.hash: kernel for kernel in compiled}.values()
    names = {kernel.name for kernel in kernels}
    assert names >= {"_embed", "_gemm", "_rope_and_store", "_add_rms_norm", "_gumbel_argmax", "_accept"}
    assert "_attend" in names or widest_alone
    assert ("_attend_wide" in names) == (dtype != torch.float32)
    assert [(k.name, k.metadata.shared) for k in kernels if k.metadata.shared > kib << 10] == []
    if capability == HOPPER and dtype != torch.float32:  # tiles by TMA, except of a cache in 8 bits
        wide = [kernel.asm["ptx"] for kernel in kernels if kernel.name == "_attend_wide"]
        assert ["cp.async.bulk.tensor" in ptx for ptx in wide] == [not fp8] * len(wide)
    # A chunk of 128 columns is four instructions, and ptxas waits once for them.
    if capability == HOPPER and fp8:
        gemms = [kernel.asm["sass"] for kernel in kernels if kernel.name == "_gemm"]
        assert all(sass.count("QGMMA") >= 4 * sass.count("WARPGROUP.DEPBAR") > 0 for sass in gemms)
    for kernel in kernels:
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == limits.pdl, kernel.name
        assert ("griddepcontrol.launch_dependents" in kernel.asm["ptx"]) == limits.pdl, kernel.name


@pytest.mark.parametrize("capability", [HOPPER])
@pytest.mark.parametrize("fp8", [False, True], ids=["wide", "fp8"])
def test_gemms_compile_for_columns_that_are_no_whole_blocks(compiled, capability, fp8):
    """The sizes of `terra_v1` are multiples of every tile's; the shipped model's 1,408 are not, in 8 bits."""
    num_sms, kib = GPUS[capability]
    limits = DeviceLimits(num_sms, kib << 10, pdl=True, tma=True)
    columns = 1408 if fp8 else 1000
    with torch.device("meta"):
        matrix = Matrix(torch.empty(512, columns, dtype=torch.bfloat16), torch.bfloat16)
        if fp8:
            matrix = quantized(matrix)
        for tokens in (1, 32, 64, 128, 256, 1024):  # each choice of tiles, and sums of splits
            states = torch.empty(tokens, 1, columns, dtype=matrix.weight.dtype)
            gemm.split_k_gemm(states, matrix, limits)
            gemm.gated_gemm(states, matrix, limits, None)
            gemm.lm_head_gemm(states, matrix, limits)
    assert {kernel.name for kernel in compiled} == {"_gemm"}
