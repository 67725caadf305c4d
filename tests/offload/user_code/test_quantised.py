"""Frozen weights that are quantised, of torchao, of bitsandbytes and of the user's own, under every mode."""

import copy
import io
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.optimizer.adamw import HostAdamW
from offload.planning.dry_run import MOVED, dry_run
from offload.torch_private.tensor_parts import parts, state_of, true_bytes, wraps
from tests.offload.helpers.models import assert_same, under
from tests.offload.helpers.modes import mode_classes, small
from tests.offload.helpers.quantised import KINDS, Model, Nested, bytes_of, inputs, same_as_resident
from tests.offload.helpers.small import swap_small

EACH = pytest.mark.parametrize("kind", KINDS)
# One of each way in which weights reach backward: as their parts, on a function's context, as themselves.
SOME = pytest.mark.parametrize("kind", ["int8", "nf4", "nested"])
MODES = {
    "layers": lambda: BounceLinear(slots=2),
    "blocks, some stay": lambda: LayerStream(slots=1, resident=1),
    "activations go too": lambda: TensorSwap(LayerStream(slots=2)),
    "torch moves activations": lambda: SaveOnCpu(BounceLinear(slots=1)),
}


@pytest.mark.parametrize("kind", ["nf4", "nested"])
@pytest.mark.parametrize("name", mode_classes())
def test_a_quantised_base_trains_what_is_beside_it_as_resident(name: str, kind: str):
    same_as_resident(Model(kind), small(name))


@EACH
def test_a_slot_has_another_unit_by_the_time_of_backward(kind: str):
    same_as_resident(Model(kind), BounceLinear(slots=1))


@pytest.mark.parametrize("name", MODES)
def test_modes_combine(name: str):
    same_as_resident(Model("nf4"), MODES[name](), recomputes=name == "layers")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nested"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_under_autocast(kind: str, recomputes: bool):
    """Some compute the weight, and the product with it, in operations of their own."""
    same_as_resident(Model(kind), LayerStream(slots=1), autocast=True, recomputes=recomputes)


