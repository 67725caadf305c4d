"""The Triton kernel gives the bits of the host's C loop, in every format that it supports.

One test needs no GPU: it reads the code that is compiled for one. All are skipped where there is no Triton.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
import torch
from torch import nn

from offload import HostAdamW
from offload.optimizer import kernel_choice
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernel_choice import (
    COUNT,
    CheckedUpdate,
    Kind,
    copied_to,
    count_different,
    difference,
    hard_operands,
)
from offload.optimizer.kernels import FusedUpdate, HyperParameters, UpdateKernel
from offload.optimizer.native_kernel import NativeUpdate, factors, native_library
from tests.offload.helpers.kernels import FORMATS, SETTINGS, from_place, needs_compiler, needs_gpu, operands

triton = pytest.importorskip("triton", reason="needs Triton")

from offload.optimizer import triton_kernel  # noqa: E402
from offload.optimizer.triton_kernel import TritonUpdate  # noqa: E402

FLOATS = (torch.bfloat16, torch.float32)
SUPPORTED = [format for format in FORMATS if format.state_dtype != "int8"]
DEVICE = torch.device("cuda:0")


def host_kernel(format: StateFormat) -> UpdateKernel:
    return NativeUpdate(native_library(format), threads=1)


def kind_of(format: StateFormat, weight: torch.dtype, gradient: torch.dtype) -> Kind:
    return Kind(weight, gradient, format.moment_dtype, format.master_dtype(weight))


@pytest.mark.gpu
@needs_gpu
@needs_compiler
@pytest.mark.parametrize("format", SUPPORTED, ids=str)
@pytest.mark.parametrize(("weight", "gradient"), list(itertools.product(FLOATS, FLOATS)))
def test_bits_are_those_of_the_host(format: StateFormat, weight: torch.dtype, gradient: torch.dtype):
    kind = kind_of(format, weight, gradient)
    assert difference(TritonUpdate(), host_kernel(format), kind, DEVICE) is None
    assert kernel_choice.update_on(DEVICE, 1, format)._is_exact(kind)


@pytest.mark.gpu
@needs_gpu
@needs_compiler
@pytest.mark.parametrize("format", [StateFormat(), StateFormat("stochastic", "bf16")], ids=str)
@pytest.mark.parametrize("settings", [SETTINGS._replace(beta1=0.5), SETTINGS._replace(beta1=0.3, lr=0.0, eps=1e-30)])
def test_bits_are_those_of_the_host_for_any_settings_range_and_step(format: StateFormat, settings: HyperParameters):
    kernel, expected = TritonUpdate(), hard_operands(kind_of(format, torch.bfloat16, torch.bfloat16))
    found = copied_to(expected, DEVICE, 0)
    for step in (1, 2, 355, 1_000_000, 1 << 24):
        for part in (range(1), range(1, 1025), range(1025, 4000), range(4000, COUNT)):
            host_kernel(format)(expected.part(part), torch.tensor(float(step)), settings, 1e-3)
            kernel(found.part(part), torch.tensor(float(step), device=DEVICE), settings, 1e-3)
    for name in ("weight", "master", "exp_avg", "exp_avg_sq"):
        if getattr(found, name) is not None:
            assert count_different(getattr(found, name).cpu(), getattr(expected, name)) == 0


@pytest.mark.gpu
@needs_gpu
@needs_compiler
@pytest.mark.parametrize("format", [StateFormat(), StateFormat("compact", "bf16")], ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_many_parameters_get_their_own_bits_by_one_launch(
    format: StateFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """One of them begins later, and counts its own steps."""
    kernel = CheckedUpdate(TritonUpdate(), host_kernel(format), FusedUpdate(), DEVICE)
    monkeypatch.setattr("offload.optimizer.adamw.update_on", lambda *_: kernel)
    launched = []
    launch = TritonUpdate.__call__
    monkeypatch.setattr(TritonUpdate, "__call__", lambda *given: (launched.append(given[1]), launch(*given)))

    def run() -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(0)
        sizes = ((30, 64), (64,), (5, 256), (1, 3), (1,))
        weights = [nn.Parameter(torch.randn(size, generator=draw).to(DEVICE, dtype)) for size in sizes]
        optimizer = HostAdamW(weights, lr=1e-2, threads=1, **dataclasses.asdict(format))
        for step in range(4):
            for weight in weights[step == 0 :]:
                weight.grad = torch.randn(weight.shape, generator=draw).to(DEVICE, dtype)
            optimizer.step(scale=0.7)
        states = [state for weight in weights for state in optimizer.state[weight].values()]
        return [tensor.detach().cpu() for tensor in (*weights, *states)]

    found = []
    for launching in ((DEVICE.type,), ()):
        monkeypatch.setattr("offload.optimizer.claims.LAUNCHING", launching)
        found.append(run())
    assert len(launched) >= 4 + 4 * 4
    assert sum(len(each.weight) == 2048 + 1024 + 2048 + 1024 + 1024 for each in launched) == 3
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", SUPPORTED, ids=str)
def test_nothing_beside_a_range_is_written(format: StateFormat):
    whole = copied_to(hard_operands(kind_of(format, torch.bfloat16, torch.bfloat16)), DEVICE, 0)
    before = copied_to(whole, DEVICE, 0)
    TritonUpdate()(whole.part(range(7, 40)), torch.ones((), device=DEVICE), SETTINGS)
    TritonUpdate()(whole.part(range(40, 40)), torch.ones((), device=DEVICE), SETTINGS)
    for name in ("weight", "gradient", "master", "exp_avg", "exp_avg_sq"):
        if (one := getattr(whole, name)) is not None:
            for part in (slice(7), slice(40, COUNT)):
                assert count_different(one[part].cpu(), getattr(before, name)[part].cpu()) == 0
    assert count_different(whole.exp_avg[7:40].cpu(), before.exp_avg[7:40].cpu()) > 0


def test_corrections_are_the_hosts_at_every_step():
    table = TritonUpdate()._table(0.9, 0.999, torch.device("cpu"))
    for step in (1, 2, 3, 17, 356, 5000, table.shape[1], table.shape[1] + 1, 1 << 24):
        *_, correction, _, step_size = factors(SETTINGS._replace(beta2=0.999), torch.tensor(float(step)))
        first, second = table[:, min(step, table.shape[1]) - 1].tolist()
        assert (SETTINGS.lr / first, second) == (step_size, correction)
    assert table[:, -1].tolist() == [1.0, 1.0]
    assert TritonUpdate()._table(0.0, 0.0, torch.device("cpu")).tolist() == [[1.0], [1.0]]


def test_operands_that_are_not_supported():
    kernel = TritonUpdate()
    assert kernel.supports(operands(8), SETTINGS)
    assert not kernel.supports(operands(8, StateFormat(), torch.float16, torch.float16), SETTINGS)
    assert not kernel.supports(operands(256, StateFormat("compact", "int8")), SETTINGS)
    assert not kernel.supports(operands(8), SETTINGS._replace(beta2=math.nextafter(1, 0)))
    for number in range(triton_kernel.MOST_TABLES):
        kernel._table(0.5, number / 100, torch.device("cpu"))
    assert kernel.supports(operands(8), SETTINGS._replace(beta1=0.5, beta2=0.0))
    assert not kernel.supports(operands(8), SETTINGS._replace(beta1=0.5, beta2=0.9))


def ptx_of(master: str, weight: str, moment: str, is_aligned: bool) -> str:
    """Compiles the kernel for an H200, for bf16 gradients; no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    rests = {"compact": "*i16"}
    tensors = {"weights": weight, "gradients": "*bf16", "exp_avgs": moment, "exp_avg_sqs": moment}
    tensors |= {"step_at": "*fp32", "table": "*fp64", "masters": rests.get(master, "constexpr")}
    constants = {"master": master, "is_aligned": is_aligned}
    constants |= {"block": triton_kernel.BLOCK} | ({} if master in rests else {"masters": None})
    kernel = triton_kernel._update
    signature = {
        each.name: "constexpr" if each.name in constants else tensors.get(each.name) or each.annotation_type
        for each in kernel.params
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": triton_kernel.WARPS, "enable_fp_fusion": False}
    source = ASTSource(kernel, signature, places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@pytest.mark.parametrize(
    ("master", "weight", "moment"),
    [
        ("own", "*fp32", "*fp32"),
        ("compact", "*bf16", "*fp32"),
        ("compact", "*bf16", "*bf16"),
        ("stochastic", "*bf16", "*bf16"),
    ],
)
def test_compiled_code_rounds_as_the_source_says(master: str, weight: str, moment: str, tmp_path, monkeypatch):
    """No denormal is flushed, no division or root approximated, and no product contracted but the two of the rule."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for is_aligned in (True, False):
        ptx = ptx_of(master, weight, moment, is_aligned)
        operations = re.findall(r"\b((?:add|sub|mul|mad|fma|div|rcp|sqrt|rsqrt)\.[\w.]*f(?:32|64))\b", ptx)
        each = triton_kernel.BLOCK // triton_kernel.WARPS // 32
        assert set(operations) == {f"{name}.rn.f32" for name in ("add", "sub", "mul", "fma", "div", "sqrt")} | {
            "div.rn.f64"
        }
        assert operations.count("fma.rn.f32") == 2 * each
        assert operations.count("div.rn.f32") == 2 * each
        assert operations.count("sqrt.rn.f32") == each
        assert ".ftz" not in ptx
        assert ("ld.global.v4" in ptx) == is_aligned


@pytest.mark.gpu
@needs_gpu
def test_ranges_begin_behind_two_billion_elements():
    """In bf16 without masters: 17 GB."""
    count = (1 << 31) + 4096
    if torch.cuda.mem_get_info()[0] < 5 * count * 2:
        pytest.skip("needs 22 GB of the GPU")
    format = StateFormat("stochastic", "bf16")
    tail = range(1 << 31, count)
    expected = from_place(operands(4096, format), tail.start)
    expected.gradient.fill_(0.5)
    names = ("weight", "gradient", "exp_avg", "exp_avg_sq")
    whole = {name: torch.zeros(count, dtype=torch.bfloat16, device=DEVICE) for name in names}
    for name in names:
        whole[name][tail.start :] = getattr(expected, name).to(DEVICE)
    TritonUpdate()(dataclasses.replace(expected, **whole, start=0), torch.ones((), device=DEVICE), SETTINGS)
    host_kernel(format)(expected, torch.ones(()), SETTINGS)
    for name in names:
        assert count_different(whole[name][tail.start :].cpu(), getattr(expected, name)) == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", SUPPORTED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_weights_of_the_device_of_the_host_and_with_placed_states_are_equal(format: StateFormat, dtype: torch.dtype):
    """As under offload=none, under a mode, and under one with a device share."""
    found = []
    for home, is_placed in (("cuda", False), ("cpu", False), ("cpu", True)):
        draw = torch.Generator().manual_seed(0)
        sizes = ((300, 64), (64,), (5, 256))
        parameters = [nn.Parameter(torch.randn(size, generator=draw).to(home, dtype)) for size in sizes]
        names = dataclasses.asdict(format)
        optimizer = HostAdamW(parameters, lr=1e-2, weight_decay=0.1, decay_norms_and_biases=False, **names)
        if is_placed:
            optimizer.states.place(parameters, DEVICE)
        for _ in range(4):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(home, dtype)
            optimizer.step(scale=0.7)
        states = [optimizer.state[parameter][name] for parameter in parameters for name in ("exp_avg", "exp_avg_sq")]
        found.append([tensor.detach().cpu() for tensor in (*parameters, *states)])
    for device, host, placed in zip(*found, strict=True):
        assert torch.equal(device, host)
        assert torch.equal(device, placed)
