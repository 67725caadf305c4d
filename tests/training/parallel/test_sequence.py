"""Ranks that divide sequences compute what one device does, within rounding, and every mode what the resident model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload.planning import Bandwidth, SimulatedStreams
from tests.training.helpers.in_process import components_of, composed, run_here
from tests.training.helpers.modes import small_modes
from tests.training.helpers.results import content
from tests.training.parallel.conftest import RUN, run_ranks
from training.batches import examples_in
from training.config.validation import check
from training.errors import UserError
from training.parallel import group
from training.parallel.ranks import RankLostError
from training.parallel.sequence import pieces_of, shares_of_rows
from training.planning.dry_step import dry_step, forward_flops
from training.planning.notes import notes_of
from training.runs.records import read_metrics
from training.tasks.causal_lm import CausalLM

QWEN = (
    "model=hf", "model.source=qwen3", "model.overrides={vocab_size: 320, hidden_size: 32, intermediate_size: 64,"
    " num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8}",
)  # fmt: skip
MODELS = {"llama": (), "qwen3": QWEN}
TWO = ("devices=2", "parallel.sequence=2")
EXACT = ("precision=fp32", "microbatches=1")
PICTURES = ("task=classification", "dataset=glyphs", "model=vit_l")
STREAMED = ("offload=layer_stream", "optimizer=host_adamw")
# Updates begin inside backward where ranks share homes.
EARLY = ("optimizer=host_adamw", "clip_norm=null")
# Losses are means of 128 float32, of which each rank adds up a half.
CLOSE = 5e-7


def at(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def of_model(keys: tuple[str, ...]) -> tuple[str, ...]:
    """RUN with another model, if `keys` choose one."""
    return (*(key for key in RUN if not keys or not key.startswith("model.")), *keys)


def test_pieces_are_runs_of_positions_with_the_labels_of_their_tokens():
    rows = torch.arange(18).view(2, 9)
    first, second = pieces_of(rows, 2)
    assert first["input_ids"].tolist() == [[0, 1, 2, 3], [9, 10, 11, 12]]
    assert first["labels"].tolist() == [[1, 2, 3, 4], [10, 11, 12, 13]]
    assert second["labels"].tolist() == [[5, 6, 7, 8], [14, 15, 16, 17]]
    chats = {"input_ids": rows[:, :7], "labels": rows[:, 1:8], "lengths": torch.tensor([7, 5])}
    first, _, third = pieces = pieces_of(chats, 3)
    assert [piece["lengths"].tolist() for piece in pieces] == [[3, 3], [3, 2], [1, 0]]
    assert third["input_ids"].tolist() == [[6, 0, 0], [15, 0, 0]]
    assert third["labels"].tolist() == [[7, -100, -100], [16, -100, -100]]


def test_shares_have_the_positions_of_a_rank_in_all_rows_and_its_labels():
    rows = torch.arange(15).view(3, 5)
    labels = rows + 1
    labels[:2, :2] = -100
    batch = {"input_ids": rows, "labels": labels}
    first, second = shares_of_rows(batch, 2, 2, CausalLM().weight)
    assert [part["input_ids"].tolist() for part in first.parts] == [[[0, 1, 2], [5, 6, 7]], [[10, 11, 12]]]
    assert (first.weights, first.total, first.first) == ((2, 3), 11, 0)
    assert (second.weights, second.total, second.first) == ((4, 2), 11, 2)
    # The first rank has nothing to learn from its microbatch, and its tokens all the same.
    labels[:2, :3] = -100
    first, second = shares_of_rows(batch, 2, 2, CausalLM().weight)
    assert first.parts[0]["input_ids"].tolist() == [[0, 1, 2], [5, 6, 7]]
    assert (first.weights, second.weights, first.total) == ((0, 3), (4, 2), 9)
    # A batch without labels of its own weighs as if it had them.
    assert shares_of_rows(rows, 2, 1, CausalLM().weight)[1].weights == (6,)
    assert examples_in(pieces_of(rows, 2)[1]) == 3


@pytest.mark.parametrize(
    ("keys", "wrong"),
    [
        (("devices=4", "parallel.sequence=2"), r"parallel.sequence=2: must be 1, or devices=4: .*"),
        (("parallel.sequence=2",), r"parallel.sequence=2: must be 1, or devices=1: .*"),
        ((*TWO, "parallel.hosts=2"), r"parallel.sequence=2 on parallel.hosts=2: .* take parallel.sequence=1"),
        ((*TWO, *PICTURES), r"parallel.sequence=2: .* task=causal_lm .*"),
        (
            (*TWO, "dataset=chat", "dataset.files=a.jsonl", "dataset.packed=true"),
            r".* take dataset.packed=false, or .*",
        ),
        ((*TWO, "sample.every=5"), r"sample.every=5 with parallel.sequence=2: .* take sample.every=null, .*"),
        ((*TWO, "ema=0.9"), r"ema=0.9 with parallel.sequence=2: .*: take ema=null"),
        ((*TWO, "seq_len=33"), r"seq_len=33: must be a multiple of parallel.sequence=2: take 32"),
        (("devices=3", "parallel.sequence=3", "seq_len=33"), r".* 2 heads of keys and values do not divide by 3: .*"),
        (
            (*TWO, "model=mamba", "model.overrides={num_hidden_layers: 2}"),
            r".* its forward takes no positions: take .*=1",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(keys: tuple[str, ...], wrong: str):
    with pytest.raises(UserError, match=f"^{wrong}$"):
        components_of(*(key for key in RUN if not key.startswith("model.")), *keys)


def test_a_step_may_have_fewer_sequences_than_ranks():
    check(composed(*RUN, *TWO, "batch_size=1", "microbatches=1")[0])
    with pytest.raises(UserError, match=r"^devices=2: must be at most batch_size=1"):
        check(composed(*RUN, "devices=2", "batch_size=1", "microbatches=1")[0])


def test_a_plan_has_the_work_of_the_model_once_and_half_of_the_activations_on_each_device():
    whole, divided = (components_of(*RUN, *EXACT, "seq_len=256", *keys) for keys in ((), TWO))
    assert forward_flops(divided) == forward_flops(whole)
    assert any("each device computes 1/2 of every sequence" in note for note in notes_of(divided))
    assert not any("every sequence" in note for note in notes_of(whole))
    runs = [dry_step(components, has_gpu=False) for components in (whole, divided)]
    # What is on a device besides activations are its weights and gradients.
    weights = sum(parameter.nbytes for parameter in whole.model.parameters())
    activations = [run.peak_bytes - 2 * weights for run in runs]
    assert activations[1] == pytest.approx(activations[0] / 2, rel=0.15)
    assert sum(phase.flops for phase in runs[1].phases) == sum(phase.flops for phase in runs[0].phases) / 2


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("block", 3)])
def test_a_plan_counts_what_the_ranks_exchange(recompute: str, passes: int):
    keys = (*RUN, *EXACT, *TWO, "offload=none", "parallel.homes=own", f"recompute={recompute}")
    components = components_of(*keys)
    layers = components.model.model.layers
    # Queries, keys, values, and outputs, which are as wide as queries.
    width = 2 * sum(x.out_features for x in (layers[0].self_attn.q_proj, layers[0].self_attn.k_proj))
    tokens = components.config.batch_size * components.config.seq_len // 2
    # In float32; half of what a rank has goes to the other.
    a_pass = len(layers) * width * tokens * 4 / 2
    step = dry_step(components, has_gpu=False)
    assert step.total("exchanged_bytes") == passes * a_pass
    timed = SimulatedStreams(torch.device("meta"), Bandwidth(1.0, 1.0, 1.0), 1e30, links_gb_s=1.0)
    dry_step(components, has_gpu=False, timed=timed)
    exchanges = [work for work in timed.work if work.lane == "exchange"]
    assert sum(work.end_ms - work.start_ms for work in exchanges) == pytest.approx(passes * a_pass / 1e6)
    # It is a plan's no longer: nothing counts what is computed without values later.
    assert components.model.divided.planned(1) is None
    assert dry_step(components_of(*RUN, *EXACT), has_gpu=False).total("exchanged_bytes") == 0


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return of_model(MODELS[request.param])


@pytest.fixture(scope="module")
def one(run: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on one device."""
    folder = tmp_path_factory.mktemp("sequence") / "one"
    run_here(folder, *run, *EXACT, "steps=4")
    return folder


