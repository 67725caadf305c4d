"""Parameters and buffers that get other memory, and the device where they stay."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from offload.memory.host_memory import ALIGNMENT_BYTES
from offload.torch_private.tensor_parts import parts
from offload.weights.units import placement
from offload.weights.units.placement import (
    DevicePlacement,
    Layout,
    ModuleAttribute,
    UnfilledTensors,
    check_frozen,
    is_marked,
    mark,
    move_into,
    move_to,
    over,
    unfilled,
)
from tests.offload.helpers.quantised import Nested


def test_an_attribute_assigns_to_its_module_and_to_the_list_of_a_recurrent_layer():
    layer = nn.GRU(3, 4)
    attribute = ModuleAttribute(layer, "weight_hh_l0", False)
    replacement = nn.Parameter(torch.zeros_like(attribute.tensor))
    attribute.assign(replacement)
    assert layer.weight_hh_l0 is attribute.tensor is replacement
    assert any(weight is replacement for weight in layer._flat_weights)


def test_resident_tensors_are_memory_on_the_device_and_keep_what_was_written_there():
    real, meta = nn.BatchNorm1d(3), nn.BatchNorm1d(3, device="meta")
    weight = real.weight
    weight.grad = torch.ones(3)
    resident = [(module.weight, [ModuleAttribute(module, "weight", False)]) for module in (real, meta)]
    resident += [(module.running_mean, [ModuleAttribute(module, "running_mean", True)]) for module in (real, meta)]
    placed = DevicePlacement(resident, torch.device("cpu"))
    assert not meta.weight.is_meta
    assert unfilled(meta) == ["weight", "running_mean"]
    assert not unfilled(real)
    with torch.no_grad():
        meta.weight.fill_(2.0)
    # A module may replace its buffer.
    meta.running_mean = torch.full((3,), 5.0)
    placed.restore()
    assert real.weight is weight
    assert weight.grad.tolist() == [1.0] * 3
    assert isinstance(meta.weight, nn.Parameter)
    assert (meta.weight.tolist(), meta.running_mean.tolist()) == ([2.0] * 3, [5.0] * 3)


def test_a_gradient_moves_after_the_data(monkeypatch: pytest.MonkeyPatch):
    """torch refuses a gradient on another device than the data. The meta device stands for a GPU here."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    # torch moves no parameter's data between the CPU and the meta device.
    monkeypatch.setattr(placement, "give_memory", lambda tensor, memory, attributes: nn.Parameter(memory[0]))
    moved = move_to(parameter, torch.device("meta"), [])
    assert moved.is_meta
    assert moved.grad.is_meta


@pytest.mark.parametrize("fails", [False, True])
def test_resident_tensors_are_put_back_as_they_were_found(fails: bool, monkeypatch: pytest.MonkeyPatch):
    model = nn.BatchNorm1d(3, device="meta")
    found = [model.weight, model.bias]
    resident = [(getattr(model, name), [ModuleAttribute(model, name, False)]) for name in ("weight", "bias")]
    if fails:
        made = []

        def empty_like(tensor: torch.Tensor, **options: object) -> torch.Tensor:
            made.append(tensor)
            if len(made) > 1:
                raise MemoryError
            return torch.zeros(tensor.shape)

        monkeypatch.setattr(torch, "empty_like", empty_like)
        with pytest.raises(MemoryError):
            DevicePlacement(resident, torch.device("cpu"))
    else:
        DevicePlacement(resident, torch.device("cpu")).put_back()
    assert all(one is other for one, other in zip(model.parameters(), found, strict=True))


def test_a_buffer_that_is_gone_is_not_restored():
    model = nn.BatchNorm1d(3)
    resident = [(model.running_mean, [ModuleAttribute(model, "running_mean", True)])]
    placed = DevicePlacement(resident, torch.device("cpu"))
    model.running_mean = None
    placed.restore()
    assert model.running_mean is None


