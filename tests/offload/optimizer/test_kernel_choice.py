"""The choice of a kernel: the faster one, made once, and never a failure."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from offload.optimizer import kernel_choice, native_kernel
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernel_check import CheckedUpdate
from offload.optimizer.kernel_choice import fastest_update, measure_update_rate, sample, update_on
from offload.optimizer.kernels import FusedUpdate
from offload.optimizer.native_kernel import native_library
from tests.offload.helpers.kernels import FORMATS, needs_compiler, needs_gpu

GPU = torch.device("cuda", 0)


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
    for cached in (native_library, fastest_update, kernel_choice._checked_update):
        cached.cache_clear()
    yield
    for cached in (native_library, fastest_update, kernel_choice._checked_update):
        cached.cache_clear()


def test_the_choice_is_one_of_the_kernels_and_made_once(uncached: None):
    chosen = fastest_update(1)
    assert chosen.name in ("fused", "native")
    assert fastest_update(1) is chosen
    assert measure_update_rate(1) > 0


@needs_compiler
@pytest.mark.parametrize(("native_s", "fused_s", "expected"), [(1.0, 2.0, "native"), (2.0, 1.0, "fused")])
def test_the_faster_one_is_chosen(uncached: None, monkeypatch, native_s: float, fused_s: float, expected: str):
    monkeypatch.setattr(kernel_choice, "measure", lambda *_: {"native": native_s, "fused": fused_s})
    assert fastest_update(1).name == expected


def test_off_compiles_nothing(uncached: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_kernel.subprocess, "run", lambda *_, **__: pytest.fail("a compiler was called"))
    assert fastest_update(1, "off").name == "fused"


def test_without_a_compiler_the_fused_kernel_is_taken(uncached: None, monkeypatch, caplog, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.INFO):
        assert fastest_update(1).name == "fused"
    assert [record.message for record in caplog.records] == [
        "no C compiler found: AdamW takes torch's fused kernel, about half as fast"
    ]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_sample_has_the_tensors_of_the_format(format: StateFormat):
    on = sample(format, 1000)
    master = format.master_dtype(on.weight.dtype)
    assert (on.master is None) if master is None else (on.master.dtype == master)
    assert on.exp_avg.dtype == format.moment_dtype
    assert (on.exp_avg_scale is not None) == (format.state_dtype == "int8")


def test_the_kernel_on_the_host_is_the_fastest():
    for compile in ("auto", "off"):
        assert update_on(torch.device("cpu"), 1, compile) is fastest_update(1, compile, StateFormat())


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.sampled
def test_a_gpu_takes_the_checked_kernel_but_for_8_bits(uncached: None, monkeypatch, format: StateFormat):
    monkeypatch.setattr(kernel_choice, "_triton_update", StandIn)
    kernel = update_on(GPU, 1, "auto", format)
    assert isinstance(kernel, FusedUpdate if format.state_dtype == "int8" else CheckedUpdate)
    assert kernel.name == ("fused" if format.state_dtype == "int8" else "stand-in")
    if format.state_dtype != "int8":
        assert update_on(GPU, 2, "auto", format) is kernel
        assert update_on(torch.device("cuda", 1), 1, "auto", format) is not kernel


def test_a_gpu_takes_torchs_kernel_where_that_is_asked_for(uncached: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_choice, "_triton_update", lambda: pytest.fail("Triton was imported"))
    assert isinstance(update_on(GPU, 1, "off"), FusedUpdate)
    assert isinstance(update_on(torch.device("meta"), 1, "auto"), FusedUpdate)


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


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_has_triton():
    pytest.importorskip("triton")
    assert kernel_choice._triton_update().name == "triton"