class Selective(Model):
    """Blocks in selective checkpoints, which keep the products."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(hidden)
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
        return self.head(hidden)


@SOME
def test_selective_checkpoints_around_quantised_layers(kind: str):
    same_as_resident(Selective(kind), LayerStream(slots=1))


def twice_as_large(model: Model) -> None:
    """Changes a quantised weight in every way that its user has: in place, its memory, and as another parameter."""
    first, second, third = (block.second.weight for block in model.blocks)
    next(part for part in parts(first) if part.dtype == torch.float32).mul_(2)
    if wraps(second):
        for name in second.__tensor_flatten__()[0]:
            setattr(second, name, copy.deepcopy(getattr(first, name)))
    else:
        second.data = first.data.clone()
        state_of(second).absmax = state_of(first).absmax.clone()
    model.blocks[2].second.weight = copy.deepcopy(first)
    assert third is not model.blocks[2].second.weight


@SOME
def test_what_its_user_changes_between_steps_is_used(kind: str):
    same_as_resident(Model(kind), LayerStream(slots=1), between=twice_as_large)


def one_part_is_doubled(model: Model) -> None:
    next(part for part in parts(model.blocks[1].second.weight) if part.dtype == torch.float32).mul_(2)


@SOME
@pytest.mark.parametrize("change", [one_part_is_doubled, twice_as_large])
def test_what_its_user_changes_inside_a_step_is_used(kind: str, change: Callable):
    made = Model(kind)
    resident = copy.deepcopy(made)
    mode = LayerStream(slots=4)
    with under(mode, made) as attached, attached.step():
        for model in (made, resident):
            model(inputs(0, 0)).sum().backward()
            with torch.no_grad():
                change(model)
        assert torch.equal(made(inputs(0, 1)), resident(inputs(0, 1)))


@SOME
def test_other_parts_between_forward_and_backward_are_refused(kind: str):
    model, mode = Model(kind), LayerStream(slots=4)
    with under(mode, model) as attached, attached.step():
        loss = model(inputs(0, 0)).sum()
        twice_as_large(model)
        with pytest.raises(RuntimeError, match=r"second\.weight, needed for gradient computation, has been modified"):
            loss.backward()


@SOME
def test_a_state_dict_of_an_attached_model_is_saved_and_loaded(kind: str):
    made, other = Model(kind), Model(kind)
    expected = bytes_of(made)
    for each in parts(other.blocks[0].second.weight):
        each.data.zero_()
    with under(LayerStream(), made):
        file = io.BytesIO()
        torch.save(made.state_dict(), file)
        # No tensor takes the block that it lies in with it.
        assert len(file.getvalue()) < 2 * sum(map(true_bytes, made.parameters()))
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=False), strict=kind.startswith("nf4") is False, assign=True)
        copied = copy.deepcopy(made)
    for model in (made, copied) if kind.startswith("nf4") else (made, copied, other):
        assert_same(bytes_of(model), expected)


@pytest.mark.parametrize("kind", ["int8", "nested"])
@pytest.mark.parametrize("mode", [partial(LayerStream, slots=2), partial(ShardOffload, shards=2)])
def test_a_plan_has_the_true_bytes(mode, kind: str):
    made = Model(kind)
    on_meta = copy.deepcopy(made).to("meta")

    def losses(model: nn.Module, device: str) -> list:
        return [lambda part=part: model(inputs(0, part).detach().to(device)).square().mean() for part in range(2)]

    footprint = mode().footprint(on_meta)
    assert footprint == mode().footprint(made)
    assert footprint.host_weight_bytes + footprint.resident_bytes < sum(tensor.nbytes for tensor in made.parameters())
    planned = dry_run(mode(), on_meta, losses(on_meta, "meta"))
    with under(mode(), made) as attached:
        for _ in range(3):
            made.zero_grad(set_to_none=True)
            before = attached.counters()
            with attached.step():
                attached.accumulate(losses(made, "cpu"))
        after = attached.counters()
    assert planned.host_bytes == after.host_pageable_bytes
    assert {key: planned.total(key) for key in MOVED} == {key: getattr(after - before, key) for key in MOVED}


def test_torch_moves_the_parts_and_not_the_matrix():
    """Its pinned copies are plain tensors: of a weight that is saved itself they would be what it stands for."""
    made = Model("nested")
    moved = []
    hooks = SaveOnCpu(Resident())
    with under(hooks, made) as attached, attached.step():
        copies = attached.activations._copies._hooks
        inside, copies.pack_hook = copies.pack_hook, lambda tensor: moved.append(tensor) or inside(tensor)
        made(inputs(0, 0)).sum().backward()
    assert not any(map(wraps, moved))
    stored = {part.data_ptr() for block in made.blocks for part in parts(block.second.weight)}
    assert stored <= {tensor.data_ptr() for tensor in moved}


def test_one_that_trains_is_refused_and_the_model_is_as_it_was():
    made = Model("nested")
    before = list(made.parameters())
    made.blocks[1].second.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"^blocks\.1\.second\.weight is a Nested that trains"):
        LayerStream().attach(made, None)
    assert all(one is other for one, other in zip(made.parameters(), before, strict=True))
    made.blocks[1].second.weight.requires_grad_(False)
    with under(LayerStream(), made) as attached:
        made.blocks[1].second.weight.requires_grad_(True)
        with pytest.raises(ValueError, match="is a Nested that trains"), attached.step():
            pass
        made.blocks[1].second.weight.requires_grad_(False)


def test_one_that_is_not_quantised_yet_is_refused():
    layer = pytest.importorskip("bitsandbytes").nn.Linear4bit(64, 64, quant_type="nf4")
    with pytest.raises(ValueError, match=r"^weight is not quantised yet: call \.to\(device\) of its layer"):
        BounceLinear().footprint(layer)
    assert BounceLinear().footprint(layer.to("cpu")).units == 1


def test_another_kind_in_its_place_is_refused():
    made = Model("nested")
    with under(LayerStream(), made) as attached:
        found = made.blocks[1].second.weight
        made.blocks[1].second.weight = nn.Parameter(Nested.of(found.dequantize()[:8]), requires_grad=False)
        with (
            pytest.raises(RuntimeError, match=r"blocks\.1\.second\.weight is .* it was moved or replaced"),
            attached.step(),
        ):
            pass
        made.blocks[1].second.weight = nn.Parameter(found.dequantize(), requires_grad=False)
        with (
            pytest.raises(RuntimeError, match=r"blocks\.1\.second\.weight is .* it was moved or replaced"),
            attached.step(),
        ):
            pass
        made.blocks[1].second.weight = found


class Reader(nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if state_of(self.layer.weight) is None:
            return nn.functional.linear(rows, self.layer.weight)
        products = pytest.importorskip("bitsandbytes")
        weight = self.layer.weight
        return products.matmul_4bit(rows, weight.t(), quant_state=weight.quant_state)


@SOME
@pytest.mark.parametrize("slots", [1, 3])
def test_a_weight_is_read_by_a_module_that_does_not_own_it(slots: int, kind: str):
    made = Model(kind)
    for block in made.blocks:
        block.second = Reader(block.second)
    same_as_resident(made, BounceLinear(slots=slots))


class Renewing(nn.Module):
    """Makes another parameter of the memory of its layer's weight in each forward, as peft does on a CPU."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.layer(rows)
        weight = self.layer.weight
        is_packed = state_of(weight) is not None
        self.layer.weight = weight.to("cpu") if is_packed else nn.Parameter(weight.detach(), requires_grad=False)
        return rows


