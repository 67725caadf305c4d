"""The components of a run: made once, and left by a dry run as they were."""

from pathlib import Path

import pytest
import torch
from torch import nn

from models.llama import Llama
from offload.modes.mode import Attached
from offload.optimizer.adamw import HostAdamW
from offload.planning import PlannedSharers
from offload.sharing.sharers import NO_SHARERS, Sharers
from offload.streams import registry
from offload.streams.transfer import Counters
from tests.test_any_model import GPT2
from tests.training.helpers.in_process import TINY_RUN, components_of, run_here
from training.config.modes import mode_options
from training.errors import UserError
from training.optim import AdamW
from training.planning.dry_step import dry_step
from training.planning.memory import PlannedUpdate
from training.runs.records import read_metrics
from training.settle.components import Components, acquired, attached

MODES = sorted(mode_options())
TIED = "model.tie_word_embeddings=true"


def components_under(mode: str, *overrides: str) -> Components:
    return components_of(*TINY_RUN, f"offload={mode}", *overrides)


def held(model: nn.Module) -> dict[tuple[str, str], torch.Tensor]:
    """The parameters and buffers by module and attribute."""
    return {
        (name, attribute): tensor
        for name, module in model.named_modules()
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items())
    }


def hooks(model: nn.Module) -> list[object]:
    """Everything that a mode may have left on a module."""
    left = []
    for module in model.modules():
        left += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        left += [*module._state_dict_pre_hooks.values(), *module._load_state_dict_pre_hooks.values()]
        left += [vars(module)["forward"]] if "forward" in vars(module) else []
    return left


def test_a_model_that_the_task_cannot_train_is_refused_before_data_is_read():
    """A plan reads no data."""
    with pytest.raises(UserError, match=r"^task=classification: Llama is a language model"):
        components_of(*TINY_RUN, "task=classification", "dataset=synthetic_images")
    with pytest.raises(
        UserError, match=r"^seq_len=1025: the model has embeddings for 1024 positions: take at most 1024$"
    ):
        components_of(*GPT2, "dataset=synthetic", "hardware=h200", "seq_len=1025")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_a_dry_run_leaves_the_model_as_it_was(mode: str):
    components = components_under(mode, "recompute=block", TIED, "microbatches=2")
    before = held(components.model)
    assert dry_step(components, has_gpu=True) == dry_step(components, has_gpu=True)
    after = held(components.model)
    assert after.keys() == before.keys()
    assert all(after[place] is before[place] for place in before)
    assert components.model.lm_head.weight is components.model.model.embed_tokens.weight
    assert all(parameter.grad is None for parameter in components.model.parameters())
    assert hooks(components.model) == []


@pytest.mark.parametrize("mode", ["none", "bounce_linear", "shard_offload", "layer_stream_swap"])
@pytest.mark.slow
def test_a_run_without_a_dry_run_trains_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str):
    """A dry run that fails in the middle of a step leaves model and mode usable."""
    job = (*TINY_RUN, f"offload={mode}", "dataset=synthetic")
    run_here(tmp_path / "planned", *job)
    forward = Llama.forward

    def needs_values(self, *arguments: object) -> torch.Tensor:
        loss = forward(self, *arguments)
        if loss.is_meta:
            raise RuntimeError("this model needs values")
        return loss

    monkeypatch.setattr(Llama, "forward", needs_values)
    run_here(tmp_path / "not planned", *job)
    planned, not_planned = (read_metrics(tmp_path / name) for name in ("planned", "not planned"))
    assert [record["train/loss"] for record in planned] == [record["train/loss"] for record in not_planned]


def test_blocks_are_recomputed_unless_the_mode_does_that_itself():
    assert len(components_under("none", "recompute=block").recomputed_blocks) == 2
    assert components_under("none").recomputed_blocks == ()
    assert components_under("shard_offload", "recompute=block").recomputed_blocks == ()


