"""Building a job: everything is made once, and given back wherever building or training fails."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from models.llama import Llama
from offload.knobs import GIB
from offload.modes.layer_stream import LayerStream
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.overlap import BUSY_CORES, LAUNCHING_CORES
from offload.streams import registry
from offload.weights.streamer import WeightStreamer
from tests.training.helpers.in_process import TINY_RUN, components_of, composed, run_here, signals_as_before
from training.checkpoints.resuming import Checkpoint
from training.errors import UserError
from training.run import build as build_module
from training.run.build import build, build_optimizer, place_states_in_spare_vram
from training.run.loop import train
from training.runs.files import CONFIG_FILE, HARDWARE_FILE, PLAN_FILE
from training.settle import components
from training.settle.components import STATES_OF_SPARE, acquired, attached

JOB = (
    *TINY_RUN, "dataset=synthetic", "offload=layer_stream", "optimizer=host_adamw", "recompute=block",
    "checkpoint.every=3",
)  # fmt: skip
# The steps of `build` behind the one that acquires streams, by the names under which they are called.
STEPS = (
    (build_module, "record_hardware"),
    (build_module, "print_brief"),
    (build_module, "build_tracker"),
    (build_module, "fill_parameters"),
    (components, "recompute"),
    (build_module, "build_optimizer"),
    (build_module, "build_schedule"),
    (build_module, "Checkpoints"),
    # Attaching the mode, and the loop.
    (WeightStreamer, "__init__"),
    (HostAdamW, "step"),
)


def is_free() -> bool:
    """True if no streams are held and no thread of an optimizer runs."""
    threads = [thread.name for thread in threading.enumerate()]
    return registry.holders("cpu") == 0 and not any(name.startswith("host optimizer") for name in threads)


def failing(error: BaseException) -> Callable:
    def fail(*arguments: object, **keywords: object) -> None:
        raise error

    return fail


@pytest.fixture
def fails(tmp_path: Path) -> Callable[..., None]:
    """Expects a run to fail with ArithmeticError and to give everything back, and a second run to work."""

    def fails(monkeypatch: pytest.MonkeyPatch, target: object, name: str, *overrides: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, failing(ArithmeticError(name)))
            with pytest.raises(ArithmeticError, match=name):
                run_here(tmp_path / "first", *JOB, *overrides)
        assert is_free()
        assert run_here(tmp_path / "second", *JOB)["status"] == "ok"
        assert is_free()

    return fails


@pytest.mark.parametrize(
    ("module", "step"),
    [*(pytest.param(*step, marks=pytest.mark.slow) for step in STEPS[:-2]), *STEPS[-2:]],
    ids=[step for _, step in STEPS],
)
def test_a_step_of_the_build_that_fails_gives_everything_back(
    fails, monkeypatch: pytest.MonkeyPatch, module: ModuleType, step: str
):
    fails(monkeypatch, module, step)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_load_gives_everything_back(fails, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run_here(tmp_path / "saved", *JOB)
    fails(monkeypatch, Checkpoint, "restore", f"resume={tmp_path / 'saved'}", "steps=9")


def test_a_mode_that_fails_to_detach_gives_the_streams_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    config, invocation = composed(*JOB, run_dir=tmp_path)

    def built() -> None:
        with build(config, invocation) as job:
            detach = job.attached.trained.detach
            monkeypatch.setattr(job.attached.trained, "detach", lambda: (detach(), failing(ArithmeticError())()))

    with pytest.raises(ArithmeticError):
        built()
    assert is_free()


def test_a_host_without_memory_is_one_line_and_gives_the_streams_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # Less is free than when the run was planned.
    monkeypatch.setattr("offload.memory.host_memory.free_host_bytes", lambda **_: 1000)
    words = r"the host is out of memory \(0\.00 GiB of host memory are needed, .* are free\): planned were .*: take "
    with pytest.raises(UserError, match=words):
        run_here(tmp_path, *JOB)
    assert is_free()


def test_the_model_is_given_back(tmp_path: Path):
    config, invocation = composed(*JOB, run_dir=tmp_path)
    with signals_as_before(), build(config, invocation) as job:
        model = job.components.model
        assert "forward" in vars(model.model.layers[0])
        train(job)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.slow
def test_model_and_mode_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int):
    made = []
    for kind in (Llama, LayerStream):

        def counted(self, *arguments: object, make=kind.__init__, name=kind.__name__, **keywords: object) -> None:
            made.append(name)
            make(self, *arguments, **keywords)

        monkeypatch.setattr(kind, "__init__", counted)
    run_here(tmp_path, *JOB, "batch_size=6", f"microbatches={count}")
    # The second mode has no model: its knobs are checked before anything is built.
    assert sorted(made) == ["LayerStream", "LayerStream", "Llama"]


@pytest.mark.parametrize("decays", ["false", "true"])
def test_norms_and_biases_of_several_dimensions_do_not_decay_unless_asked(decays: str):
    components = components_of(*JOB, f"optimizer.decay_norms_and_biases={decays}")
    block = components.model.model.layers[0].self_attn
    with torch.device("meta"):
        block.bias, block.q_norm = nn.Parameter(torch.zeros(2, 3)), nn.LayerNorm((2, 3))
    with acquired(components.device) as streams, attached(components, streams) as found:
        optimizer = build_optimizer(components, found)
        groups = [(group["weight_decay"], set(group["params"])) for group in optimizer.param_groups]
        for parameter in (block.bias, block.q_norm.weight, block.q_norm.bias):
            decay = next(decay for decay, members in groups if parameter in members)
            assert (decay > 0) == (decays == "true")
        assert sum(len(members) for _, members in groups) == len(list(components.model.parameters()))


@pytest.mark.parametrize("clip_norm", ["1.0", "null"])
@pytest.mark.parametrize(("given", "of_rank", "left"), [("null", 7, True), ("3", 7, False), ("3", None, False)])
def test_updates_leave_cores_of_the_ranks_unless_a_number_is_given(
    given: str, of_rank: int | None, left: bool, clip_norm: str
):
    components = components_of(*JOB, f"optimizer.threads={given}", f"clip_norm={clip_norm}")
    with acquired(components.device) as streams, attached(components, streams) as found:
        optimizer = build_optimizer(components, found, cores=of_rank)
        early = components.updates_begin_early
        assert early == (clip_norm == "null")
        assert optimizer.threads == (7 - (BUSY_CORES if early else LAUNCHING_CORES) if left else 3)
    assert components.config.optimizer.threads == (None if given == "null" else 3)


@pytest.mark.parametrize(
    ("device", "share", "budget", "placed"),
    [
        # The room in what the first step leaves of the smaller one of budget and GPU.
        ("cuda", "auto", "3GiB", [int(2 * GIB * STATES_OF_SPARE)]),
        ("cuda", "auto", "9GiB", [int(7 * GIB * STATES_OF_SPARE)]),
        ("cuda", "auto", "512MiB", [0]),
        ("cuda", "auto", None, []),
        ("cuda", 1024, "3GiB", []),
        # No plan counts states there, and the peak of a step is not known.
        ("cpu", "auto", "3GiB", []),
    ],
)
def test_states_go_where_the_first_step_left_room(monkeypatch: pytest.MonkeyPatch, device, share, budget, placed):
    monkeypatch.setattr(build_module, "vram_bytes", lambda device: 8 * GIB)
    monkeypatch.setattr(build_module, "vram_peak_gib", lambda device: 1.0 if device.type == "cuda" else 0.0)
    seen: list[int] = []
    # Updates begin early, and gradients take next to nothing.
    components = components_of(*JOB, "clip_norm=null")
    job = SimpleNamespace(
        components=SimpleNamespace(
            device=torch.device(device),
            config=SimpleNamespace(vram_budget=budget),
            room_for_states=components.room_for_states,
        ),
        attached=SimpleNamespace(trained=SimpleNamespace(place_states=seen.append)),
        optimizer=SimpleNamespace(device_share=share),
    )
    place_states_in_spare_vram(job)
    assert seen == placed


def test_the_run_begins_when_nothing_can_be_refused_and_before_anything_is_written(tmp_path: Path):
    config, invocation = composed(*JOB, run_dir=tmp_path)
    begun = []
    with build(config, invocation, begin=lambda: begun.append(sorted(path.name for path in tmp_path.iterdir()))):
        assert (tmp_path / PLAN_FILE).exists()
        assert (tmp_path / HARDWARE_FILE).exists()
    assert begun == [[]]
    refused, _ = composed(*JOB, "offload.resident=99", run_dir=tmp_path)
    with pytest.raises(UserError), build(refused, invocation, begin=lambda: begun.append([CONFIG_FILE])):
        pass
    assert len(begun) == 1


@pytest.mark.parametrize(("model", "experts"), [("mixtral_small", "grouped_mm"), ("tiny", None)])
def test_wandb_is_told_what_computes_experts(model: str, experts: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build_module, "Tracker", lambda **given: given["config"])
    config = build_module.build_tracker(components_of(f"model={model}", "hardware=h200"), {"gpu": "H200"})
    assert config.get("experts_implementation") == experts
    assert config["machine"] == {"gpu": "H200"}