def test_a_tensor_that_wraps_others_is_replaced_and_keeps_its_attributes():
    model = nn.Linear(4, 4, bias=False)
    found = model.weight = nn.Parameter(Nested.of(model.weight.detach()), requires_grad=False)
    found.note = "mine"
    attribute = ModuleAttribute(model, "weight", False)
    memory = [torch.empty_like(part) for part in parts(found)]
    new = move_into(memory, found, [attribute])
    assert new is model.weight
    assert isinstance(new, nn.Parameter)
    assert not new.requires_grad
    assert new.note == "mine"
    assert [part.data_ptr() for part in parts(new)] == [part.data_ptr() for part in memory]
    assert torch.equal(new.dequantize(), found.dequantize())
    assert move_to(new, torch.device("meta"), [attribute]).is_meta
    assert model.weight.is_meta
    DevicePlacement([(model.weight, [attribute])], torch.device("cpu"))
    assert not model.weight.is_meta
    assert unfilled(model) == ["weight"]
    with torch.no_grad():
        for part, value in zip(parts(model.weight), parts(found), strict=True):
            part.copy_(value)
    assert unfilled(model) == []


@pytest.mark.parametrize(
    "tensor", [torch.randn(3, 5), torch.randn(3, 5).t(), torch.randn(6, 5)[::2], torch.randn(0, 4), torch.randn(())]
)
def test_a_plain_tensor_is_one_piece_with_its_strides_if_it_is_dense(tensor: torch.Tensor):
    layout = Layout(tensor)
    assert layout.nbytes == tensor.nbytes
    flat = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    (view,) = layout.views(lambda offset, nbytes: flat[offset : offset + nbytes])
    view.copy_(tensor)
    assert torch.equal(over(tensor, [view]), tensor)
    assert view.stride() == (tensor.stride() if tensor.shape != (3, 5) or tensor.stride() != (10, 1) else (5, 1))


def test_a_tensor_that_wraps_others_has_a_piece_for_each_that_is_aligned():
    weight = Nested.of(torch.randn(5, 7))
    layout = Layout(weight)
    assert [piece.dtype for piece in layout.pieces] == [torch.int8, torch.float32, torch.float32]
    assert all(piece.offset % ALIGNMENT_BYTES == 0 for piece in layout.pieces)
    ends = [piece.offset + piece.nbytes for piece in layout.pieces]
    assert all(end <= piece.offset for end, piece in zip(ends, layout.pieces[1:], strict=False))
    assert layout.nbytes == ends[-1]
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(lambda offset, nbytes: flat[offset : offset + nbytes])
    for view, part in zip(views, parts(weight), strict=True):
        view.copy_(part)
    assert torch.equal(over(weight, views).dequantize(), weight.dequantize())


def test_only_tensors_of_the_same_parts_fit():
    weight = Nested.of(torch.randn(5, 7))
    layout = Layout(weight)
    assert layout.fits(Nested.of(torch.randn(5, 7)))
    assert not layout.fits(Nested.of(torch.randn(7, 5)))
    assert not layout.fits(weight.codes)
    assert not layout.fits(torch.randn(5, 7))
    assert not Layout(torch.randn(5, 7)).fits(torch.randn(5, 7).double())


def test_a_parameter_that_wraps_others_and_trains_is_refused_in_one_line():
    weight = nn.Parameter(Nested.of(torch.randn(5, 7)), requires_grad=True)
    with pytest.raises(ValueError, match=r"^head\.weight is a Nested that trains: .*frozen") as refused:
        check_frozen("head.weight", weight)
    assert "\n" not in str(refused.value)
    check_frozen("head.weight", weight.requires_grad_(False))
    check_frozen("head.weight", nn.Parameter(torch.ones(2)))


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,), (3,), (9,), (17,), (31,), (5, 7)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_is_marked_until_it_is_filled(dtype: torch.dtype, shape: tuple[int, ...]):
    memory = torch.zeros(shape, dtype=dtype)
    assert not is_marked(memory)
    mark(memory)
    assert is_marked(memory)
    memory.data.zero_()
    assert not is_marked(memory)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_mark_is_not_a_number_so_that_nothing_can_be_computed_with_it(dtype: torch.dtype):
    memory = torch.zeros(5, dtype=dtype)
    mark(memory)
    assert memory.sum().isnan()


def test_both_ends_must_be_there():
    """`weight[padding].zero_()` fills no weight, wherever the row is."""
    for row in (0, 2, 4):
        memory = torch.zeros(5, 8)
        mark(memory)
        memory[row].zero_()
        assert is_marked(memory) == (row == 2)


