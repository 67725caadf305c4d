"""Advice holds where it is given: it composes, and the plan with it needs less memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from omegaconf import OmegaConf

from offload.weights.gradients import ring
from tests.training.helpers.in_process import components_of, composed
from training.config.modes import mode_options
from training.config.validation import check
from training.planning import advice as advising
from training.planning import memory
from training.planning.advice import NOTHING_TO_CHANGE, memory_advice, nonfinite_advice
from training.planning.machine import Machine, machine_of
from training.planning.plan import plan_filled
from training.planning.report import RunPlan
from training.settle.components import Components

BASE = {
    "dataset": "synthetic",
    "hardware": "h200",
    "model.hidden_size": "32",
    "model.intermediate_size": "64",
    "model.num_hidden_layers": "3",
}
# Most of the memory is activations, or most is weights.
SIZES = (
    {"batch_size": "4", "seq_len": "128"},
    {"batch_size": "2", "seq_len": "16", "model.intermediate_size": "1024"},
)
SETTINGS = tuple(itertools.product(("adamw", "host_adamw"), ("fp32", "bf16"), ("none", "block")))
# Every second mode, each with another setting: the whole product would take minutes.
CASES = list(zip(list(mode_options())[::2], itertools.cycle(SETTINGS), itertools.cycle(SIZES)))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Components, RunPlan]]:
    """Plans overrides; as if this process took no memory, and without a timeline, which takes most of the time."""
    monkeypatch.setattr(memory, "rss_gib", lambda: 0.0)
    monkeypatch.setattr(Machine, "simulated", lambda self, dtype: None)

    def plans(overrides: dict[str, str], has_gpu: bool = True) -> tuple[Components, RunPlan]:
        components = components_of(*(f"{key}={value}" for key, value in overrides.items()))
        return plan_filled(components, machine_of(components), has_gpu)

    return plans


def pieces(advice: str) -> list[dict[str, str]]:
    """The overrides of each piece of advice that names some."""
    words = [piece for piece in advice.replace(" or ", ", ").split(", ") if piece != NOTHING_TO_CHANGE]
    return [dict(override.split("=") for override in piece.split()) for piece in words]


@pytest.mark.parametrize(("mode", "setting", "size"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.slow
def test_all_advice_composes_and_saves_memory(plans, mode: str, setting: tuple[str, ...], size: dict[str, str]):
    own = dict(zip(("optimizer", "precision", "recompute"), setting, strict=True))
    overrides = {"offload": mode, **own, **BASE, **size}
    components, plan = plans(overrides)
    for budget in ("vram_budget", "host_budget"):
        advice = pieces(memory_advice(components, plan, budget, needed=0))
        assert len(advice) <= 3
        for piece in advice:
            _, changed = plans(overrides | piece)
            assert changed.totals[budget] < plan.totals[budget], piece


def advised(plans, *overrides: str, budget: str = "vram_budget", needed: int = 0) -> str:
    components, plan = plans(BASE | dict(override.split("=", 1) for override in overrides))
    return memory_advice(components, plan, budget, needed)


def test_what_the_configuration_has_already_is_not_advised(plans):
    tight = ("offload=layer_stream", "recompute=block", "precision=bf16", "batch_size=1", "offload.slots=1")
    advice = advised(plans, *tight, "seq_len=512", "optimizer=host_adamw", "optimizer.state_dtype=bf16")
    for absent in ("recompute", "precision", "batch_size", "slots", "state_dtype", "=layer_stream"):
        assert absent not in advice
    assert "seq_len=256" in advice


@pytest.mark.slow
def test_changes_that_keep_the_numbers_come_first_unless_they_do_not_suffice(plans):
    job = ("batch_size=4", "seq_len=256", "precision=fp32")
    assert advised(plans, *job).split(", ")[0] in ("microbatches=2", "recompute=block")
    sizes = {"batch_size": "4", "seq_len": "256"}
    _, plan = plans(BASE | sizes)
    _, least = plans(BASE | sizes | {"seq_len": "128"})
    needed = plan.totals["vram_budget"] - least.totals["vram_budget"]
    assert advised(plans, *job, needed=10 * needed) == advised(plans, *job)


@pytest.mark.slow
def test_another_mode_is_not_advised_where_the_command_line_has_keys_that_it_lacks(plans):
    job = ("model.intermediate_size=1024", "seq_len=16", "batch_size=1", "optimizer=host_adamw")
    assert "offload=none" in advised(plans, "offload=layer_stream", *job, budget="host_budget")
    given = advised(plans, "offload=layer_stream", "offload.slots=3", *job, budget="host_budget")
    assert "offload=" not in given


@pytest.mark.slow
def test_gradients_that_only_updates_need_may_be_released(plans, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ring, "LEAST_RING_BYTES", 0)
    monkeypatch.setattr(ring, "RING_UNITS", 1)
    job = ("offload=layer_stream", "model.intermediate_size=1024", "seq_len=16", "batch_size=1", "vram_budget=1MiB")
    job += ("optimizer.gradients=keep",)
    assert "optimizer.gradients=release" in advised(plans, *job, "clip_norm=null", budget="host_budget")
    assert "optimizer.gradients" not in advised(plans, *job, budget="host_budget")


def test_what_a_checkpoint_fixes_is_not_advised_to_a_run_that_resumes(plans):
    advice = advised(plans, "batch_size=4", "seq_len=256", "resume=runs/a")
    assert "recompute=block" in advice
    assert not {"microbatches", "batch_size", "seq_len", "precision"} & {key for p in pieces(advice) for key in p}


def test_nothing_is_moved_to_memory_that_is_too_small(plans):
    components, plan = plans(BASE | {"model.intermediate_size": "1024", "batch_size": "1", "seq_len": "16"})
    assert "offload=" in memory_advice(components, plan, "vram_budget", 0)
    full = dataclasses.replace(plan, budgets={**plan.budgets, "host_budget": 1})
    assert "offload=" not in memory_advice(components, full, "vram_budget", 0)


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        ((), "optimizer.lr=0.0002, schedule.warmup=20 or on_nonfinite=skip"),
        (("clip_norm=null", "schedule.warmup=30"), "optimizer.lr=0.0002, clip_norm=1 or on_nonfinite=skip"),
        (("resume=runs/a",), "on_nonfinite=skip"),
        (("steps=5", "optimizer.lr=0"), "on_nonfinite=skip"),
    ],
)
@pytest.mark.slow
def test_advice_on_gradients_that_are_not_finite(overrides: tuple[str, ...], advice: str):
    assert nonfinite_advice(components_of(*overrides).config) == advice
    for piece in pieces(advice):
        check(composed(*overrides, *(f"{key}={value}" for key, value in piece.items()))[0])


@pytest.mark.slow
def test_advice_for_an_adapter_composes_and_keeps_what_trains_on_the_device(plans):
    overrides = BASE | {"adapter": "lora", "adapter.rank": "2", "precision": "bf16", **SIZES[1]}
    components, plan = plans(overrides)
    advice = memory_advice(components, plan, "vram_budget", 10_000)
    assert {"recompute": "block"} in pieces(advice)
    for changes in pieces(advice):
        after, less = plans(overrides | changes)
        assert less.totals["vram_budget"] < plan.totals["vram_budget"], changes
        assert (less.host_bytes["gradients"], less.host_bytes["optimizer"]) == (0, 0)
        assert not after.updates_overlap
    streamed, plan = plans(overrides | {"offload": "layer_stream", "optimizer": "host_adamw"})
    # Moments of a few numbers on the device are no way to save host memory.
    assert "state_dtype" not in memory_advice(streamed, plan, "host_budget", 1000)


@pytest.mark.parametrize(("devices", "microbatches", "tokens"), [(1, 1, 6 * 16), (2, 1, 3 * 16), (2, 2, 2 * 16)])
def test_the_tokens_of_a_microbatch_are_those_of_one_device(devices: int, microbatches: int, tokens: int):
    config = {"batch_size": 6, "seq_len": 16, "devices": devices, "microbatches": microbatches}
    assert advising._tokens(OmegaConf.create(config)) == tokens
