"""Averages of weights: those of diffusers' EMAModel, alike in every mode and after resuming, wherever they are used."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.training.helpers.in_process import TINY_RUN, components_of, run_here, saved_run, train_tiny
from tests.training.helpers.results import content, curve
from training.evaluation.samples import Samples
from training.saved_runs.export import export
from training.saved_runs.finding import configuration, load_model
from training.weights.averages import PIECE, Averages, averages_in, trained_by_name

STEPS = 4
EMA = "ema=0.4"
SAVED = ("steps=4", "log_every=1", "checkpoint.every=2", "checkpoint.keep=2", "eval.every=2", "dataset=stdlib")
RUN = (*TINY_RUN, *SAVED, "dataset.max_tokens=20000")
HOST = "optimizer=host_adamw"
ADAPTED = ("adapter=lora", "adapter.rank=2")


def at(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def layers() -> nn.Module:
    torch.manual_seed(0)
    # Of more than a piece, and one whose memory has another order.
    model = nn.Sequential(nn.Linear(1024, PIECE // 512), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    model[0].bias.requires_grad_(False)
    return model


@torch.no_grad()
def moved(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def test_averages_are_those_of_diffusers_bit_for_bit():
    model = layers()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    theirs, ours = EMAModel(trained, decay=0.5), Averages(model, 0.5)
    for step in range(1, 30):
        moved(model, step)
        theirs.step(trained)
        ours.update(step)
    assert ours.tensors.keys() == {"0.weight", "1.weight", "1.bias"}
    for found, expected in zip(ours.tensors.values(), theirs.shadow_params, strict=True):
        assert torch.equal(found, expected)
    # The decay has risen to its limit by step 9: from then on it is torch's average with a decay that does not change.
    torchs = AveragedModel(copy.deepcopy(model), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    load(torchs.module, ours)
    torchs.n_averaged += 1
    for step in range(30, 40):
        moved(model, step)
        ours.update(step)
        torchs.update_parameters(model)
    for name, average in ours.tensors.items():
        torch.testing.assert_close(average, torchs.module.get_parameter(name).detach())


def test_averages_do_not_depend_on_how_weights_are_joined_and_who_averages_them(monkeypatch: pytest.MonkeyPatch):
    found = []
    for piece in (PIECE, 1000):
        monkeypatch.setattr("training.weights.averages.PIECE", piece)
        model = layers()
        averages = Averages(model, 0.5)

        def beside(act: Callable, model: nn.Module = model) -> set[nn.Parameter]:
            act([model[1].bias, model[0].weight])
            return {model[1].bias, model[0].weight}

        for step in range(1, 5):
            moved(model, step)
            averages.update(step, *(() if piece == PIECE else (beside,)))
        found.append(averages.tensors)
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@torch.no_grad()
def load(model: nn.Module, averages: Averages) -> None:
    for name, average in averages.tensors.items():
        model.get_parameter(name).copy_(average)


def test_averages_of_bf16_weights_are_float32_and_in_use_for_the_block_alone():
    model = layers().bfloat16()
    averages = Averages(model, 0.5)
    for step in range(1, 9):
        moved(model, step)
        averages.update(step)
    before = copy.deepcopy(model.state_dict())
    with averages.in_use():
        for name, average in averages.tensors.items():
            assert average.dtype == torch.float32
            assert not torch.equal(average, average.bfloat16().float())
            assert torch.equal(model.get_parameter(name), average.bfloat16())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def resident_loop_averages(run: Path) -> dict[str, torch.Tensor]:
    """Returns what EMAModel makes of the weights that a run has saved after each step."""
    first = load_file(at(run, 1) / "model.safetensors")
    shadows = EMAModel([nn.Parameter(tensor) for tensor in first.values()], decay=0.4)
    for step in range(1, STEPS + 1):
        weights = load_file(at(run, step) / "model.safetensors")
        shadows.step([nn.Parameter(weights[name]) for name in first])
    return dict(zip(first, shadows.shadow_params, strict=True))


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A resident run of float32 weights with averages, saved after each step."""
    folder = tmp_path_factory.mktemp("averaged") / "run"
    return saved_run(folder, *RUN, EMA, "checkpoint.every=1", "checkpoint.keep=9")


def test_a_run_has_the_averages_of_its_weights_and_trains_as_one_without(averaged: Path, tmp_path: Path):
    # In the first step EMAModel forgets what it begins with but for the rounding, so the first weights stand for them.
    expected = resident_loop_averages(averaged)
    found = load_file(at(averaged, STEPS) / "ema.safetensors")
    assert found.keys() == expected.keys()
    for name, average in found.items():
        torch.testing.assert_close(average, expected[name], rtol=0, atol=1e-7)
    run_here(tmp_path / "plain", *RUN)
    plain, ours = content(at(tmp_path / "plain", STEPS)), content(at(averaged, STEPS))
    assert ours.pop("ema.safetensors")
    assert plain == ours
    losses = [[record.get("train/loss") for record in curve(run)] for run in (averaged, tmp_path / "plain")]
    assert losses[0] == losses[1]
    scores = [curve(run)[-1]["eval/loss"] for run in (averaged, tmp_path / "plain")]
    assert scores[0] != scores[1]


