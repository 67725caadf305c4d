"""The choice of a kernel: made once, never a failure, and never a kernel that has not the bits of the host's."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offload.optimizer import kernel_choice
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernel_choice import (
    COUNT,
    CheckedUpdate,
    Kind,
    copied_to,
    count_different,
    hard_operands,
    measure_update_rate,
    update_on,
)
from offload.optimizer.kernels import FusedUpdate, HyperParameters, Operands
from offload.optimizer.native_kernel import native_library
from tests.offload.helpers.kernels import FORMATS, SETTINGS, needs_gpu, operands, run, tensors

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class StandIn(FusedUpdate):
    """Stands for the Triton kernel."""

    name = "stand-in"
    block = 1024


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "SAMPLE", 1 << 12)


@pytest.fixture
def uncached():
    """Makes the choice of a kernel as if for the first time in the process."""
    for cached in (native_library, kernel_choice._on_host, kernel_choice._on_device):
        cached.cache_clear()
    yield
    for cached in (native_library, kernel_choice._on_host, kernel_choice._on_device):
        cached.cache_clear()


def test_the_choice_is_made_once(uncached: None):
    chosen = update_on(CPU, 1)
    assert chosen.name == ("fused" if native_library(StateFormat()) is None else "native")
    assert update_on(CPU, 1) is chosen
    assert measure_update_rate(1) > 0


def test_without_a_compiler_the_fused_kernel_is_taken(uncached: None, monkeypatch, caplog, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.INFO):
        assert update_on(CPU, 1).name == "fused"
    assert [record.message for record in caplog.records] == [
        "no C compiler found: AdamW takes torch's fused kernel, about a tenth as fast"
    ]


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.sampled
def test_a_gpu_takes_the_checked_kernel_but_for_8_bits(uncached: None, monkeypatch, format: StateFormat):
    monkeypatch.setattr(kernel_choice, "_triton_update", StandIn)
    kernel = update_on(GPU, 1, format)
    assert isinstance(kernel, FusedUpdate if format.state_dtype == "int8" else CheckedUpdate)
    assert kernel.name == ("fused" if format.state_dtype == "int8" else "stand-in")
    if format.state_dtype != "int8":
        assert update_on(GPU, 2, format) is kernel
        assert update_on(torch.device("cuda", 1), 1, format) is not kernel


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'triton'"), RuntimeError("0 active\n drivers")])
def test_without_triton_a_gpu_takes_torchs_kernel_with_one_warning(
    uncached: None, monkeypatch, caplog, error: Exception
):
    def fail() -> None:
        raise error

    monkeypatch.setattr(kernel_choice, "_triton_update", fail)
    for _ in range(2):
        assert isinstance(update_on(GPU, 1), FusedUpdate)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    reason = " ".join(str(error).split())
    assert record.message == (
        f"updates on cuda:0 take torch's kernel, which is slower: Triton cannot be used: {reason}"
    )


NAMES = ("weight", "master", "exp_avg", "exp_avg_sq")
KINDS = [
    Kind(weight, gradient, format.moment_dtype, format.master_dtype(weight))
    for format in FORMATS if format.state_dtype != "int8"
    for weight, gradient in itertools.product((torch.bfloat16, torch.float32), repeat=2)
]  # fmt: skip


class Fast:
    """torch's kernel, whose results `spoil` changes before they are returned."""

    name = "fast"

    def __init__(self, spoil: Callable[[Operands], object] = lambda _: None):
        self.calls = 0
        self._spoil = spoil

    def supports(self, operands: Operands, hyperparameters: HyperParameters) -> bool:
        return operands.exp_avg.dtype != torch.uint8

    def __call__(self, operands: Operands, step, hyperparameters, scale: float = 1.0) -> None:
        self.calls += 1
        FusedUpdate(1)(operands, step, hyperparameters, scale)
        self._spoil(operands)


class Other(Fast):
    name = "other"


