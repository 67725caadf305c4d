"""The overlays in conf/experiment/ compose, contain every mode, and train when they are made small."""

import json
from pathlib import Path

import pytest
from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict

from offload.optimizer.formats import STATE_DTYPES
from tests import ROOT
from tests.training.helpers.in_process import command_here, conf_initialised, run_here
from training.config import schema
from training.config.modes import mode_options
from training.config.validation import check
from training.data.chats.chat import Chats
from training.runs.files import PLAN_FILE, SAMPLES_FILE
from training.sweeps import launcher

EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
SMALL = (
    "model=tiny", "model.hidden_size=32", "model.intermediate_size=64", "batch_size=2", "steps=3", "warmup_steps=1",
    "device=cpu", "tracking=disabled", "dataset.max_tokens=50000",
)  # fmt: skip

schema.register()
launcher.register_launcher()


def composed(*overrides: str) -> DictConfig:
    with conf_initialised():
        return compose("config", list(overrides), return_hydra_config=True)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_is_consistent(experiment: str):
    config = composed(f"experiment={experiment}")
    with open_dict(config):
        del config["hydra"]
    check(config)


def jobs(*arguments: str, experiment: str = "offload_ablation") -> list[list[str]]:
    params = composed(f"experiment={experiment}").hydra.sweeper.params
    overrides = [*(f"{key}={value}" for key, value in params.items()), *arguments]
    with conf_initialised():
        # It lists the options of a group.
        loader = GlobalHydra.instance().config_loader()
        (batch,) = BasicSweeper.split_arguments(OverridesParser.create(loader).parse_overrides(overrides), None)
    return batch


def test_the_ablation_sweeps_every_mode_with_and_without_recompute_in_two_seeds():
    found = {tuple(job) for job in jobs()}
    assert found == {
        (f"offload={mode}", f"recompute={recompute}", f"seed={seed}")
        for mode in mode_options()
        for recompute in ("none", "block")
        for seed in (0, 1)
    }


def test_the_ablation_is_narrowed_on_the_command_line():
    assert jobs("offload=layer_stream", "recompute=block", "seed=3", "offload.slots=2,4") == [
        ["offload=layer_stream", "recompute=block", "seed=3", f"offload.slots={slots}"] for slots in (2, 4)
    ]


def test_the_largest_model_is_searched_by_plans_of_every_size_of_the_states():
    config = composed("experiment=largest_24gib")
    assert config.plan
    assert (config.vram_budget, config.host_budget, config.clip_norm) == ("22GiB", "119GiB", None)
    found = {tuple(job) for job in jobs(experiment="largest_24gib")}
    formats = {job[:2] for job in found}
    assert formats == {
        (f"optimizer.master={master}", f"optimizer.state_dtype={moments}")
        for master in ("compact", "stochastic")
        for moments in STATE_DTYPES
    }
    depths = {int(job[2].partition("=")[2]) for job in found}
    assert len(found) == len(formats) * len(depths)
    # From below what the largest states leave room for to beyond what the smallest do, by 119 GiB and 317 M a block.
    assert min(depths) * 317e6 * 12 < 119 * 2**30 < max(depths) * 317e6 * 4


@pytest.mark.parametrize(
    "overrides", [("exact_7b_24gib", "seq_len=64", "schedule.warmup=1"), ("long_context", "seq_len=2048")]
)
@pytest.mark.slow
def test_a_large_experiment_trains_when_it_is_made_small(tmp_path: Path, overrides: tuple[str, ...]):
    experiment, *shrunk = overrides
    run_here(tmp_path, f"experiment={experiment}", *SMALL, *shrunk)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("ok", 3)
    assert summary["transfer/h2d_gib"] > 0
    assert summary["transfer/d2h_gib"] > 0


@pytest.mark.parametrize(
    ("experiment", "card", "parameters", "tokens_per_s"),
    [
        ("full_8b_24gib", (), 8e9, 1250),
        ("lora_8b_24gib", (), 8e9, 1340),
        ("lora_8b_12gib", ("hardware.vram_gib=11.5",), 8e9, 1340),
        ("lora_30b_a3b_24gib", (), 30e9, 1970),
    ],
)
@pytest.mark.slow
def test_large_models_fit_a_desktop(
    tmp_path: Path, experiment: str, card: tuple[str, ...], parameters: float, tokens_per_s: float
):
    job = (f"experiment={experiment}", "hardware=rtx4090", *card, "plan=true", f"hydra.run.dir={tmp_path}")
    result = command_here(*job)
    assert result.returncode == 0, result.stderr
    plan = json.loads((tmp_path / PLAN_FILE).read_text())
    assert plan["fits"] == {"vram_budget": True, "host_budget": True}
    assert plan["parameters"] > parameters
    # README has the tokens/s.
    tokens = 4 * 2048 if experiment.startswith("full") else 16 * 2048
    assert tokens / plan["step_ms"] * 1e3 == pytest.approx(tokens_per_s, rel=0.05)


def test_an_experiment_that_is_a_sweep_says_so_without_m(tmp_path: Path):
    refused = command_here("experiment=offload_ablation", f"hydra.run.dir={tmp_path}")
    assert refused.returncode == 1
    (line,) = refused.stderr.splitlines()
    swept = "experiment=offload_ablation: is a sweep over offload, recompute, seed"
    assert line == f"error: {swept}: add -m, or give offload=VALUE for one run"


def test_the_chats_that_are_shipped_are_few_and_short():
    config = composed("experiment=chat")
    assert Path(config.dataset.files).stat().st_size < 60_000
    dataset = Chats(config.dataset.files, seed=0, seq_len=config.seq_len, batch_size=1, too_long="refuse")
    assert 150 <= dataset.num_blocks <= 300


@pytest.mark.slow
def test_the_tiny_model_learns_to_answer_what_it_was_asked_in_training(tmp_path: Path):
    run_here(tmp_path, "experiment=chat", "device=cpu", "sample.every=100000")
    last = (tmp_path / SAMPLES_FILE).read_text().splitlines()[-1]
    assert "It copies each block as a whole, with its buffers." in last