@pytest.mark.parametrize(("name", "found", "overlap"), [("adamw", AdamW, False), ("host_adamw", HostAdamW, True)])
def test_the_optimizer_says_whether_its_updates_overlap(name: str, found: type, overlap: bool):
    components = components_under("layer_stream", f"optimizer={name}")
    assert components.optimizer_class is found
    assert components.updates_overlap is overlap


@pytest.mark.parametrize(
    ("overrides", "early"), [((), False), (("clip_norm=null",), True), (("clip_norm=null", "on_nonfinite=skip"), False)]
)
def test_updates_begin_early_where_nothing_must_be_known_of_all_gradients(overrides: tuple[str, ...], early: bool):
    assert components_under("none", *overrides).updates_begin_early is early


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("offload=layer_stream", "offload.layers=blocks"), r"offload\.layers=blocks: no list of blocks there"),
        (("model.intermediate_size=2305843009213693952",), "model: its sizes are beyond any memory"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(overrides: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=message):
        components_of(*TINY_RUN, *overrides)


@pytest.mark.parametrize(
    ("mode", "sharers", "told"),
    [
        ("layer_stream", NO_SHARERS, "12.0 GiB of host memory in 4.0 s, 3.0 GiB/s"),
        # A mode that shares nothing: four real ones would be four processes.
        ("none", PlannedSharers(4), "48.0 GiB of host memory in 4.0 s, 12.0 GiB/s"),
    ],
)
def test_page_locking_is_told_with_its_rate(
    mode: str, sharers: Sharers, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    components = components_under(mode)
    times = iter([1.0, 5.0])
    monkeypatch.setattr("training.settle.components.perf_counter", lambda: next(times))
    monkeypatch.setattr(Attached, "counters", lambda _: Counters(host_pinned_bytes=12 * 2**30))
    with acquired(components.device) as streams, attached(components, streams, sharers):
        pass
    assert capsys.readouterr().out == f"page-locked {told}\n"


def test_streams_are_released_after_an_error():
    def fail_inside() -> None:
        with acquired("cpu"):
            assert registry.holders("cpu") == 1
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail_inside()
    assert registry.holders("cpu") == 0


def test_an_attention_without_backward_on_a_cpu_is_refused():
    with pytest.raises(UserError, match=r"^model\.attention=flex_attention: torch has no backward of it on a CPU"):
        components_of("model=hf", "model.source=qwen3", "model.attention=flex_attention", "offload=none")


@pytest.mark.parametrize("clip_norm", [1, "null"])
@pytest.mark.parametrize(("master", "state_dtype"), [("compact", "fp32"), ("compact", "int8"), ("stochastic", "int8")])
def test_states_and_their_gradients_fit_in_spare_memory(clip_norm, master: str, state_dtype: str):
    keys = (f"optimizer.master={master}", f"optimizer.state_dtype={state_dtype}", f"clip_norm={clip_norm}")
    sizes = ("model.num_hidden_layers=24", "model.hidden_size=64", "precision=bf16", "optimizer=host_adamw")
    components = components_under("layer_stream", *sizes, *keys, "optimizer.device_share=auto")
    trained = components.footprint.trained
    assert components.updates_begin_early == (clip_norm == "null")
    most = sum(HostAdamW.planned_bytes(unit, components.state_format, placed=True) for unit in trained)
    resident = HostAdamW.planned_bytes(components.footprint.resident, components.state_format)
    of_unit = max(sum(parameter.nbytes for parameter in unit) for unit in trained)
    for spare in (0, of_unit // 2, 3 * of_unit, most // 2, most):
        update = PlannedUpdate.of(components, spare + resident)
        streamed = update.device_bytes - resident
        beside = of_unit if clip_norm == "null" and streamed else update.placed_gradient_bytes
        assert streamed + beside <= spare
    # Most of the room is used, and not all: the allocator needs some.
    assert 0.4 * most < components.room_for_states(most) <= 0.8 * most
