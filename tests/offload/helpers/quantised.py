"""Models whose frozen weights are quantised, with small layers beside them that train, and their comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from offload.activations.checkpointing import recompute
from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.torch_private.tensor_parts import parts
from tests.offload.helpers.models import assert_same, under

WIDTH = 64


class Codes(torch.Tensor):
    """Integers and what is subtracted from them, inside of `Nested`."""

    @staticmethod
    def __new__(cls, integers: Tensor, zero: Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=torch.float32, device=integers.device)

    def __init__(self, integers: Tensor, zero: Tensor):
        self.integers, self.zero = integers, zero

    def __tensor_flatten__(self):
        return ["integers", "zero"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["integers"], inner["zero"])

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(function(arguments[0].integers), function(arguments[0].zero))
        raise NotImplementedError(str(function))


class Nested(torch.Tensor):
    """A weight of integers times scales, which autograd saves itself: only the operations know what is in it."""

    @staticmethod
    def __new__(cls, codes: Codes, scale: Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Codes, scale: Tensor):
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, weight: Tensor) -> Nested:
        scale = weight.abs().amax(1, keepdim=True) / 100
        integers = (weight / scale).round().to(torch.int8) + 3
        return cls(Codes(integers, torch.full((1, 1), 3.0)), scale)

    def dequantize(self) -> Tensor:
        return (self.codes.integers.float() - self.codes.zero) * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"made": "here"}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        assert context == {"made": "here"}
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        aten = torch.ops.aten
        own = arguments[0]
        if function in (aten.detach.default, aten.clone.default):
            return cls(function(own.codes), function(own.scale))
        if function is aten._to_copy.default:
            device = keywords["device"]
            codes = Codes(own.codes.integers.to(device), own.codes.zero.to(device))
            return cls(codes, own.scale.to(device))
        if function is aten.t.default:
            return cls(Codes(own.codes.integers.t(), own.codes.zero), own.scale.t())
        if function in (aten.mm.default, aten.addmm.default):
            plain = [each.dequantize() if isinstance(each, cls) else each for each in arguments]
            return function(*plain)
        raise NotImplementedError(str(function))


def _of_torchao(name: str, **options: object) -> Callable[[nn.Linear], nn.Module]:
    def quantised(linear: nn.Linear) -> nn.Module:
        quantization = pytest.importorskip("torchao.quantization")
        if "weight_dtype" in options:
            options.setdefault("granularity", quantization.PerGroup(32))
        holder = nn.Sequential(linear)
        quantization.quantize_(holder, getattr(quantization, name)(**options))
        return holder[0]

    return quantised


def _of_bitsandbytes(nested: bool) -> Callable[[nn.Linear], nn.Module]:
    def quantised(linear: nn.Linear) -> nn.Module:
        modules = pytest.importorskip("bitsandbytes").nn
        made = modules.Linear4bit(
            linear.in_features,
            linear.out_features,
            compute_dtype=torch.float32,
            compress_statistics=nested,
            quant_type="nf4",
        )
        made.load_state_dict(linear.state_dict())
        # On some CPUs it would pack the weight anew for inference.
        made.support_avx512bf16_for_cpu = False
        return made.to("cpu").requires_grad_(False)

    return quantised


def _nested(linear: nn.Linear) -> nn.Module:
    linear.weight = nn.Parameter(Nested.of(linear.weight.detach()), requires_grad=False)
    return linear


# Each makes a quantised layer of a Linear, in place or not.
KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8": _of_torchao("Int8WeightOnlyConfig", version=2),
    "float8": _of_torchao("Float8WeightOnlyConfig"),
    "int4": _of_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "nf4": _of_bitsandbytes(nested=True),
    "nf4 of one level": _of_bitsandbytes(nested=False),
    "nested": _nested,
}


class Adapted(nn.Module):
    """A frozen base layer and two narrow ones beside it, which train (LoRA, Hu et al. 2021)."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.up(self.down(hidden))


class Block(nn.Module):
    def __init__(self, quantise: Callable[[nn.Linear], nn.Module]):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = Adapted(quantise(nn.Linear(WIDTH, WIDTH)))
        self.second = quantise(nn.Linear(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(torch.tanh(self.first(self.norm(hidden))))


class Model(nn.Module):
    """Three blocks of two quantised layers each, between layers that train."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(KINDS[kind]) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not (".base." in name or ".second." in name))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def inputs(step: int, microbatch: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + microbatch), requires_grad=True)


def train(
    model: Model,
    mode: Mode,
    between: Callable[[Model], None] = lambda model: None,
    recomputes: bool = False,
    device: str = "cpu",
    autocast: bool = False,
) -> list[Tensor]:
    """Trains what trains for two steps of two microbatches, with SGD, and calls `between` before the second.

    Returns losses, gradients of inputs and parameters, and an evaluation after it all. `recomputes`: backward computes
    the blocks again. `autocast`: forwards run in bfloat16 as torch.autocast has it.
    """
    seen: list[Tensor] = []

    def forward(given: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            return model(given.to(device)).float()

    with under(mode, model, device) as attached:
        undo = recompute(model.blocks if recomputes else ())
        for step in range(2):
            if step:
                between(model)
            given = [inputs(step, microbatch).to(device).detach().requires_grad_() for microbatch in range(2)]
            with attached.step():
                losses = [lambda each=each: forward(each).square().mean() for each in given]
                seen += [loss.cpu() for loss in attached.accumulate(losses)]
            seen += [each.grad.clone() for each in given]
            for parameter in model.parameters():
                assert (parameter.grad is not None) == parameter.requires_grad
                if parameter.requires_grad:
                    # A mode may leave it on the host.
                    seen.append(parameter.grad.detach().cpu().clone())
                    with torch.no_grad():
                        parameter -= 0.1 * parameter.grad.to(parameter.device)
                    parameter.grad = None
        with torch.no_grad():
            seen.append(forward(inputs(9, 9)).cpu())
        undo()
    return seen


def bytes_of(model: nn.Module) -> list[Tensor]:
    """Returns copies of the plain tensors of all parameters and buffers."""
    return [part.detach().clone() for each in (*model.parameters(), *model.buffers()) for part in parts(each)]


def same_as_resident(model: Model, mode: Mode, **options: object) -> None:
    """Fails unless losses, gradients, an evaluation and the tensors after `detach` are those of the resident model."""
    moved, resident = model, copy.deepcopy(model)
    kinds = [type(parameter) for parameter in moved.parameters()]
    expected = train(resident, Resident(), **options)
    assert_same(train(moved, mode, **options), expected)
    assert [type(parameter) for parameter in moved.parameters()] == kinds
    assert_same(bytes_of(moved), bytes_of(resident))
