"""State dicts of HostAdamW: their layout, and their way into torch's AdamW and back."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.optimizer.adamw import HostAdamW
from offload.optimizer.formats import MASTER_DTYPES, StateFormat
from offload.optimizer.state_dicts import decay_groups, hyperparameters_of, in_format
from tests.offload.helpers.kernels import FORMATS
from tests.offload.helpers.optimizers import SETTINGS, give_gradients, near, parameters, same, train
from training.optim import AdamW

pytestmark = pytest.mark.usefixtures("several_tiles")


def roundtrip(state_dict: dict) -> dict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_a_run_resumed_from_its_state_dict_continues_bitwise(dtype: torch.dtype, state_dtype: str):
    options = SETTINGS | {"state_dtype": state_dtype, "threads": 1}
    straight, stopped = parameters(dtype), parameters(dtype)
    train(HostAdamW(straight, **options), straight, range(6))
    train(first := HostAdamW(stopped, **options), stopped, range(3))
    saved = roundtrip(first.state_dict())
    resumed = [nn.Parameter(weight.detach().clone()) for weight in stopped]
    second = HostAdamW(resumed, **options | {"lr": 9.0})
    second.load_state_dict(saved)
    train(second, resumed, range(3, 6))
    assert same(straight, resumed)


def test_state_of_torchs_adamw_loads_and_loads_back():
    ours, theirs = parameters(), parameters()
    train(torchs := torch.optim.AdamW(theirs, **SETTINGS), theirs, range(3))
    host = HostAdamW(ours, threads=1)
    host.load_state_dict(roundtrip(torchs.state_dict()))
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            mine.copy_(other)
    train(host, ours, range(3, 6))
    train(torchs, theirs, range(3, 6))
    near(ours, theirs)

    back = [nn.Parameter(weight.detach().clone()) for weight in ours]
    returned = torch.optim.AdamW(back)
    returned.load_state_dict(roundtrip(host.state_dict()))
    assert returned.param_groups[0]["lr"] == SETTINGS["lr"]
    train(returned, back, range(6, 9))
    train(host, ours, range(6, 9))
    near(back, ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_training_by_torchs_adamw_in_between_is_kept(layout: torch.memory_format, dtype: torch.dtype):
    """Trains by ours, by torch's, and by ours with lr=0: the weights stay as torch's left them."""
    ours = [nn.Parameter(p.detach().to(memory_format=layout)) if p.ndim == 4 else p for p in parameters(dtype)]
    train(host := HostAdamW(ours, **SETTINGS, threads=1), ours, range(3))
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    torchs = torch.optim.AdamW(theirs)
    torchs.load_state_dict(roundtrip(host.state_dict()))
    train(torchs, theirs, range(3, 23))
    back = [nn.Parameter(weight.detach().clone()) for weight in theirs]
    again = HostAdamW(back, threads=1)
    again.load_state_dict(roundtrip(torchs.state_dict()))
    state = again.state[back[0]]
    assert state["exp_avg"].dtype == torch.float32
    again.param_groups[0]["lr"] = 0.0
    train(again, back, range(23, 24))
    assert state["step"] == 24
    assert same(back, theirs)


@pytest.mark.parametrize("fused", [False, True])
def test_states_go_to_torch_in_the_layout_of_their_parameter(fused: bool):
    def convolution(like: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(like.detach().clone().to(memory_format=torch.channels_last))

    torch.manual_seed(0)
    start = torch.randn(8, 4, 3, 3)
    gradients = [torch.randn_like(start).to(memory_format=torch.channels_last) for _ in range(8)]

    def go_on(optimizer: torch.optim.Optimizer, weight: nn.Parameter, steps: range) -> None:
        for step in steps:
            weight.grad = gradients[step].clone()
            optimizer.step()

    ours = convolution(start)
    go_on(host := HostAdamW([ours], **SETTINGS, threads=1), ours, range(3))
    theirs = convolution(ours)
    torchs = torch.optim.AdamW([theirs], fused=fused)
    saved = roundtrip(host.state_dict())
    assert saved["state"][0]["exp_avg"].stride() == ours.stride()
    saved["param_groups"][0]["fused"] = fused
    torchs.load_state_dict(saved)
    go_on(torchs, theirs, range(3, 8))
    go_on(host, ours, range(3, 8))
    near([theirs], [ours])


def test_unsupported_or_foreign_state_is_refused():
    weights = parameters()
    host = HostAdamW(weights, threads=1)
    with pytest.raises(ValueError, match="amsgrad=True, which is not supported"):
        host.load_state_dict(torch.optim.AdamW(weights, amsgrad=True).state_dict())
    with pytest.raises(ValueError, match="doesn't match the size"):
        host.load_state_dict(HostAdamW(weights[:2], threads=1).state_dict())


def state_of(*shapes: tuple[int, ...]) -> dict:
    weights = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    train(host := HostAdamW(weights, **SETTINGS, threads=1), weights, range(1))
    return host.state_dict()


def test_state_of_other_shapes_is_refused_before_anything_is_loaded():
    weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(8, 8))]
    host = HostAdamW(weights, **SETTINGS, threads=1)
    host.allocate()
    kept = copy.deepcopy(host.state_dict())
    of_another = state_of((3,), (4, 4))
    of_another["param_groups"][0]["lr"] = 9.0
    wrong_step = state_of((3,), (8, 8))
    wrong_step["state"][0]["step"] = torch.zeros(3)
    incomplete = state_of((3,), (8, 8))
    del incomplete["state"][1]["exp_avg_sq"]
    for state, message in (
        (of_another, r"exp_avg of parameter 1 has shape \(4, 4\), and is to be of shape \(8, 8\)"),
        (wrong_step, r"step of parameter 0 has shape \(3,\), and is to be one number"),
        (incomplete, r"lacks exp_avg_sq of parameter 1"),
    ):
        with pytest.raises(ValueError, match=message):
            host.load_state_dict(state)
        assert host.param_groups[0]["lr"] == SETTINGS["lr"]
        assert all(
            torch.equal(value, kept["state"][index][name])
            for index, states in host.state_dict()["state"].items()
            for name, value in states.items()
        )


def test_a_copy_of_the_optimizer_updates_its_own_model():
    model = nn.Linear(16, 16)
    optimizer = HostAdamW(model.parameters(), **SETTINGS, threads=1)
    train(optimizer, list(model.parameters()), range(2))
    other, other_optimizer = copy.deepcopy((model, optimizer))
    train(optimizer, list(model.parameters()), range(2, 4))
    assert not torch.equal(model.weight, other.weight)
    train(other_optimizer, list(other.parameters()), range(2, 4))
    assert torch.equal(model.weight, other.weight)


def test_hooks_around_loading_see_the_states():
    weights = parameters()
    train(host := HostAdamW(weights, **SETTINGS, threads=1), weights, range(2))
    saved, seen = host.state_dict(), []

    def sevens(_: HostAdamW, state_dict: dict) -> dict:
        states = state_dict["state"]
        return state_dict | {
            "state": {
                index: state | {"exp_avg": torch.full_like(state["exp_avg"], 7)} for index, state in states.items()
            }
        }

    host.register_load_state_dict_pre_hook(sevens)
    host.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.state[weights[0]]["exp_avg"]))
    for count in (1, 2):
        host.load_state_dict(saved)
        assert len(seen) == count
        assert seen[-1].eq(7).all()
    saved["param_groups"][0]["maximize"] = True
    with pytest.raises(ValueError, match="the optimizer state to load has maximize=True"):
        host.load_state_dict(saved)
    assert host.state[weights[0]]["exp_avg"].eq(7).all()
    assert len(seen) == 2


def trained(format: StateFormat, dtype: torch.dtype = torch.bfloat16) -> tuple[list[nn.Parameter], HostAdamW]:
    weights = parameters(dtype)
    train(optimizer := HostAdamW(weights, **SETTINGS, threads=1, **vars(format)), weights, range(4))
    return weights, optimizer


PAIRS = [
    (one, other) for one in FORMATS for other in FORMATS if (one.state_dtype == "int8") == (other.state_dtype == "int8")
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=str)
def test_a_state_goes_into_another_format(one: StateFormat, other: StateFormat):
    """Its tensors are those that the other format has, and float32 states come back as they were."""
    weights, optimizer = trained(one)
    _, wanted = trained(other)
    for weight, like in zip(weights, wanted.param_groups[0]["params"], strict=True):
        state = optimizer.state[weight]
        found = in_format(state, weight, other)
        made = {name: (tensor.shape, tensor.dtype) for name, tensor in wanted.state[like].items()}
        if one.master == "stochastic":
            made.pop("remainder", None)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == made
        if other == StateFormat():
            back = in_format(found, weight, one)
            assert all(torch.equal(back[name], state[name]) for name in back)


def test_moments_in_8_bits_go_into_no_others():
    floats, codes = StateFormat(), StateFormat(state_dtype="int8")
    for one, other, message in (
        (floats, codes, "floats: .* state_dtype=fp32 or bf16"),
        (codes, floats, "8 bits: .*int8"),
    ):
        weights, optimizer = trained(one)
        loaded = HostAdamW(weights, threads=1, **vars(other))
        with pytest.raises(ValueError, match=rf"^the optimizer state to load has moments in {message}$"):
            loaded.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("master", MASTER_DTYPES)
@pytest.mark.parametrize(("there", "here"), [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_a_weight_of_another_dtype_gets_a_master_of_its_own(master: str, there: str, here: str):
    """Remainders are the low bits of bfloat16 numbers, and of no others."""
    weights, optimizer = trained(StateFormat(master), getattr(torch, there))
    others = [nn.Parameter(weight.detach().to(getattr(torch, here))) for weight in weights]
    loaded = HostAdamW(others, threads=1, master=master)
    loaded.load_state_dict(optimizer.state_dict())
    loaded.param_groups[0]["lr"] = 0.0
    before = [weight.detach().clone() for weight in others]
    train(loaded, others, [4])
    assert same(others, before)
    assert all(loaded.state[weight]["step"] == 5 for weight in others)


def test_a_state_of_torchs_adamw_has_no_master_to_convert():
    weights = parameters(torch.bfloat16)
    train(torchs := torch.optim.AdamW(weights), weights, range(2))
    for format in (format for format in FORMATS if format.state_dtype != "int8"):
        ours = [nn.Parameter(weight.detach().clone()) for weight in weights]
        optimizer = HostAdamW(ours, threads=1, **vars(format))
        optimizer.load_state_dict(copy.deepcopy(torchs.state_dict()))
        train(optimizer, ours, range(2, 3))
        assert all(optimizer.state[weight]["step"] == 3 for weight in ours)


def test_settings_are_those_of_the_group_at_the_time():
    optimizer = HostAdamW(parameters(), **SETTINGS, threads=1)
    (group,) = optimizer.param_groups
    group["lr"] = 0.5
    assert hyperparameters_of(group) == (0.5, 0.9, 0.95, 1e-8, 0.1)


@pytest.mark.parametrize(("key", "value"), [("maximize", True), ("amsgrad", True), ("decoupled_weight_decay", False)])
def test_settings_of_a_group_that_mean_other_arithmetic_are_refused(key: str, value: bool):
    weights = parameters()
    message = f"a parameter group has {key}={value}, which is not supported"
    with pytest.raises(ValueError, match=message):
        HostAdamW([{"params": weights, key: value}], threads=1)
    for all_decay in (False, True):
        optimizer = HostAdamW(weights[2:], threads=1, decay_norms_and_biases=all_decay)
        count = len(optimizer.param_groups)
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": weights[:2], key: value})
        assert len(optimizer.param_groups) == count
    give_gradients(weights, 0)
    before = [weight.detach().clone() for weight in weights]
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert same(weights, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_without_an_update_are_refused_unless_they_are_frozen(dtype: torch.dtype):
    weights = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, dtype=dtype))]
    message = f"a parameter is {dtype}: .* takes float32, bfloat16 and float16"
    with pytest.raises(ValueError, match=message):
        HostAdamW(weights, threads=1)
    optimizer = HostAdamW([weights[0], weights[1].requires_grad_(False)], threads=1)
    weights[1].requires_grad_(True)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert all(weight.eq(1).all() for weight in weights)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0: must be at least 0"),
        ({"lr": float("nan")}, "lr=nan: must be at least 0"),
        ({"eps": 1e-60}, "eps=1e-60: must be at least 1e-45"),
        ({"betas": (1.0, 0.9)}, "betas=.*: must be two numbers, at least 0 and below 1"),
        ({"betas": (0.9,)}, "betas=.*: must be two numbers, at least 0 and below 1"),
    ],
)
def test_settings_of_a_group_out_of_range_are_refused(setting: dict, message: str):
    weights = parameters()
    optimizer = HostAdamW(weights[2:], threads=1)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": weights[:2], **setting})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=message):
        HostAdamW(weights, threads=1, **setting)


def test_groups_without_decay_are_those_of_norms_and_biases():
    model = nn.Sequential(nn.Embedding(4, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Conv2d(1, 1, 3))
    decaying, constant = decay_groups(model.parameters())
    assert same(decaying["params"], [model[0].weight, model[2].weight, model[3].weight])
    assert same(constant["params"], [model[1].weight, model[1].bias, model[2].bias, model[3].bias])
    assert constant["weight_decay"] == 0
    assert "weight_decay" not in decaying

    given = [{"params": model[1].weight, "lr": 1.0}, {"params": [model[2].weight], "weight_decay": 3.0}]
    one, other = decay_groups(given)
    assert (one["lr"], one["weight_decay"]) == (1.0, 0.0)
    assert other["weight_decay"] == 3.0
    named = decay_groups(model[1].named_parameters())
    assert [name for name, _ in named[0]["params"]] == ["weight", "bias"]


@pytest.mark.parametrize("optimizer", [AdamW, lambda *given, **settings: HostAdamW(*given, **settings, threads=1)])
@pytest.mark.parametrize("is_later", [False, True])
def test_norms_and_biases_do_not_decay_where_that_is_chosen(optimizer: Callable, is_later: bool):
    weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    first = [nn.Parameter(torch.ones(4, 4))] if is_later else weights
    made = optimizer(first, **SETTINGS, decay_norms_and_biases=False)
    if is_later:
        made.add_param_group({"params": weights, "weight_decay": 0.2})
        assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.2, 0.0]
    made.step()
    assert (weights[0] < 1).all()
    assert (weights[1] == 1).all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_takes_further_groups(duplicate: Callable):
    made = duplicate(HostAdamW([nn.Parameter(torch.ones(4, 4))], **SETTINGS, threads=1, decay_norms_and_biases=False))
    made.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert made.param_groups[-1]["weight_decay"] == 0


@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize(
    ("given", "message"),
    [(["weight"], "can only optimize Tensors"), ([{"params": {nn.Parameter(torch.ones(2))}}], "set")],
)
def test_what_is_no_list_of_tensors_is_refused(given: list, message: str, decays: bool):
    with pytest.raises(TypeError, match=message):
        HostAdamW(given, **SETTINGS, threads=1, decay_norms_and_biases=decays)
