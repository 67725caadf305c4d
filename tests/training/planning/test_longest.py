"""seq_len=max names the longest sequence that fits: the plan of it fits, and that of the next length does not."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from offload.knobs import GIB
from tests.test_any_model import GPT2
from tests.training.helpers.in_process import TINY_RUN, command_here, composed
from training.config.validation import check
from training.errors import UserError
from training.planning import memory, plan
from training.planning.longest import COARSE_FROM, MOST_PLANS, MOST_TOKENS, Longest, bounds
from training.planning.machine import Machine, machine_of
from training.planning.plan import plan_filled
from training.planning.report import RunPlan
from training.runs.files import SUMMARY_FILE
from training.settle.components import Components

SMALL = (
    "dataset=synthetic", "hardware=rtx4090", "model.hidden_size=32", "model.intermediate_size=256", "batch_size=1",
    "plan=true", "recompute=block", "model.num_hidden_layers=3",
)  # fmt: skip


def searched(*lines: Callable[[int], float], most: int = MOST_TOKENS) -> tuple[int, int | None, int]:
    """The bounds, and how many lengths were planned."""
    asked = []

    def excess(tokens: int) -> dict[str, int]:
        asked.append(tokens)
        return {str(number): int(line(tokens)) for number, line in enumerate(lines)}

    found = bounds(excess, most)
    assert len(asked) == len(set(asked))
    return *found, len(asked)


@pytest.mark.parametrize("room", [300, 5_000, 12_345, 100_000, 700_001, 9_999_999])
def test_of_affine_bytes_few_plans_are_needed(room: int):
    low, high, count = searched(lambda tokens: 7 * (tokens - room), lambda tokens: tokens - 2 * room - 1000)
    step = 256 if low < COARSE_FROM else 1024
    assert low <= room < high == low + step
    assert low % step == 0
    assert count <= 4 if 8192 < room < 2**19 else count <= 6


@pytest.mark.parametrize(
    "line",
    [
        lambda tokens: tokens**2 / 100 + tokens - 3e8,
        # A budget that is filled as long as there is something to fill it with, and a part that is always there.
        lambda tokens: max(-100, 1000 * (tokens - 150_000)),
        lambda tokens: max(3 * tokens, 5e5) - 6e5,
        lambda tokens: 1e6 * (tokens // 40_000 * 40_000) - 1e11,
    ],
    ids=["squares", "filled", "another peak", "steps"],
)
def test_of_other_bytes_it_takes_more(line: Callable[[int], float]):
    low, high, count = searched(line)
    assert line(low) <= 0 < line(high)
    assert high - low == 1024
    assert count <= MOST_PLANS


def test_where_nothing_is_too_long_the_most_is_found():
    assert searched(lambda tokens: tokens - 1e9, most=1000) == (1000, None, 1)
    assert searched(lambda tokens: tokens - 1e9)[:2] == (MOST_TOKENS, None)
    assert searched(lambda tokens: tokens - 900, most=1000)[:2] == (768, 1000)


def test_lengths_that_ranks_divide_are_multiples_of_their_number():
    low, high = bounds(lambda tokens: {"": tokens % 3 + tokens - 100_000}, MOST_TOKENS, divisor=3)
    assert (low % 3, high - low) == (0, 3072)
    assert bounds(lambda tokens: {"": -1}, 1000, divisor=3) == (999, None)


def test_where_nothing_fits_the_shortest_is_found():
    assert searched(lambda tokens: tokens)[:2] == (0, 256)
    assert searched(lambda tokens: tokens, most=64)[:2] == (0, 64)


def test_without_a_limit_there_is_none():
    with pytest.raises(UserError, match=r"^seq_len=max: no memory is known that bounds it: "):
        bounds(lambda tokens: {}, MOST_TOKENS)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunPlan]:
    """Plans overrides for a GPU, as if this process took no memory."""
    monkeypatch.setattr(memory, "rss_gib", lambda: 0.0)
    monkeypatch.setattr(Machine, "simulated", lambda self, dtype: None)

    def planned(*overrides: str) -> RunPlan:
        config, invocation = composed(*overrides)
        check(config)
        components = Components.of(config, invocation, torch.device("cpu"), on_gpu=True)
        return plan_filled(components, machine_of(components), has_gpu=True)[1]

    return planned


def longest(*overrides: str) -> Longest:
    config, invocation = composed(*overrides, "seq_len=max")
    check(config)
    before = config.copy()
    found = Longest.of(config, invocation, torch.device("cpu"), on_gpu=True)
    assert config == before
    given = tuple(f"{key}={value}" for key, value in found.chosen.items())
    assert found.invocation.overrides == (*invocation.overrides[:-1], *given)
    return found


@pytest.mark.parametrize(
    ("offload", "limit"),
    [
        ("none", "vram_budget=64MiB"),
        pytest.param("layer_stream_swap", "host_budget=64MiB", marks=pytest.mark.slow),
        pytest.param("shard_offload", "vram_budget=64MiB", marks=pytest.mark.slow),
        pytest.param("tensor_swap", "vram_budget=64MiB", marks=pytest.mark.slow),
        # As much as there is room for stays on the device.
        pytest.param("layer_stream", "vram_budget=64MiB", marks=pytest.mark.slow),
        pytest.param("bounce_linear", "vram_budget=64MiB", marks=pytest.mark.slow),
    ],
)
def test_it_fits_and_the_next_does_not(planned, offload: str, limit: str):
    keys = (*SMALL, f"offload={offload}", limit)
    found = longest(*keys)
    tokens = found.chosen["seq_len"]
    step = 256 if tokens < COARSE_FROM else 1024
    tile = [] if offload == "bounce_linear" else ["recompute.tile=16384"]
    assert found.chosen.keys() == {"seq_len"} | ({"recompute.tile"} if tile else set())
    assert not planned(*keys, *tile, f"seq_len={tokens}").exceeded()
    above = planned(*keys, *tile, f"seq_len={tokens + step}")
    (key,) = above.exceeded()
    assert key == limit.partition("=")[0]
    assert str(found.reasons["seq_len"]).startswith(f"{tokens}, because {tokens + step} does not fit ({key}: ")


@pytest.mark.slow
def test_in_tiles_a_longer_one_fits(planned):
    keys = ("model=llama1b", "plan=true", "batch_size=1", "hardware=rtx4090", "offload=layer_stream", "recompute=block")
    whole = longest(*keys, "dataset=synthetic", "recompute.tile=null").chosen["seq_len"]
    found = longest(*keys, "dataset=synthetic")
    assert found.chosen["recompute.tile"] == 16384
    assert found.chosen["seq_len"] > 1.2 * whole


def test_positions_bound_it(planned):
    found = longest(*SMALL[:2], *GPT2, "plan=true", "batch_size=1")
    assert found.chosen == {"seq_len": 1024}
    assert found.reasons["seq_len"] == "1024, because the model has no more positions"


def test_few_positions_bound_it():
    sizes = "model.overrides={n_layer: 1, n_embd: 32, n_head: 2, vocab_size: 300, n_positions: 48}"
    assert longest(*SMALL[:2], *GPT2[:2], sizes, "plan=true", "batch_size=1").chosen == {"seq_len": 48}


@pytest.mark.slow
def test_microbatches_are_those_of_the_length(planned):
    """Where sequences are short a microbatch has several: bytes do not grow until it has one."""
    keys = (*SMALL, f"hardware.vram_gib={256 * 2**20 / GIB}")
    keys = tuple("batch_size=64" if each.startswith("batch_size") else each for each in keys)
    found = longest(*keys, "offload=none", "recompute.tile=null")
    plan = planned(*keys, "offload=none", "recompute.tile=null", f"seq_len={found.chosen['seq_len']}")
    assert plan.microbatches == 64
    assert not plan.exceeded()


def test_pictures_are_refused():
    with pytest.raises(UserError, match=r"^seq_len=max: task=flow_matching trains on images, which have no seq_len: "):
        longest("model=unet_small", "plan=true", "hardware=rtx4090")


def test_a_model_that_computes_token_after_token_is_refused():
    model = ("model=mamba", "model.overrides={num_hidden_layers: 1, hidden_size: 16, vocab_size: 300}")
    with pytest.raises(UserError, match=r"^seq_len=max: the model computes one token after another, .*: give a number"):
        longest(*SMALL[:2], *model, "plan=true", "batch_size=1")


def test_what_is_not_planned_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match=r"^seq_len=max: this system's own memory, copies and times are not planned"):
        longest(*SMALL, "offload=fsdp2")
    monkeypatch.setattr(plan, "dry_step", lambda *_: 1 / 0)
    with pytest.raises(UserError, match=r"^seq_len=max: activations are not in the plan: .*: give a number$"):
        longest(*SMALL, "offload=none")


def test_a_plan_prints_it_and_writes_it_down(tmp_path: Path):
    job = ("plan=true", *(each for each in TINY_RUN if "seq_len" not in each), "dataset=synthetic", "hardware=rtx4090")
    result = command_here(*job, "seq_len=max", "vram_budget=32MiB", f"hydra.run.dir={tmp_path}")
    assert result.returncode == 0, result.stderr
    tokens = OmegaConf.load(tmp_path / "config.yaml").seq_len
    assert f"{tokens}, because {tokens + 256} does not fit (vram_budget: " in " ".join(result.stdout.split())
    assert json.loads((tmp_path / "plan.json").read_text())["chosen"]["seq_len"].startswith(f"{tokens}, because ")
    assert json.loads((tmp_path / SUMMARY_FILE).read_text())["reason"] is None


@pytest.mark.slow
def test_where_nothing_fits_the_plan_has_advice(tmp_path: Path):
    job = ("plan=true", *(each for each in TINY_RUN if "seq_len" not in each), "dataset=synthetic", "hardware=rtx4090")
    result = command_here(*job, "seq_len=max", "vram_budget=600KiB", f"hydra.run.dir={tmp_path}")
    assert result.returncode == 1
    assert result.stderr.startswith("error: vram_budget: ")
    assert ": take " in result.stderr
    assert "256, because 256 does not fit" in " ".join(result.stdout.split())


def test_a_run_is_told_to_take_the_number(tmp_path: Path):
    result = command_here(*TINY_RUN, "seq_len=max", f"hydra.run.dir={tmp_path}")
    assert (result.returncode, result.stderr) == (
        1,
        "error: seq_len=max: is for a plan: add plan=true, and give the run the number that it names\n",
    )