def test_strides_make_no_difference():
    memory = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    mark(memory)
    assert is_marked(memory)
    assert is_marked(nn.Parameter(memory))


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.ones(1).expand(64),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(3, dtype=torch.complex64).conj().imag,
        torch.zeros(3).as_subclass(Tagged),
    ],
    ids=["empty", "meta", "sparse", "expanded", "conjugate", "negative", "subclass"],
)
def test_tensors_that_no_mode_makes_are_left_alone(tensor: torch.Tensor):
    mark(tensor)
    assert not is_marked(tensor)


@pytest.fixture
def model() -> nn.Module:
    """A model of five tensors, one tied, whose weight and buffer have no values."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    mark(model[0].weight.data)
    mark(model[1].running_mean)
    return model


def fill(model: nn.Module) -> None:
    nn.init.ones_(model[0].weight)
    model[1].running_mean = torch.zeros(3)


def test_tied_tensors_are_named_once(model: nn.Module):
    assert unfilled(model) == ["0.weight", "1.running_mean"]
    fill(model)
    assert unfilled(model) == []


def test_steps_and_calls_of_any_module_are_refused_until_all_is_filled(model: nn.Module):
    watch = UnfilledTensors()
    watch.watch(model)
    for refused in (watch.check_step, lambda: model(torch.ones(2, 3)), lambda: model[2](torch.ones(2, 3))):
        with pytest.raises(RuntimeError, match=r"^without values: 0\.weight, 1\.running_mean\. The model") as error:
            refused()
        assert "\n" not in str(error.value)
    fill(model)
    assert model(torch.ones(2, 3)).isfinite().all()
    watch.check_step()


@pytest.mark.parametrize("used", ["a step", "a call"])
def test_after_the_first_success_nothing_is_left_of_the_watch(model: nn.Module, used: str):
    watch = UnfilledTensors()
    watch.watch(model)
    assert all(module._forward_pre_hooks for module in model.modules())
    fill(model)
    if used == "a call":
        model(torch.ones(2, 3))
        assert not any(module._forward_pre_hooks for module in model.modules())
    watch.check_step()
    assert not any(module._forward_pre_hooks for module in model.modules())
    mark(model[0].weight.data)
    watch.check_step()


def test_a_filled_model_is_not_watched():
    model, watch = nn.Linear(3, 3), UnfilledTensors()
    watch.watch(model)
    assert not model._forward_pre_hooks
    watch.check_step()


def test_many_names_become_a_count():
    model, watch = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), UnfilledTensors()
    for parameter in model.parameters():
        mark(parameter.data)
    watch.watch(model)
    with pytest.raises(RuntimeError, match=r"^without values: 0\.weight, 0\.bias, 1\.weight and 5 more\."):
        watch.check_step()
    watch.close()
    watch.check_step()
    model(torch.ones(1, 2))


def test_calls_with_tensors_of_the_callers_own_are_no_reason_to_refuse_nor_to_trust(model: nn.Module):
    watch = UnfilledTensors()
    watch.watch(model)
    own = {name: torch.ones_like(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert functional_call(model.eval(), own, torch.ones(2, 3)).isfinite().all()
    with pytest.raises(RuntimeError, match="without values"):
        watch.check_step()


def test_inside_function_transforms_too(model: nn.Module):
    watch = UnfilledTensors()
    model.eval()
    watch.watch(model)
    for transform in (vmap(lambda x: model(x[None]).sum()), grad(lambda x: model(x).sum())):
        with pytest.raises(RuntimeError, match="without values"):
            transform(torch.ones(2, 3))
    many = {name: torch.ones(4, *tensor.shape) for name, tensor in model.named_parameters()}
    many["1.running_mean"] = torch.ones(4, 3)
    assert vmap(lambda own: functional_call(model, own, torch.ones(2, 3)))(many).shape == (4, 2, 3)


def test_other_threads_are_refused_as_well(model: nn.Module):
    watch, errors = UnfilledTensors(), []
    watch.watch(model)

    def evaluate() -> None:
        try:
            model(torch.ones(2, 3))
        except RuntimeError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(errors) == 2


def test_copies_are_not_watched(model: nn.Module):
    watch = UnfilledTensors()
    watch.watch(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin(torch.ones(2, 3)).isnan().any()
    watch.close()