@pytest.mark.parametrize("kind", ["plain", "int8", "nf4", "nested"])
def test_a_parameter_that_forward_makes_of_a_weight_does_not_stay_in_the_slot(kind: str):
    made = Model("nested" if kind == "plain" else kind)
    for block in made.blocks:
        layer = nn.Linear(64, 64).requires_grad_(False) if kind == "plain" else block.second
        block.second = Renewing(layer)
    same_as_resident(made, LayerStream(slots=1))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_of_peft_train_beside_packed_weights(dora: bool):
    peft = pytest.importorskip("peft")
    made = Model("nf4")
    chosen = peft.LoraConfig(r=2, target_modules=["second"], init_lora_weights=False, use_dora=dora)
    peft.inject_adapter_in_model(chosen, made, "default")
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("lora" in name)
    same_as_resident(made, LayerStream(slots=1))


@pytest.mark.parametrize("early", [False, True])
def test_updates_beside_the_step_leave_them_alone(early: bool, monkeypatch: pytest.MonkeyPatch):
    swap_small(monkeypatch)
    results = []
    for overlaps in (False, True):
        made = Model("nested")
        optimizer = HostAdamW((p for p in made.parameters() if p.requires_grad), lr=0.01)
        with under(LayerStream(slots=2, outside="stream"), made) as attached:
            if overlaps:
                attached.overlap(optimizer, early)
            for step in range(3):
                with attached.step():
                    made(inputs(step, 0)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.finish()
            results.append(bytes_of(made))
    assert_same(*results)


class Growing(nn.Module):
    """Changes its frozen weight in each forward, before it uses it; `as_buffer`: the weight is a buffer."""

    def __init__(self, as_buffer: bool):
        super().__init__()
        weight = Nested.of(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
        if as_buffer:
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.scale.mul_(1.25)
        return nn.functional.linear(rows, self.weight)


@pytest.mark.parametrize("mode", [partial(LayerStream, slots=1), BounceLinear])
@pytest.mark.parametrize("as_buffer", [False, True], ids=["parameter", "buffer"])
def test_what_a_forward_changes_comes_home(mode, as_buffer: bool):
    made = Model("nested")
    made.blocks[1].second = Growing(as_buffer)
    before = made.blocks[1].second.weight.dequantize()
    same_as_resident(made, mode())
    # Four forwards in steps, and an evaluation.
    assert torch.allclose(made.blocks[1].second.weight.dequantize(), before * 1.25**5)
