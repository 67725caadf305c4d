"""The kernels of the AdamW update: alike, exact, and chosen without failing."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offload.optimizer import kernels
from offload.optimizer.kernels import FusedUpdate, NativeUpdate, Operands, Settings, fastest_update, native_library

SETTINGS = Settings(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
DTYPES = (torch.float32, torch.bfloat16)

needs_compiler = pytest.mark.skipif(native_library() is None, reason="needs a C compiler with OpenMP")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a few thousand elements span several tiles, the last one ragged."""
    monkeypatch.setattr(kernels, "HOST_TILE", 1024)
    monkeypatch.setattr(kernels, "DEVICE_TILE", 1024)
    monkeypatch.setattr(kernels, "SAMPLE", 1 << 12)


@pytest.fixture
def uncached():
    """The choice of a kernel as a process makes it first."""
    for cached in (native_library, fastest_update):
        cached.cache_clear()
    yield
    for cached in (native_library, fastest_update):
        cached.cache_clear()


def operands(count: int, weight=torch.bfloat16, gradient=torch.bfloat16, moment=torch.float32) -> Operands:
    generator = torch.Generator().manual_seed(count)
    master = torch.randn(count, generator=generator)
    return Operands(
        weight=master if weight == torch.float32 else master.to(weight),
        gradient=torch.randn(count, generator=generator).to(gradient),
        master=master,
        exp_avg=torch.zeros(count, dtype=moment),
        exp_avg_sq=torch.zeros(count, dtype=moment),
    )


def tensors(of: Operands) -> list[torch.Tensor]:
    return [of.weight, of.master, of.exp_avg, of.exp_avg_sq]


def run(kernel, on: Operands, steps: int = 5, settings: Settings = SETTINGS, scale: float = 1.0) -> Operands:
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        on.gradient.copy_(torch.randn(on.gradient.shape, generator=generator))
        kernel(on, torch.tensor(float(step)), settings, scale)
    return on


def by_hand(on: Operands, steps: int = 5, settings: Settings = SETTINGS, scale: float = 1.0) -> Operands:
    """The formulas of the paper in float64, moments and weights rounded to what holds them after each step."""
    lr, beta1, beta2, eps, decay = settings
    value = on.master.double()
    for step in range(1, steps + 1):
        generator = torch.Generator().manual_seed(step)
        on.gradient.copy_(torch.randn(on.gradient.shape, generator=generator))
        gradient = on.gradient.double() * scale
        mean = beta1 * on.exp_avg.double() + (1 - beta1) * gradient
        square = beta2 * on.exp_avg_sq.double() + (1 - beta2) * gradient**2
        value = value * (1 - lr * decay)
        value -= lr * (mean / (1 - beta1**step)) / ((square / (1 - beta2**step)).sqrt() + eps)
        on.exp_avg.copy_(mean)
        on.exp_avg_sq.copy_(square)
    on.master.copy_(value)
    on.weight.copy_(on.master)
    return on


def both_kernels() -> list:
    native = [NativeUpdate(native_library(), threads=2)] if native_library() else []
    return [FusedUpdate(threads=2), *native]


@pytest.mark.parametrize("kernel", both_kernels(), ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_equals_the_formulas(kernel, scale: float):
    found = run(kernel, operands(3001, torch.float32, torch.float32), scale=scale)
    expected = by_hand(operands(3001, torch.float32, torch.float32), scale=scale)
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@needs_compiler
@pytest.mark.parametrize(("weight", "gradient", "moment"), list(itertools.product(DTYPES, DTYPES, DTYPES)))
@pytest.mark.parametrize("settings", [SETTINGS, SETTINGS._replace(beta1=0.3, weight_decay=0.0)])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_kernels_agree(weight, gradient, moment, settings: Settings, scale: float):
    fused, native = both_kernels()
    # Not a whole number of vectors, blocks or tiles.
    for count in (1, 70_001):
        first = run(fused, operands(count, weight, gradient, moment), settings=settings, scale=scale)
        second = run(native, operands(count, weight, gradient, moment), settings=settings, scale=scale)
        for one, other in zip(tensors(first), tensors(second), strict=True):
            # A different last bit may round a bf16 number the other way, and a bf16 moment then moves its master.
            halves = torch.bfloat16 in (one.dtype, moment)
            torch.testing.assert_close(one, other, rtol=1e-2 if halves else 1e-6, atol=1e-4 if halves else 1e-7)


@needs_compiler
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs AVX2 or AVX512")
def test_kernels_agree_bitwise_on_whole_vectors():
    first, second = (run(kernel, operands(1 << 16)) for kernel in both_kernels())
    assert all(torch.equal(one, other) for one, other in zip(tensors(first), tensors(second), strict=True))


@pytest.mark.parametrize("kernel", both_kernels(), ids=lambda kernel: kernel.name)
def test_weights_and_moments_are_rounded_to_nearest(kernel):
    halved = run(kernel, operands(4096, moment=torch.bfloat16), steps=1)
    whole = run(kernel, operands(4096), steps=1)
    for rounded, exact in (
        (halved.exp_avg, whole.exp_avg),
        (halved.exp_avg_sq, whole.exp_avg_sq),
        (whole.weight, whole.master),
        (halved.weight, halved.master),
    ):
        assert torch.equal(rounded, exact.bfloat16())
    assert torch.equal(halved.master, whole.master)


@pytest.mark.parametrize("kernel", both_kernels(), ids=lambda kernel: kernel.name)
def test_ties_overflow_and_nan_round_as_torch_does(kernel):
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, -3.4e38, float("inf"), float("nan"), 1e-40])
    on = Operands(ties.bfloat16() * 0, torch.zeros(8).bfloat16(), ties.clone(), torch.zeros(8), torch.zeros(8))
    kernel(on, torch.ones(()), SETTINGS._replace(weight_decay=0.0))
    expected = ties.bfloat16()
    assert torch.equal(on.weight.nan_to_num(7), expected.nan_to_num(7))


