"""The C loop gives the numbers of torch's kernel, in every format, on any number of threads and for any range."""

import dataclasses
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from offload.optimizer import native_kernel
from offload.optimizer.formats import BLOCK, StateFormat, dynamic_map, midpoints
from offload.optimizer.kernels import FusedUpdate, Operands
from offload.optimizer.native_kernel import NativeLibrary, NativeUpdate, begin_compiling, native_library
from tests import ROOT
from tests.offload.helpers.kernels import (
    COMPACT,
    COMPILED,
    SETTINGS,
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
@pytest.mark.parametrize(("weight", "gradient"), list(itertools.product(DTYPES, DTYPES)))
def test_kernels_agree_on_any_length(format: StateFormat, weight: torch.dtype, gradient: torch.dtype):
    """The longer range is no whole number of vectors, blocks or tiles, and in it end the counters of 32 bits."""
    for settings, scale in ((SETTINGS, 1.0), (SETTINGS._replace(beta1=0.3, weight_decay=0.0), 0.37)):
        for count, start in ((1, 0), (70_001, (1 << 32) - (1 << 15))):
            first, second = (
                run(kernel, from_place(operands(count, format, weight, gradient), start), 3, settings, scale)
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


@pytest.mark.parametrize("format", [COMPACT, StateFormat("compact", "int8")], ids=str)
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
    for format, weight in ((COMPACT, torch.float16), (StateFormat("stochastic"), torch.bfloat16)):
        first, second = (
            run(kernel, operands(3000, format, weight, weight)) for kernel in (FusedUpdate(threads=2), native(COMPACT))
        )
        assert same(first, second)
        assert first.weight.dtype == weight


def test_python_goes_on_while_the_native_kernel_computes(monkeypatch: pytest.MonkeyPatch):
    kernel, on = native(COMPACT, threads=1), operands(1 << 20)
    state, seen, deadline = ["outside"], threading.Event(), time.monotonic() + 120
    function_for = NativeLibrary.function

    def noted(*given):
        function = function_for(*given)

        def call(*arguments) -> None:
            state[0] = "inside"
            function(*arguments)
            state[0] = "outside"

        return call

    def update() -> None:
        while not seen.is_set() and time.monotonic() < deadline:
            kernel(on, torch.ones(()), SETTINGS)
        state[0] = "ended"

    monkeypatch.setattr(NativeLibrary, "function", noted)
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
        thread.join(300)
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
        assert native_library(COMPACT) is None
    assert len(caplog.records) == 1
    assert str(compiler) in caplog.records[0].message


def test_no_place_for_temporary_files_is_no_failure(uncached: None, monkeypatch, caplog, tmp_path: Path):
    monkeypatch.setattr(native_kernel.tempfile, "tempdir", str(tmp_path / "missing"))
    with caplog.at_level(logging.INFO):
        assert native_library(COMPACT) is None
    assert [record.message.split(": ")[1] for record in caplog.records] == [
        "torch's operations take its place, about a tenth as fast"
    ]


def test_compiling_prints_nothing_and_leaves_no_file(uncached: None, monkeypatch, capfd, tmp_path: Path):
    monkeypatch.setattr(native_kernel.tempfile, "tempdir", str(tmp_path))
    assert native_library(COMPACT) is not None
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_what_began_beside_the_caller_is_taken_once(uncached: None, monkeypatch, tmp_path: Path):
    compiler, calls = tmp_path / "counted-cc", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho called >> {calls}\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    begin_compiling(COMPACT)
    begin_compiling(COMPACT)
    assert native_library(COMPACT).format == COMPACT
    assert calls.read_text() == "called\n"
    native_library.cache_clear()
    assert native_library(COMPACT) is not None
    assert calls.read_text() == "called\n" * 2


@pytest.mark.parametrize("script", [pytest.param("exit 1", marks=pytest.mark.slow), "sleep 100"])
def test_a_process_that_needs_no_kernel_after_all_ends_at_once_and_leaves_nothing(tmp_path: Path, script: str):
    compiler = tmp_path / "broken-cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    (files := tmp_path / "files").mkdir()
    program = "import offload, offload.planning as p; offload.HostAdamW.begin_compiling(p.StateFormat())"
    environment = os.environ | {"CC": str(compiler), "TMPDIR": str(files)}
    command = [sys.executable, "-W", "error", "-c", program]
    started = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert time.monotonic() - started < 60
    assert list(files.iterdir()) == []


# Codes of 8 bits.

CODES = StateFormat("compact", "int8")
# The moments after an update are the gradient and its square.
COPIES = SETTINGS._replace(beta1=0.0, beta2=0.0)


def neighbours(values: torch.Tensor, distance: int) -> torch.Tensor:
    """These positive numbers and as many floats below and above each as `distance` says."""
    bits = values.view(torch.int32)[:, None] + torch.arange(-distance, distance + 1, dtype=torch.int32)
    return bits.clamp(min=0).view(torch.float32).flatten()


def boundaries() -> torch.Tensor:
    """The magnitudes at which a code begins, and those that have a code of their own, of both maps."""
    found = torch.cat([midpoints(True), midpoints(False), dynamic_map(True), dynamic_map(False)])
    return found[found > 0].unique()


def blocks_of(numbers: torch.Tensor, largest: float) -> torch.Tensor:
    """Blocks of 256 numbers with `largest` as the first of each."""
    parts = numbers.split(BLOCK - 1)
    full = [torch.cat([torch.tensor([largest]), part]) for part in parts]
    return torch.cat(full)


def assert_codes_agree(gradient: torch.Tensor, steps: int = 1) -> None:
    found = []
    for kernel in (FusedUpdate(), native(CODES)):
        on = dataclasses.replace(operands(len(gradient), CODES), gradient=gradient)
        for step in range(1, steps + 1):
            kernel(on, torch.tensor(float(step)), COPIES)
        found.append(on)
    one, other = found
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=0, atol=0, equal_nan=True)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(other, name), getattr(one, name)), name


