"""Memory that was made for meta tensors is known by its bytes until somebody fills it."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from offload.weights.units.unfilled import UnfilledTensors, is_marked, mark, unfilled

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


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
