"""HostAdamW equals torch's AdamW on the same gradients, in any order of updates and on any thread."""

import pytest
import torch
from torch import nn

from offload.knobs import KnobError, choices_of
from offload.modes.bounce_linear import BounceLinear
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.formats import join
from offload.optimizer.state_dicts import decay_groups
from tests.offload.helpers.kernels import Blockwise, checked
from tests.offload.helpers.models import under
from tests.offload.helpers.optimizers import SETTINGS, STEPS, give_gradients, near, parameters, same, train

pytestmark = pytest.mark.usefixtures("several_tiles")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def update(optimizer: HostAdamW, weights: list[torch.Tensor], scale: float = 1.0) -> None:
    optimizer.apply(optimizer.claim(weights), scale)


def test_equals_torchs_adamw_with_groups_and_a_schedule():
    def run(make) -> list[nn.Parameter]:
        weights = parameters()
        optimizer = make([{"params": weights[:2], "lr": 3e-2, "betas": (0.8, 0.99)}, *decay_groups(weights[2:])])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1 / (step + 1)))
        return train(optimizer, weights, schedule=schedule)

    ours = run(lambda groups: HostAdamW(groups, **SETTINGS, threads=2))
    theirs = run(lambda groups: torch.optim.AdamW(groups, **SETTINGS))
    near(ours, theirs)


def test_bf16_weights_are_those_of_torchs_adamw_on_float32_masters():
    ours, masters = parameters(torch.bfloat16), [nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    train(optimizer := HostAdamW(ours, **SETTINGS, threads=1), ours)
    theirs = torch.optim.AdamW(masters, **SETTINGS, fused=True)
    for step in range(STEPS):
        give_gradients(ours, step)
        for weight, master in zip(ours, masters, strict=True):
            master.grad = weight.grad.float()
        theirs.step()
    rests = [optimizer.state[weight]["remainder"] for weight in ours]
    flat = [(weight.detach().view(-1), rest.view(-1)) for weight, rest in zip(ours, rests, strict=True)]
    near([join(*pair, torch.empty(len(pair[0]))).view(w.shape) for pair, w in zip(flat, ours, strict=True)], masters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [[4, 2, 0, 3, 1], [1], [], [0, 0, 1, 0]], ids=str)
def test_partial_updates_in_any_order_equal_one_step(order: list[int], dtype: torch.dtype):
    whole, parts = parameters(dtype), parameters(dtype)
    train(HostAdamW(whole, **SETTINGS, threads=1), whole, range(4))
    optimizer = HostAdamW(parts, **SETTINGS, threads=1)
    train(optimizer, parts, range(4), before_step=lambda: [update(optimizer, [parts[index]]) for index in order])
    assert same(whole, parts)
    assert all(optimizer.state[parameter]["step"] == 4 for parameter in parts)


def test_noise_depends_on_the_place_of_a_parameter_and_not_on_the_order_of_updates():
    def run(order: list[int]) -> list[nn.Parameter]:
        weights = parameters(torch.bfloat16)
        optimizer = HostAdamW(weights, **SETTINGS, threads=1, master="stochastic")
        before = lambda: [update(optimizer, [weights[index]]) for index in order]  # noqa: E731
        return train(optimizer, weights, range(3), before_step=before)

    assert same(run([]), run([3, 1, 0]))
    twins = [nn.Parameter(torch.ones(64).bfloat16()) for _ in range(2)]
    optimizer = HostAdamW(twins, **SETTINGS | {"lr": 1e-3}, threads=1, master="stochastic")
    for twin in twins:
        twin.grad = torch.ones_like(twin)
    optimizer.step()
    assert not torch.equal(*twins)


def test_an_update_happens_before_step():
    weights = parameters()
    optimizer = HostAdamW(weights, **SETTINGS, threads=1)
    before = [weight.detach().clone() for weight in weights]
    give_gradients(weights, 0)
    update(optimizer, weights[:1])
    assert not torch.equal(weights[0], before[0])
    assert same(weights[1:], before[1:])


def test_a_skipped_step_changes_nothing_and_is_not_counted():
    plain, skipping = parameters(), parameters()
    train(HostAdamW(plain, **SETTINGS, threads=1), plain, [0, 2])
    optimizer = HostAdamW(skipping, **SETTINGS, threads=1)
    for step in range(3):
        give_gradients(skipping, step)
        if step == 1:
            optimizer.claim(skipping)
            optimizer.skip()
        else:
            optimizer.step()
    assert same(plain, skipping)
    assert optimizer.state[skipping[0]]["step"] == 2


def test_a_scale_is_that_of_the_gradients():
    scaled, by_hand = parameters(), parameters()
    optimizer = HostAdamW(scaled, **SETTINGS, threads=1)
    give_gradients(scaled, 0)
    kept = scaled[0].grad.clone()
    update(optimizer, scaled[:2], scale=0.25)
    optimizer.step(scale=0.25)
    assert torch.equal(scaled[0].grad, kept)
    give_gradients(by_hand, 0)
    for weight in by_hand:
        weight.grad *= 0.25
    HostAdamW(by_hand, **SETTINGS, threads=1).step()
    assert same(scaled, by_hand)


def test_without_a_gradient_a_parameter_is_left_alone():
    weights = parameters()
    weights[1].requires_grad_(False)
    before = [weight.detach().clone() for weight in weights]
    versions = [weight._version for weight in weights]
    optimizer = HostAdamW(weights, **SETTINGS)
    weights[0].grad = torch.ones_like(weights[0])
    update(optimizer, weights)
    optimizer.step()
    assert not torch.equal(weights[0], before[0])
    assert same(weights[1:], before[1:])
    assert [weight._version > version for weight, version in zip(weights, versions, strict=True)] == [True] + [
        False
    ] * 4
    assert set(optimizer.state) == {weights[0]}


def test_a_tied_parameter_is_updated_once():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 16), "head": nn.Linear(16, 8, bias=False)})
    model["head"].weight = model["embedding"].weight
    alone = nn.Parameter(model["head"].weight.detach().clone())
    optimizer = HostAdamW(model.parameters(), **SETTINGS, threads=1)
    give_gradients([alone], 0)
    model["head"].weight.grad = alone.grad.clone()
    update(optimizer, [model["embedding"].weight, model["head"].weight])
    update(optimizer, [model["head"].weight])
    optimizer.step()
    HostAdamW([alone], **SETTINGS, threads=1).step()
    assert torch.equal(model["head"].weight, alone)
    assert HostAdamW.planned_bytes([alone, alone]) == HostAdamW.planned_bytes([alone])