@pytest.fixture(scope="module")
def two(run: tuple[str, ...], one: Path) -> Path:
    """Its third and fourth step on two ranks, from its checkpoint."""
    run_ranks(folder := one.with_name("two"), *EXACT, *TWO, "steps=4", f"resume={at(one, 2)}", run=run)
    return folder


def test_two_ranks_compute_what_one_device_does(one: Path, two: Path):
    expected = {record["train/step"]: record for record in read_metrics(one)}
    found = {record["train/step"]: record for record in read_metrics(two)}
    for step in (3, 4):
        for key in ("train/loss", "train/grad_norm", "eval/loss"):
            assert found[step].get(key) == pytest.approx(expected[step].get(key), rel=CLOSE)
    for name, limit in (("model", 1e-6), ("optimizer", 5e-6)):
        wanted, tensors = (load_file(at(folder, 4) / f"{name}.safetensors") for folder in (one, two))
        for key, tensor in tensors.items():
            assert (tensor - wanted[key]).float().norm() <= limit * wanted[key].float().norm(), key


@pytest.mark.parametrize(
    "keys",
    [
        (*STREAMED, "parallel.homes=shared", "recompute=block"),
        pytest.param((*STREAMED, "recompute=block", *QWEN), marks=pytest.mark.slow),
        pytest.param(("offload=shard_offload", "offload.shards=2", *EARLY, *QWEN), marks=pytest.mark.slow),
        *(
            pytest.param((f"offload={mode}", *knobs, *EARLY, "recompute=block"), marks=pytest.mark.slow)
            for mode, knobs in small_modes().items()
        ),
        *(
            pytest.param((f"offload={mode}", "recompute=none"), marks=pytest.mark.slow)
            for mode in ("layer_stream", "layer_stream_swap", "shard_offload", "tensor_swap")
        ),
    ],
    ids=lambda keys: "-".join(keys),
)
@pytest.mark.usefixtures("small_activations")
def test_every_mode_computes_what_the_resident_model_does(tmp_path: Path, keys: tuple[str, ...], resident: dict):
    """With several microbatches, whose forwards and recomputes lie side by side under shard_offload."""
    run = of_model(QWEN if "model=hf" in keys else ())
    given = ("precision=fp32", "microbatches=2", *TWO, "steps=2")
    like = tuple(key for key in keys if key == "clip_norm=null" or key in QWEN)
    if like not in resident:
        run_ranks(folder := tmp_path / "resident", *given, *like, run=run)
        resident[like] = content(at(folder, 2))
    run_ranks(tmp_path / "mode", *given, *keys, run=run)
    assert content(at(tmp_path / "mode", 2)) == resident[like]


@pytest.fixture(scope="module")
def resident() -> dict[tuple[str, ...], dict[str, str]]:
    """The checkpoints of the resident model, by the keys that change numbers."""
    return {}


def test_a_rank_that_fails_before_an_exchange_ends_the_run_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rank 0 waits for it in a forward, where it takes no reports. The other one's tokens are in no vocabulary."""
    own = group._own_memory
    wrong = {"input_ids": torch.full((4, 16), 10**6), "labels": torch.zeros(4, 16, dtype=torch.int64)}
    monkeypatch.setattr(group, "_own_memory", lambda share: replace(own(share), parts=(wrong,)))
    with pytest.raises(RankLostError, match=r"^rank 1: its process has ended \(exit status 1\)"):
        run_ranks(tmp_path, *EXACT, *TWO, "eval.every=null", "parallel.timeout_s=300")
