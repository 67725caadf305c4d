"""The C loop gives the numbers of torch's kernel, in every format, on any number of threads and for any range."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from offload.optimizer import native_kernel
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import FusedUpdate
from offload.optimizer.native_kernel import NativeUpdate, native_library
from offload.optimizer.operands import Operands
from tests.offload.helpers.kernels import (
    COMPILED,
    SETTINGS,
    WIDE,
    from_place,
    needs_compiler,
    operands,
    run,
    tensors,
)

DTYPES = (torch.float32, torch.bfloat16)
AVX = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs AVX2 or AVX512"
)

pytestmark = needs_compiler


@pytest.fixture
def uncached():
    """Makes libraries as if for the first time in the process."""
    native_library.cache_clear()
    yield
    native_library.cache_clear()


def native(format: StateFormat, threads: int = 2) -> NativeUpdate:
    return NativeUpdate(native_library(format), threads)


def same(first: Operands, second: Operands) -> bool:
    return all(torch.equal(one, other) for one, other in zip(tensors(first), tensors(second), strict=True))


@AVX
@pytest.mark.parametrize("format", COMPILED, ids=str)
@pytest.mark.slow
def test_kernels_agree_bitwise_on_whole_vectors(format: StateFormat):
    """The range begins where counters of 32 bits end."""
    start = (1 << 32) - (1 << 15)
    first, second = (
        run(kernel, from_place(operands(1 << 16, format), start), steps=3) for kernel in (FusedUpdate(), native(format))
    )
    assert same(first, second)


@AVX
@pytest.mark.parametrize(("weight", "gradient", "moment"), list(itertools.product(DTYPES, DTYPES, ("fp32", "bf16"))))
@pytest.mark.parametrize("hyperparameters", [SETTINGS, SETTINGS._replace(beta1=0.3, weight_decay=0.0)])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_kernels_agree_on_any_length(weight, gradient, moment: str, hyperparameters, scale: float):
    format = StateFormat("fp32", moment)
    # Not a whole number of vectors, blocks or tiles.
    for count in (1, 70_001):
        first, second = (
            run(kernel, operands(count, format, weight, gradient), hyperparameters=hyperparameters, scale=scale)
            for kernel in (FusedUpdate(), native(format))
        )
        assert same(first, second)


@pytest.mark.parametrize("format", COMPILED, ids=str)
def test_threads_and_ranges_do_not_change_the_result(format: StateFormat):
    count = 70_001
    one, three, parts = (operands(count, format) for _ in range(3))
    run(native(format, 1), one, steps=2)
    run(native(format, 3), three, steps=2)
    for step in (1, 2):
        parts.gradient.copy_(torch.randn(count, generator=torch.Generator().manual_seed(step)))
        for piece in reversed(list(parts.split(1 << 14))):
            native(format, 1)(piece, torch.tensor(float(step)), SETTINGS)
    assert same(one, three)
    assert same(one, parts)


@pytest.mark.parametrize(
    "format", [StateFormat("kahan", "int8"), StateFormat("compact", "int8", "stochastic")], ids=str
)
def test_codes_are_those_of_the_map_for_numbers_of_every_size(format: StateFormat):
    """Every bin of the look-up, both signs, its edges, zeros, denormals, and numbers below all entries."""
    bits = torch.arange(0, 0x3F800001, 0x2003, dtype=torch.int64).to(torch.int32)
    edges = torch.arange(0x3300, 0x3F81, dtype=torch.int32) << 16
    sizes = torch.cat([bits, edges]).view(torch.float32)
    gradient = torch.cat([sizes, -sizes])
    gradient = gradient[: len(gradient) // 256 * 256]
    # The largest of each block is one.
    gradient[::256] = 1
    settings = SETTINGS._replace(beta1=0.0, beta2=0.0)
    found = []
    for kernel in (FusedUpdate(), native(format)):
        on = dataclasses.replace(operands(len(gradient), format), gradient=gradient)
        kernel(on, torch.ones(()), settings)
        found.append([on.exp_avg, on.exp_avg_sq, on.exp_avg_scale, on.exp_avg_sq_scale])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert len(found[0][0].unique()) > 250


@pytest.mark.parametrize("format", COMPILED, ids=str)
def test_what_is_not_finite_is_so_in_both_kernels(format: StateFormat):
    found = []
    for kernel in (FusedUpdate(), native(format)):
        on = operands(512, format)
        on.weight[:4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.3e38])
        on.gradient[:8] = torch.tensor([1, 1, 1, 1, float("inf"), -float("inf"), float("nan"), 3e38])
        for step in (1, 2):
            kernel(on, torch.tensor(float(step)), SETTINGS)
        found.append(on)
    first, second = found
    assert torch.equal(first.weight.isnan(), second.weight.isnan())
    assert torch.equal(first.weight.nan_to_num(7), second.weight.nan_to_num(7))
    assert first.weight[4:7].isnan().all()
    if format.moment_dtype == torch.uint8:
        assert torch.equal(first.exp_avg, second.exp_avg)
        assert torch.equal(first.exp_avg_sq, second.exp_avg_sq)
        for one in (first, second):
            assert one.exp_avg_scale.isnan().tolist() == [True, False]
            assert one.exp_avg_sq_scale.isnan().tolist() == [True, False]


@pytest.mark.parametrize("format", [WIDE, StateFormat("kahan", "int8"), StateFormat("compact")], ids=str)
def test_views_inside_a_buffer_are_updated_and_nothing_beside_them(format: StateFormat):
    flat = torch.ones(100, dtype=torch.bfloat16)
    flat[7:40] = operands(33, format).weight
    on, alone = dataclasses.replace(operands(33, format), weight=flat[7:40]), operands(33, format)
    for each in (on, alone):
        native(format)(each, torch.ones(()), SETTINGS)
    assert torch.equal(flat[7:40], alone.weight)
    assert (flat[:7] == 1).all()
    assert (flat[40:] == 1).all()


def test_other_operands_go_to_the_fused_kernel():
    """float16, and states of another format than the library's."""
    for format, weight in ((WIDE, torch.float16), (StateFormat("compact"), torch.bfloat16)):
        first, second = (
            run(kernel, operands(3000, format, weight, weight)) for kernel in (FusedUpdate(threads=2), native(WIDE))
        )
        assert same(first, second)
        assert first.weight.dtype == weight


