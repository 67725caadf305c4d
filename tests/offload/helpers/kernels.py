"""Operands and runs for the tests of the update's kernels."""

import dataclasses
import itertools

import pytest
import torch

from offload.optimizer.formats import MASTER_DTYPES, STATE_DTYPES, StateFormat, scales_for, split
from offload.optimizer.kernel_choice import CheckedUpdate, Kind
from offload.optimizer.kernels import FusedUpdate, HyperParameters, Operands
from offload.optimizer.native_kernel import native_library

SETTINGS = HyperParameters(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
COMPACT = StateFormat()
FORMATS = [StateFormat(*names) for names in itertools.product(MASTER_DTYPES, STATE_DTYPES)]
# Each master and each kind of moments. The others are slow to compile.
FEW = [COMPACT, StateFormat("compact", "int8"), StateFormat("stochastic", "bf16")]
COMPILED = [format if format in FEW else pytest.param(format, marks=pytest.mark.slow) for format in FORMATS]

needs_compiler = pytest.mark.skipif(native_library(COMPACT) is None, reason="needs a C compiler with OpenMP")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Blockwise(FusedUpdate):
    """Stands for the Triton kernel on the host: torch's kernel on blocks, whole vectors each; gradients count twice.

    `calls` has the number of elements of each call.
    """

    name = "blockwise"
    block = 64

    def __init__(self):
        super().__init__(threads=1)
        self.calls: list[int] = []

    def supports(self, *_: object) -> bool:
        return True

    def __call__(self, operands: Operands, step, hyperparameters, scale: float = 1.0) -> None:
        count = operands.weight.numel()
        self.calls.append(count)
        steps = step.reshape(-1).expand(-(-count // self.block))
        for begin, step in zip(range(0, count, self.block), steps, strict=True):
            piece = operands.part(range(begin, min(begin + self.block, count)))
            whole = padded(piece, self.block)
            super().__call__(whole, step, hyperparameters, 2 * scale)
            for one, other in zip(tensors(piece), tensors(whole), strict=True):
                one.copy_(other[: len(one)])


class _Passed(CheckedUpdate):
    def _is_exact(self, kind: Kind) -> bool:
        return True


def checked(kernel: Blockwise) -> CheckedUpdate:
    """Returns the kernel as it is used on a GPU, where it has passed its check."""
    return _Passed(kernel, reference=kernel, other=FusedUpdate(1), device=torch.device("cpu"))


def padded(of: Operands, count: int) -> Operands:
    """Returns a copy with `count` elements, of which the last are ones."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        whole = torch.ones(count, dtype=tensor.dtype)
        whole[: len(tensor)] = tensor
        return whole

    fields = {field.name: getattr(of, field.name) for field in dataclasses.fields(of)}
    return Operands(**{name: copied(each) if isinstance(each, torch.Tensor) else each for name, each in fields.items()})


def operands(
    count: int,
    format: StateFormat = COMPACT,
    weight: torch.dtype = torch.bfloat16,
    gradient: torch.dtype = torch.bfloat16,
    whole: bool = False,
) -> Operands:
    """Weights from a normal distribution with moments of zero; `whole`: their masters are float32, whatever the format.

    Those are what compact masters stand for.
    """
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    weights, master = values.to(weight), torch.float32 if whole else format.master_dtype(weight)
    rest = None
    if master == torch.float32:
        rest = values.clone()
    elif master == torch.int16:
        rest = torch.empty(count, dtype=master)
        split(values, weights, rest)
    scales = [torch.zeros(scales_for(count)) if format.state_dtype == "int8" else None for _ in range(2)]
    return Operands(
        weight=values.clone() if weight == torch.float32 else weights,
        gradient=torch.zeros(count, dtype=gradient),
        exp_avg=torch.zeros(count, dtype=format.moment_dtype),
        exp_avg_sq=torch.zeros(count, dtype=format.moment_dtype),
        master=rest,
        exp_avg_scale=scales[0],
        exp_avg_sq_scale=scales[1],
        seed=77,
    )


def tensors(of: Operands) -> list[torch.Tensor]:
    """Returns the tensors that an update writes."""
    written = (of.weight, of.master, of.exp_avg, of.exp_avg_sq, of.exp_avg_scale, of.exp_avg_sq_scale)
    return [tensor for tensor in written if tensor is not None]


def run(
    kernel, on: Operands, steps: int = 5, hyperparameters: HyperParameters = SETTINGS, scale: float = 1.0
) -> Operands:
    for step in range(1, steps + 1):
        on.gradient.copy_(torch.randn(on.gradient.shape, generator=torch.Generator().manual_seed(step)))
        kernel(on, torch.tensor(float(step)), hyperparameters, scale)
    return on


def from_place(of: Operands, start: int) -> Operands:
    """The same tensors as a range of their parameter that begins at `start`."""
    return dataclasses.replace(of, start=start)