# Halves of odd numbers, the smallest and the largest numbers.
LARGEST = [1.0, 0.7, 2.0**-60, 2.0**20, 0.1234567, 7e-39, 1e-44, 3e38]


@pytest.mark.parametrize("largest", LARGEST)
@pytest.mark.sampled
def test_every_boundary_and_its_neighbours(largest: float):
    """First moments are the boundaries times the largest, and their neighbours; second ones are near them."""
    edges = neighbours(boundaries() * largest, 3)
    edges = edges[edges <= largest]
    signed = blocks_of(torch.cat([edges, -edges]), largest)
    roots = neighbours((boundaries().double() * largest).sqrt().float(), 3)
    unsigned = blocks_of(roots[roots.double() ** 2 < largest], largest**0.5)
    for gradient in (signed, -signed, unsigned):
        assert_codes_agree(gradient)


def test_quotients_of_many_divisors():
    """Where a quotient would come out one unit wrong, numbers beside a boundary would get another code."""
    generator = torch.Generator().manual_seed(5)
    edges = boundaries()
    chosen = edges[torch.randint(len(edges), (2000, BLOCK - 1), generator=generator)]
    largest = torch.rand(2000, 1, generator=generator) * 2.0 ** torch.randint(-50, 20, (2000, 1), generator=generator)
    numbers = (chosen * largest).view(torch.int32) + torch.randint(-1, 2, chosen.shape, generator=generator).int()
    numbers = torch.minimum(numbers.view(torch.float32), largest)
    signs = torch.randint(0, 2, chosen.shape, generator=generator) * 2.0 - 1
    assert_codes_agree(torch.cat([largest, numbers * signs], dim=1).flatten())
    assert_codes_agree(torch.cat([largest, numbers], dim=1).sqrt().flatten())


@pytest.mark.parametrize("largest", [0.0, 1e-44, 1.0, 2.0**19, 2.0**21, 2.0**59, 3e38])
@pytest.mark.sampled
def test_zeros_and_the_smallest_numbers(largest: float):
    """Both zeros, denormals, and quotients that are too small for a float."""
    bits = torch.cat([torch.arange(0, 60), torch.tensor([0x7FFFFF, 0x800000, 0x800001])]).int()
    small, zeros = bits.view(torch.float32).repeat(8000), torch.zeros(BLOCK)
    for part in (small, small.sqrt()):
        assert_codes_agree(torch.cat([zeros, -zeros, blocks_of(torch.cat([part, -part]), largest)]))


@pytest.mark.parametrize("count", [1, 15, 16, 63, 64, 65, 127, 255, 257, 70_001])
def test_blocks_that_are_not_full(count: int):
    """Nothing beyond the end is written, and what was read there leaves no trace."""
    generator = torch.Generator().manual_seed(count)
    gradient = torch.randn(count, generator=generator) * 10 ** (4 * torch.rand(count, generator=generator) - 4)
    assert_codes_agree(gradient, steps=3)
    on = operands(BLOCK * 300, CODES)
    on.exp_avg.fill_(77), on.exp_avg_sq.fill_(78)
    part = next(iter(on.split(BLOCK * 299)))
    part = dataclasses.replace(
        part,
        gradient=gradient,
        **{name: getattr(part, name)[:count] for name in ("weight", "master", "exp_avg", "exp_avg_sq")},
    )
    native(CODES, 1)(part, torch.ones(()), COPIES)
    assert (on.exp_avg[count:] == 77).all()
    assert (on.exp_avg_sq[count:] == 78).all()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_block_wherever_it_is(bad: float):
    gradient = torch.randn(BLOCK * BLOCK // 2, generator=torch.Generator().manual_seed(3))
    # In every other block, at another place each.
    for block, place in enumerate(range(0, BLOCK, 4)):
        gradient[2 * block * BLOCK + place] = bad
    assert_codes_agree(gradient)