@needs_compiler
def test_views_inside_a_buffer_are_updated_and_nothing_beside_them():
    native = both_kernels()[1]
    flat = torch.ones(100, dtype=torch.bfloat16)
    on = replace(operands(33), weight=flat[7:40])
    native(on, torch.ones(()), SETTINGS)
    assert torch.equal(flat[7:40], on.master.bfloat16())
    assert (flat[:7] == 1).all()
    assert (flat[40:] == 1).all()


@needs_compiler
def test_float16_goes_to_the_fused_kernel():
    fused, native = both_kernels()
    first, second = (run(kernel, operands(3000, torch.float16, torch.float16)) for kernel in (fused, native))
    assert all(torch.equal(one, other) for one, other in zip(tensors(first), tensors(second), strict=True))
    assert first.weight.dtype == torch.float16


@needs_compiler
def test_the_number_of_threads_does_not_change_the_result():
    library = native_library()
    one, three = (run(NativeUpdate(library, threads), operands(200_001)) for threads in (1, 3))
    assert all(torch.equal(first, second) for first, second in zip(tensors(one), tensors(three), strict=True))


@needs_compiler
def test_python_goes_on_while_the_native_kernel_computes():
    native, on = NativeUpdate(native_library(), threads=1), operands(1 << 24)
    started, ended = threading.Event(), threading.Event()

    def update() -> None:
        started.set()
        native(on, torch.ones(()), SETTINGS)
        ended.set()

    # No thread is made to hand Python's lock over: this one has many turns only if the kernel let it go.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        thread = threading.Thread(target=update)
        thread.start()
        started.wait()
        turns = 0
        while not ended.is_set():
            time.sleep(1e-4)
            turns += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert turns > 20


def test_the_choice_is_one_of_the_kernels_and_made_once(uncached: None):
    chosen = fastest_update(1)
    assert chosen.name in {kernel.name for kernel in both_kernels()}
    assert fastest_update(1) is chosen


@needs_compiler
@pytest.mark.parametrize(("native_s", "fused_s", "expected"), [(1.0, 2.0, "native"), (2.0, 1.0, "fused")])
def test_the_faster_one_is_chosen(uncached: None, monkeypatch, native_s: float, fused_s: float, expected: str):
    monkeypatch.setattr(kernels, "measure", lambda kernels: {"native": native_s, "fused": fused_s})
    assert fastest_update(1).name == expected


def test_off_compiles_nothing(uncached: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels.subprocess, "run", lambda *_, **__: pytest.fail("a compiler was called"))
    assert fastest_update(1, "off").name == "fused"


def test_without_a_compiler_the_fused_kernel_is_taken(uncached: None, monkeypatch, caplog, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.INFO):
        assert fastest_update(1).name == "fused"
    assert [record.message for record in caplog.records] == [
        "no C compiler found: AdamW takes torch's fused kernel, about half as fast"
    ]


@pytest.mark.parametrize("script", ["exit 1", 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"'])
def test_a_compiler_that_fails_is_no_failure(uncached: None, monkeypatch, caplog, tmp_path: Path, script: str):
    compiler = tmp_path / "broken-cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.INFO):
        assert fastest_update(1).name == "fused"
    assert len(caplog.records) == 1
    assert str(compiler) in caplog.records[0].message


@needs_compiler
def test_compiling_says_nothing_and_leaves_nothing(uncached: None, monkeypatch, capfd, tmp_path: Path):
    monkeypatch.setattr(kernels.tempfile, "tempdir", str(tmp_path))
    fastest_update(1)
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_threads_are_given_back_also_after_an_error():
    before = torch.get_num_threads()
    inside = []
    with suppress(KeyError), kernels.torch_threads(before + 1):
        inside.append(torch.get_num_threads())
        raise KeyError
    assert (inside, torch.get_num_threads()) == ([before + 1], before)


def test_threads_of_another_thread_are_left_alone():
    before, seen = torch.get_num_threads(), []
    used, inside, done = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        torch.ones(100_000).sum()
        used.set()
        inside.wait()
        seen.append(torch.get_num_threads())
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    used.wait()
    with kernels.torch_threads(before + 1):
        inside.set()
        done.wait()
    thread.join()
    assert seen == [before]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("moment", DTYPES)
def test_a_devices_tensors_are_updated_by_the_same_rule(moment: torch.dtype):
    host = run(FusedUpdate(), operands(3001, moment=moment))
    device = operands(3001, moment=moment)
    device = Operands(*(tensor.cuda() for tensor in (device.weight, device.gradient, *tensors(device)[1:])))
    for step in range(1, 6):
        generator = torch.Generator().manual_seed(step)
        device.gradient.copy_(torch.randn(3001, generator=generator))
        FusedUpdate()(device, torch.tensor(float(step), device="cuda"), SETTINGS)
    # A moment that rounds the other way moves the weight by a share of the learning rate.
    atol = 1e-4 if moment == torch.float32 else SETTINGS.lr / 10
    torch.testing.assert_close(device.master.cpu(), host.master, rtol=1e-5, atol=atol)
