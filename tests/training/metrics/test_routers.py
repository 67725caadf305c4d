"""Statistics of routers: as computed from what transformers records, the same in every mode, and of no effect."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from models.hf import TransformersModel, build_hf
from tests.models.helpers.hf_models import DECODER, LANGUAGE, VOCABULARY, tiny
from tests.training.helpers.in_process import TINY_RUN, composed, run_here, signals_as_before
from training.metrics import routers
from training.metrics.routers import RouterMeter, forward_of, router_metrics, routers_of, routing
from training.parallel.launch import connected
from training.run.build import build
from training.run.loop import train
from training.runs.files import SUMMARY_FILE
from training.runs.records import read_metrics

EXPERTS = {**DECODER, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {
    "mixtral": LANGUAGE["mixtral"], "gpt_oss": LANGUAGE["gpt_oss"], "deepseek_v3": LANGUAGE["deepseek_v3"],
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "num_experts": 8}),
    "glm4_moe": ("glm4_moe", {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    # Chooses by its logits, and returns no choice.
    "llama4_text": ("llama4_text", {**DECODER, "num_local_experts": 4, "intermediate_size_mlp": 16}),
}  # fmt: skip
IDS = torch.randint(0, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(0))
KEYS = ("load_imbalance", "load_imbalance_max", "dead_experts", "dead_experts_max", "router_entropy")
KEYS = tuple(f"moe/{key}" for key in (*KEYS, "router_entropy_min"))


def made(name: str) -> TransformersModel:
    torch.manual_seed(0)
    model = build_hf(MODELS[name][0], "causal_lm", MODELS[name][1])
    with torch.no_grad():
        # Routers that begin at zero choose the same experts for all.
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model


def measured(model: nn.Module, *batches: dict | Tensor) -> dict[str, float]:
    meter = RouterMeter(model)
    with meter.counting(True):
        for index, batch in enumerate(batches):
            ids = batch["input_ids"] if isinstance(batch, dict) else batch
            with forward_of(index, batch, 1 / len(batches)):
                model(ids, ids).backward()
    return router_metrics([meter.sums()])


def by_hand(model: TransformersModel, ids: Tensor, kept: Tensor) -> dict[str, float]:
    """The metrics, of the logits that transformers returns, and of what the experts are given, if they are."""
    chosen, hooks = [], []
    for module in model.hf.modules():
        if hasattr(module, "has_gate"):
            hooks.append(module.register_forward_pre_hook(lambda _, arguments: chosen.append(arguments[1])))
    with torch.no_grad():
        logits = model.hf(input_ids=ids, output_router_logits=True).router_logits
    for hook in hooks:
        hook.remove()
    loads, dead, entropies = [], [], []
    for number, layer in enumerate(logits):
        own = layer.reshape(ids.numel(), -1)
        of_token = chosen[number] if chosen else own.topk(1).indices
        counts = torch.bincount(of_token[kept].flatten(), minlength=own.shape[-1]).double()
        loads.append((counts.max() / counts.mean()).item())
        dead.append((counts == 0).double().mean().item())
        entropy = torch.distributions.Categorical(logits=own[kept].double()).entropy().mean().item()
        entropies.append(entropy / math.log(own.shape[-1]))
    values = (sum(loads) / len(loads), max(loads), sum(dead) / len(dead), max(dead))
    return dict(zip(KEYS, (*values, sum(entropies) / len(entropies), min(entropies)), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_statistics_are_those_of_the_logits_and_choices_of_transformers(name: str):
    model, twin = made(name), made(name)
    whole = torch.ones(IDS.numel(), dtype=torch.bool)
    assert measured(model, IDS[:2], IDS[2:]) == pytest.approx(by_hand(twin, IDS, whole), rel=1e-6)
    # Padding is no token.
    padded = {"input_ids": IDS, "labels": IDS, "lengths": torch.tensor([7, 2, 4])}
    kept = (torch.arange(7) < padded["lengths"][:, None]).flatten()
    found = measured(model, padded)
    assert found == pytest.approx(by_hand(twin, IDS, kept), rel=1e-6)
    assert found != measured(model, IDS)
    packed = {"input_ids": IDS, "labels": IDS, "segments": torch.where(kept.view(3, 7), 0, -1)}
    assert measured(model, packed) == found


def test_probabilities_count_as_such_and_unknown_choices_not_at_all():
    logits = torch.randn(6, 4)
    chosen = logits.topk(2).indices
    given = routing(SimpleNamespace(), 0, (logits.softmax(-1), None, chosen))
    assert torch.equal(routers._probabilities(given[0]), logits.softmax(-1))
    assert torch.equal(routers._probabilities(logits), logits.softmax(-1))
    assert routing(SimpleNamespace(num_experts=3), 0, (logits, None, chosen)) is None
    assert routing(SimpleNamespace(num_experts=4), 0, (logits, None)) is None
    assert routing(SimpleNamespace(), 0, logits) is None


def test_the_forward_of_a_microbatch_that_is_computed_anew_counts_once_and_no_recompute_does():
    model = made("mixtral")
    meter = RouterMeter(model)
    with meter.counting(True):
        for _ in range(2):
            for index, ids in enumerate((IDS[:2], IDS[2:])):
                with forward_of(index, ids, 0.5):
                    model(ids, ids)
        # As in backward.
        model(IDS, IDS)
    assert meter.sums()[0][-1] == IDS.numel()
    assert router_metrics([meter.sums()]) == measured(model, IDS[:2], IDS[2:])
    with meter.counting(False), forward_of(0, IDS, 1.0):
        model(IDS, IDS)
    assert router_metrics([meter.sums()]) == {}


def test_the_auxiliary_loss_is_that_of_transformers_and_a_dense_model_has_nothing():
    model = tiny("mixtral_balanced")
    expected = [model.hf(input_ids=ids).aux_loss.item() for ids in (IDS[:2], IDS[2:])]
    assert measured(model, IDS[:2], IDS[2:])["train/aux_loss"] == pytest.approx(sum(expected) / 2)
    assert not RouterMeter(tiny("qwen3"))
    assert not routers_of(nn.Linear(1, 1))


BALANCED = "output_router_logits: true, "
SIZES = (
    "hidden_size: 16, intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2,"
    " head_dim: 8, num_local_experts: 4, num_experts_per_tok: 2, vocab_size: 300"
)
JOB = (
    *(key for key in TINY_RUN if not key.startswith("model.")), "model=hf", "model.source=mixtral", "microbatches=2",
    "optimizer=host_adamw", "steps=3",
)  # fmt: skip


def curve(folder: Path) -> list[dict]:
    kept = ("train/", "moe/")
    return [{key: value for key, value in each.items() if key.startswith(kept)} for each in read_metrics(folder)]


@pytest.mark.parametrize("more", ["", pytest.param(BALANCED, marks=pytest.mark.slow)], ids=["plain", "balanced"])
def test_every_mode_has_the_same_statistics_which_change_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
):
    job = (*JOB, f"model.overrides={{{more}{SIZES}}}")
    modes = {
        "none": ("offload=none",), "recompute": ("offload=none", "recompute=block"),
        "layer": ("offload=layer_stream",), "bounce": ("offload=bounce_linear", "recompute=block"),
        "shard": ("offload=shard_offload", "offload.shards=2"),
    }  # fmt: skip
    # A loss of their own changes nothing of the statistics; without it two modes do.
    for name in modes if more else ("none", "shard"):
        run_here(tmp_path / name, *job, *modes[name])
        assert curve(tmp_path / name) == curve(tmp_path / "none"), name
    # The logged steps alone.
    assert [set(KEYS) <= set(each) for each in curve(tmp_path / "none")] == [True, True]
    assert all(("train/aux_loss" in each) == bool(more) for each in curve(tmp_path / "none"))
    summary = json.loads((tmp_path / "none" / SUMMARY_FILE).read_text())
    for key in KEYS:
        assert summary[key] in [each[key] for each in curve(tmp_path / "none")], key
    monkeypatch.setattr(routers, "routers_of", lambda root: {})
    for name in ("none", "shard"):
        run_here(tmp_path / f"{name}_without", *job, *modes[name])
        known = [
            {key: each[key] for key in each if key not in (*KEYS, "train/aux_loss")} for each in curve(tmp_path / name)
        ]
        assert curve(tmp_path / f"{name}_without") == known


@pytest.mark.slow
@pytest.mark.parametrize(("more", "keys"), [(BALANCED, ()), ("", ("parallel.sequence=2",))], ids=["rows", "positions"])
def test_ranks_count_together(tmp_path: Path, more: str, keys: tuple[str, ...]):
    job = (*JOB, f"model.overrides={{{more}{SIZES}}}", "offload=layer_stream", "clip_norm=null")
    run_here(tmp_path / "one", *job)
    (tmp_path / "two").mkdir()
    config, invocation = composed(*job, "microbatches=1", "devices=2", *keys, run_dir=tmp_path / "two")
    with signals_as_before(), connected(config, None) as ranks, build(config, invocation, ranks=ranks) as two:
        train(two)
    assert curve(tmp_path / "two") == [pytest.approx(each) for each in curve(tmp_path / "one")]
    assert curve(tmp_path / "two")[0]["moe/load_imbalance"] == curve(tmp_path / "one")[0]["moe/load_imbalance"]