def checked(fast: Fast) -> tuple[CheckedUpdate, Other]:
    other = Other()
    return CheckedUpdate(fast, FusedUpdate(1), other, CPU), other


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_exact_kernel_is_taken_after_one_check_a_kind(kind: Kind, caplog):
    fast = Fast()
    kernel, other = checked(fast)
    on = hard_operands(kind)
    kernel(on, torch.ones(()), SETTINGS)
    first = fast.calls
    kernel(on, torch.ones(()), SETTINGS)
    assert first > 1
    assert fast.calls == first + 1
    assert other.calls == 0
    assert not caplog.records


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [0, COUNT - 1])
def test_a_kernel_with_one_other_bit_is_not_taken(name: str, place: int, caplog):
    def spoil(on: Operands) -> None:
        bits = getattr(on, name).view(torch.int16)
        # Of the sign: a NaN stays one, and a zero becomes the other.
        places = bits.view(len(on.weight), -1)[:, -1]
        number = place if not getattr(on, name)[place].isnan() else int((~getattr(on, name).isnan()).nonzero()[0])
        places[number] ^= -0x8000

    kernel, other = checked(Fast(spoil))
    on = operands(300, StateFormat())
    expected = run(FusedUpdate(1), operands(300, StateFormat()), steps=2)
    run(kernel, on, steps=2)
    assert other.calls == 2
    assert all(torch.equal(*pair) for pair in zip(tensors(on), tensors(expected), strict=True))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"1 of {COUNT} numbers of {name} differ from those of the fused kernel" in caplog.records[0].message


def test_a_kernel_that_raises_is_not_taken(caplog):
    def fail(_: Operands) -> None:
        raise RuntimeError("no compiler\n  found")

    kernel, other = checked(Fast(fail))
    for _ in range(2):
        kernel(operands(300, StateFormat()), torch.ones(()), SETTINGS)
    assert other.calls == 2
    assert [record.message for record in caplog.records] == [
        "updates of bfloat16, bfloat16, float32, int16 on cpu take the other kernel, which is slower: the fast kernel"
        " fails its check: RuntimeError: no compiler found"
    ]


def test_each_kind_is_checked_by_itself():
    fast = Fast(lambda on: on.weight.neg_() if on.gradient.dtype == torch.float32 else None)
    kernel, other = checked(fast)
    kernel(operands(8), torch.ones(()), SETTINGS)
    assert other.calls == 0
    kernel(operands(8, gradient=torch.float32), torch.ones(()), SETTINGS)
    assert other.calls == 1


def test_what_the_kernel_does_not_support_goes_to_the_other_without_a_check():
    fast = Fast()
    kernel, other = checked(fast)
    kernel(operands(256, StateFormat("compact", "int8")), torch.ones(()), SETTINGS)
    assert (fast.calls, other.calls) == (0, 1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_operands_are_hard_and_the_same_at_each_call(kind: Kind):
    on = hard_operands(kind)
    for name in (*NAMES, "gradient"):
        one, other = getattr(on, name), getattr(hard_operands(kind), name)
        if one is None:
            continue
        assert count_different(one, other) == 0
        values = one.float()
        assert (values < 0).any()
        assert (values == 0).any()
        if one.dtype.is_floating_point:
            assert values.isnan().any()
            assert values.isinf().any()
            assert ((values != 0) & (values.abs() < 2**-126)).any()
        if one.dtype == torch.float32:
            assert ((one.view(torch.int32) & 0xFFFF) == 0x8000).sum() > COUNT // 32
    assert on.start + COUNT > 1 << 32


def test_copies_are_of_their_own_and_off_alignment():
    on = operands(64, StateFormat())
    moved = copied_to(on, CPU, 1)
    assert moved.weight.data_ptr() % 16 == 2
    assert moved.exp_avg.data_ptr() % 16 == 4
    assert (moved.start, moved.seed) == (on.start, on.seed)
    FusedUpdate(1)(moved, torch.ones(()), SETTINGS)
    assert torch.equal(on.weight, operands(64, StateFormat()).weight)


def test_nan_are_alike_and_zeros_are_not():
    nan = torch.tensor([0x7FC0, -1, 0x7F81], dtype=torch.int16).view(torch.bfloat16)
    assert count_different(nan, torch.full((3,), float("nan"), dtype=torch.bfloat16)) == 0
    assert count_different(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])) == 1
    assert count_different(torch.tensor([3, 4], dtype=torch.int16), torch.tensor([3, 5], dtype=torch.int16)) == 1


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_has_triton():
    pytest.importorskip("triton")
    assert kernel_choice._triton_update().name == "triton"