def test_python_goes_on_while_the_native_kernel_computes(monkeypatch: pytest.MonkeyPatch):
    kernel, on = native(WIDE, threads=1), operands(1 << 20)
    state, seen, deadline = ["outside"], threading.Event(), time.monotonic() + 120
    function_for = kernel._function_for

    def noted(operands: Operands):
        function = function_for(operands)

        def call(*arguments) -> None:
            state[0] = "inside"
            function(*arguments)
            state[0] = "outside"

        return call

    def update() -> None:
        while not seen.is_set() and time.monotonic() < deadline:
            kernel(on, torch.ones(()), SETTINGS)
        state[0] = "ended"

    monkeypatch.setattr(kernel, "_function_for", noted)
    # No thread is made to hand Python's lock over: this one finds the kernel at work only if that releases the lock.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        thread = threading.Thread(target=update)
        thread.start()
        while state[0] != "ended" and not seen.is_set():
            if state[0] == "inside":
                seen.set()
            time.sleep(1e-4)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen.is_set()


@pytest.mark.parametrize("script", ["exit 1", 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"'])
def test_a_compiler_that_fails_is_no_failure(uncached: None, monkeypatch, caplog, tmp_path: Path, script: str):
    compiler = tmp_path / "broken-cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.INFO):
        assert native_library(WIDE) is None
    assert len(caplog.records) == 1
    assert str(compiler) in caplog.records[0].message


def test_no_place_for_temporary_files_is_no_failure(uncached: None, monkeypatch, caplog, tmp_path: Path):
    monkeypatch.setattr(native_kernel.tempfile, "tempdir", str(tmp_path / "missing"))
    with caplog.at_level(logging.INFO):
        assert native_library(WIDE) is None
    assert [record.message.split(": ")[1] for record in caplog.records] == [
        "torch's operations take its place, about half as fast"
    ]


def test_compiling_prints_nothing_and_leaves_no_file(uncached: None, monkeypatch, capfd, tmp_path: Path):
    monkeypatch.setattr(native_kernel.tempfile, "tempdir", str(tmp_path))
    assert native_library(WIDE) is not None
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
