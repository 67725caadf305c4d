"""Advice holds where it is given: the run that it describes is planned, and fits."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from offload.knobs import GIB
from offload.weights.gradients import offloader
from tests.training.helpers.in_process import components_of, composed, conf_initialised
from training.config.modes import mode_options
from training.config.validation import check
from training.planning import memory
from training.planning.advice import memory_advice, nonfinite_advice
from training.planning.machine import Machine, machine_of
from training.planning.plan import plan_filled
from training.planning.report import Limit, RunPlan
from training.settle.components import Components

SMALL = (
    "dataset=synthetic", "hardware=rtx4090", "model.hidden_size=32", "model.intermediate_size=1024",
    "model.num_hidden_layers=3", "batch_size=4", "seq_len=64",
)  # fmt: skip
STREAMED = ("offload=layer_stream", "optimizer.device_share=0", "optimizer.speculate=off")
SETTINGS = tuple(itertools.product(("adamw", "host_adamw"), ("fp32", "bf16"), ("none", "block")))
# Every second mode, each with another setting: the whole product would take minutes.
CASES = list(zip(list(mode_options())[::2], itertools.cycle(SETTINGS)))

Planned = tuple[Components, RunPlan]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Planned]:
    """Plans overrides for a GPU; as if this process took no memory, and without a timeline."""
    monkeypatch.setattr(memory, "rss_gib", lambda: 0.0)
    monkeypatch.setattr(memory, "CUDA_HOST_BYTES", 0)
    monkeypatch.setattr(Machine, "simulated", lambda self, dtype: None)

    def plans(*overrides: str) -> Planned:
        config, invocation = composed(*overrides)
        check(config)
        components = Components.of(config, invocation, torch.device("cpu"), on_gpu=True)
        return plan_filled(components, machine_of(components), has_gpu=True)

    return plans


def advice_on(components: Components, plan: RunPlan, **limits: int) -> str:
    """The advice where `limits` hold besides those of the plan."""

    def exceeded(_: Components, plan: RunPlan) -> dict[str, Limit]:
        over = {key: Limit(limit, "test") for key, limit in limits.items() if plan.totals[key] > limit}
        return plan.exceeded() | over

    with conf_initialised():
        return memory_advice(components, plan, exceeded)


def with_advice(overrides: tuple[str, ...], advice: str) -> tuple[str, ...]:
    """The command line of the run that `advice` describes."""
    given = advice.partition(" (planned: ")[0].split()
    changed = {override.partition("=")[0] for override in given}
    return (*(each for each in overrides if each.partition("=")[0] not in changed), *given)


def advised(plans, *overrides: str) -> str:
    """The advice on a run that does not fit; the run that it describes does."""
    components, plan = plans(*overrides)
    assert plan.exceeded()
    advice = advice_on(components, plan)
    _, after = plans(*with_advice(overrides, advice))
    assert not after.exceeded()
    return advice


def of_mib(vram: float, host: float) -> tuple[str, str]:
    return f"hardware.vram_gib={vram / 1024}", f"hardware.host_gib={host / 1024}"


def test_a_model_that_is_resident_streams(plans):
    assert "offload=layer_stream" in advised(plans, *SMALL, *of_mib(4, 1000))


def test_what_suffices_alone_is_advised_alone(plans):
    components, plan = plans(*SMALL, *STREAMED)
    host, states = plan.totals["host_budget"], plan.host_bytes["optimizer"]
    # Of 10 bytes a parameter, moments in bf16 save 4, and those in 8 bits 6.
    first = advice_on(components, plan, host_budget=host - states // 4)
    assert first.startswith("optimizer.state_dtype=bf16 (planned: ")
    assert " in place of " in first
    assert first.endswith("; optimizer.state_dtype=bf16: moments within 2^-9 of their size)")
    second = advice_on(components, plan, host_budget=host - states // 2)
    assert second.startswith("optimizer.state_dtype=int8 (planned: ")


def test_memory_of_the_gpu_is_filled_before_numbers_change(plans):
    components, plan = plans(*SMALL, "offload=layer_stream")
    advice = advice_on(components, plan, host_budget=plan.totals["host_budget"] // 2)
    assert advice.startswith("vram_budget=22GiB (planned: ")
    assert ";" not in advice


def test_without_clipping_gradients_need_no_memory(plans, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offloader, "LEAST_RING_BYTES", 0)
    components, plan = plans(*SMALL, "model.num_hidden_layers=8", *STREAMED, "optimizer.state_dtype=bf16")
    limit = plan.totals["host_budget"] - plan.host_bytes["gradients"] // 8
    assert advice_on(components, plan, host_budget=limit).startswith("clip_norm=null (planned: ")


def test_where_microbatches_add_up_gradients_a_step_of_one_of_them_is_advised(plans, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(offloader, "LEAST_RING_BYTES", 0)
    smallest = ("optimizer.state_dtype=int8", "optimizer.master=stochastic", "microbatches=2")
    overrides = (*SMALL, "model.num_hidden_layers=8", *STREAMED, *smallest)
    components, plan = plans(*overrides)
    limit = plan.totals["host_budget"] - plan.host_bytes["gradients"] // 8
    advice = advice_on(components, plan, host_budget=limit)
    rows = components.config.batch_size // 2
    assert advice.startswith(f"clip_norm=null microbatches=1 batch_size={rows} (planned: ")
    _, after = plans(*with_advice(overrides, advice))
    assert after.totals["host_budget"] <= limit


@pytest.mark.slow
def test_frozen_weights_beside_an_adapter_are_quantised_where_nothing_else_helps(plans):
    overrides = (*SMALL, "adapter=lora", "precision=bf16", "offload=layer_stream", "optimizer=adamw")
    components, plan = plans(*overrides)
    advice = advice_on(components, plan, host_budget=int(0.7 * plan.totals["host_budget"]))
    assert advice.startswith("quantize=int8 (planned: ")
    assert advice.endswith("; quantize=int8: frozen weights in 8 bits)")
    _, after = plans(*with_advice(overrides, advice))
    assert after.totals["host_budget"] < 0.7 * plan.totals["host_budget"]


def test_where_nothing_suffices_a_smaller_model_is_advised_with_what_is_still_needed(plans):
    components, plan = plans(*SMALL, *STREAMED, *of_mib(1000, 1))
    advice = advice_on(components, plan)
    assert advice.startswith("a smaller model, or more memory: even ")
    assert "optimizer.state_dtype=int8 optimizer.master=stochastic needs " in advice
    assert advice.endswith(" of host_budget")


def test_what_a_checkpoint_fixes_is_not_advised_to_a_run_that_resumes(plans):
    components, plan = plans(*SMALL, "seq_len=1024", "offload=layer_stream", "resume=runs/a")
    limit = int(0.8 * plan.totals["vram_budget"])
    advice = advice_on(components, plan, vram_budget=limit)
    assert advice.startswith("recompute=block (planned: ")
    new, plan = plans(*SMALL, "seq_len=1024", "offload=layer_stream")
    assert "microbatches=" in advice_on(new, plan, vram_budget=limit)


@pytest.mark.parametrize(("mode", "setting"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.slow
def test_in_every_mode_advice_fits(plans, mode: str, setting: tuple[str, ...]):
    own = (f"{key}={value}" for key, value in zip(("optimizer", "precision", "recompute"), setting, strict=True))
    overrides = (f"offload={mode}", *own, *SMALL)
    components, plan = plans(*overrides)
    for budget in ("vram_budget", "host_budget"):
        limits = {budget: int(0.8 * plan.totals[budget])}
        advice = advice_on(components, plan, **limits)
        if not advice.startswith("a smaller model"):
            _, after = plans(*with_advice(overrides, advice))
            assert after.totals[budget] <= limits[budget], advice


@pytest.mark.parametrize(
    "overrides",
    [
        ("model=qwen3_8b", "offload=layer_stream", "hardware=rtx4090"),
        ("model=qwen3_8b", "hardware=rtx4090"),
        ("model=qwen3_8b", "adapter=lora", "hardware=rtx4090", "hardware.vram_gib=11.5"),
        ("model=llama7b", "offload=layer_stream", "hardware=rtx4090", "microbatches=1", "batch_size=8"),
        ("model=llama1b", "hardware=rtx4090", "hardware.vram_gib=8", "hardware.host_gib=16"),
        ("model=llama1b", "offload=tensor_swap", "hardware=rtx4090", "hardware.vram_gib=8"),
    ],
    ids=" ".join,
)
@pytest.mark.slow
def test_models_on_cards_that_they_do_not_fit(plans, overrides: tuple[str, ...]):
    advised(plans, *overrides)


def test_a_machine_whose_rate_is_known_in_one_precision_is_advised_the_other(plans):
    components, plan = plans(*SMALL, *STREAMED, "precision=fp32", "optimizer.state_dtype=int8", "recompute=block")
    measured = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, bf16_tflops=None))
    assert "precision=bf16" in advice_on(components, measured, host_budget=plan.totals["host_budget"] * 3 // 4)


def test_a_run_out_of_memory_is_advised_a_smaller_budget(plans):
    components, plan = plans(*SMALL, "offload=layer_stream", f"vram_budget={2 * GIB}")
    less = dataclasses.replace(plan, budgets={**plan.budgets, "vram_budget": 1})
    advice = advice_on(components, less, vram_budget=plan.totals["vram_budget"] - 2**18)
    assert advice.startswith("vram_budget=")


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
    for piece in advice.replace(" or ", ", ").split(", "):
        check(composed(*overrides, piece)[0])