# What a mode computes, with the options of the resident run of the same numbers.
TWICE = ("precision=bf16", "clip_norm=null", "microbatches=2")
ONCE = ("precision=bf16", "clip_norm=null", "microbatches=1")
CLIPPED = ("precision=bf16", "clip_norm=2")
MODES = {
    "layer_stream": (TWICE, "offload=layer_stream", HOST),
    "released": (ONCE, "offload=layer_stream", HOST, "optimizer.gradients=release"),
    "speculating": (CLIPPED, "offload=layer_stream", HOST, "optimizer.speculate=on"),
    "bounce_linear": (TWICE, "offload=bounce_linear", HOST),
    "after the step": (TWICE, "offload=layer_stream"),
    "on the device": (TWICE, "offload=layer_stream", HOST, "optimizer.device_share=20KiB"),
    "resident": (TWICE, "offload=layer_stream", HOST, "offload.resident=1"),
    "shard_offload": (TWICE, "offload=shard_offload", "offload.shards=2", HOST),
    "tensor_swap": (TWICE, "offload=tensor_swap", "offload@offload.weights=layer_stream", HOST),
}
IN_PLAIN_RUNS = ("layer_stream", "speculating")


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Path]:
    """Returns the directory of a resident run with these keys and averages."""

    @functools.cache
    def resident(keys: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("resident") / "run"
        run_here(folder, *RUN, EMA, *keys)
        return folder

    return resident


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode in IN_PLAIN_RUNS else pytest.mark.slow) for mode in MODES]
)
@pytest.mark.usefixtures("small_activations")
def test_every_mode_has_the_averages_of_the_resident_model_and_resumes_with_them(tmp_path: Path, resident, mode: str):
    keys, *own = MODES[mode]
    expected = resident(keys)
    for number, resumed in enumerate(((), (f"resume={at(expected, 2)}",))):
        found = tmp_path / str(number)
        run_here(found, *RUN, EMA, *keys, *own, *resumed)
        # The weights and the states too: an evaluation under averages leaves them as they are.
        assert content(at(found, STEPS)) == content(at(expected, STEPS))
        assert curve(found)[-1] == curve(expected)[-1]


@pytest.mark.parametrize("homes", ["own", "shared"])
@pytest.mark.slow
def test_two_devices_have_the_averages_of_one(tmp_path: Path, resident, homes: str):
    train_tiny(
        tmp_path / homes, *SAVED, "dataset.max_tokens=20000", EMA, *ONCE, "devices=2", f"parallel.homes={homes}",
        "offload=layer_stream", HOST,
    )  # fmt: skip
    assert content(at(tmp_path / homes, STEPS)) == content(at(resident(TWICE), STEPS))
    assert curve(tmp_path / homes)[-1] == curve(resident(TWICE))[-1]


def test_samples_are_of_the_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    def sample(self: Samples, model: nn.Module, *_: object) -> None:
        seen.append({name: weight.detach().clone() for name, weight in trained_by_name(model).items()})

    monkeypatch.setattr(Samples, "sample", sample)
    run_here(tmp_path / "run", *RUN, EMA, *ADAPTED, "sample.every=2", "sample.tokens=9")
    averages = load_file(at(tmp_path / "run", STEPS) / "ema.safetensors")
    # Before the first step, after the second and after the last.
    assert len(seen) == 3
    assert seen[-1].keys() == averages.keys()
    assert all(torch.equal(weight, averages[name]) for name, weight in seen[-1].items())


@pytest.mark.parametrize("keys", [(), ADAPTED], ids=["whole", "adapter"])
def test_what_is_exported_and_generated_with_are_the_averages_unless_ema_is_null(tmp_path: Path, keys: tuple[str, ...]):
    run = saved_run(tmp_path / "run", *RUN, EMA, *keys)
    file = "adapter_model.safetensors" if keys else "model.safetensors"
    averages, weights = (load_file(at(run, STEPS) / name) for name in ("ema.safetensors", file))
    for number, (overrides, expected) in enumerate((([], averages), (["ema=null"], weights))):
        export(str(run), str(tmp_path / str(number)), overrides)
        found = load_file(tmp_path / str(number) / file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        config, _ = configuration(run, overrides)
        model = components_of(*RUN, *keys).model.to_empty(device="cpu")
        load_model(model, at(run, STEPS), config, torch.device("cpu"))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in trained_by_name(model).items())


def test_averages_that_a_checkpoint_lacks_are_refused(tmp_path: Path):
    assert averages_in(tmp_path, None) == {}
    with pytest.raises(ValueError, match=r"^ema=0.4: .* has no averages: give ema=null for its weights$"):
        averages_in(tmp_path, 0.4)