def test_sparse_gradients_are_refused():
    weights = parameters()
    optimizer = HostAdamW(weights, **SETTINGS, threads=1)
    give_gradients(weights, 0)
    weights[3].grad = torch.eye(64, 16).to_sparse()
    with pytest.raises(ValueError, match="no sparse gradients"):
        optimizer.step()
    assert not optimizer.has_begun


def test_a_step_that_failed_leaves_no_parameter_out_of_the_next(monkeypatch: pytest.MonkeyPatch):
    weights, expected = parameters(), parameters()
    optimizer = HostAdamW(weights, **SETTINGS, threads=1)
    give_gradients(weights, 0)
    prepare = optimizer.states._prepare

    def full(parameter: nn.Parameter, state: dict) -> None:
        if parameter is weights[0]:
            raise MemoryError
        prepare(parameter, state)

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.states, "_prepare", full)
        with pytest.raises(MemoryError):
            optimizer.step()
    optimizer.step()
    train(HostAdamW(expected, **SETTINGS, threads=1), expected, [0])
    assert same(weights, expected)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"state_dtype": "fp16"}, "state_dtype=fp16: must be fp32, bf16 or int8"),
        ({"master": "half"}, "master=half: must be compact or stochastic"),
        ({"threads": 0}, "threads=0: must be at least 1"),
        ({"threads": 1.5}, "threads=1.5: must be at least 1"),
        ({"threads": 1025}, "threads=1025: must be at least 1 and at most 1024"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict, message: str):
    with pytest.raises(ValueError, match=message):
        HostAdamW(parameters(), **setting)


@pytest.mark.parametrize(("cores", "at_step", "inside"), [(16, 15, 13), (2, 1, 1), (1, 1, 1)])
def test_inside_backward_cores_are_left_to_it(cores: int, at_step: int, inside: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offload.optimizer.adamw.usable_cores", lambda: cores)
    model, mode = nn.Sequential(nn.Linear(4, 4)), BounceLinear()
    optimizer = HostAdamW(model.parameters())
    given = HostAdamW(model.parameters(), threads=5)
    assert (optimizer.threads, given.threads) == (at_step, 5)
    with under(mode, model) as attached:
        for early, threads in ((True, inside), (False, at_step)):
            attached.overlap(optimizer, early)
            assert optimizer.threads == threads
            attached.overlap(given, early)
            assert given.threads == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_devices_own_kernel_updates_all_its_parameters(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """Small ones beside their states are not given to torch's kernel, and placed ones have the same numbers."""
    host, kernel = torch.device("cpu"), checked(Blockwise())
    expected = parameters(dtype)
    optimizer = HostAdamW(expected, **SETTINGS, threads=1)
    train(optimizer, expected, before_step=lambda: [weight.grad.mul_(2) for weight in expected])
    monkeypatch.setattr("offload.optimizer.claims.LAUNCHING", ("cpu",))
    monkeypatch.setattr("offload.optimizer.adamw.update_on", lambda *_: kernel)
    for place in (False, True):
        weights = parameters(dtype)
        optimizer = HostAdamW(weights, **SETTINGS, threads=1)
        if place:
            optimizer.states.place(weights, host)
        train(optimizer, weights)
        assert same(weights, expected)


def test_words_are_those_of_the_type_hints():
    choices = choices_of(HostAdamW.__init__)
    assert choices.keys() == {"master", "state_dtype", "gradients", "speculate"}
    for name, words in choices.items():
        for word in words:
            HostAdamW([nn.Parameter(torch.ones(1))], **{name: word})
        listed = f"{', '.join(words[:-1])} or {words[-1]}"
        with pytest.raises(KnobError, match=f"{name}=other: must be {listed}$"):
            HostAdamW([nn.Parameter(torch.ones(1))], **{name: "other"})
