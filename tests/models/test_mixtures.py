"""Mixtures of experts that people train, tiny, with more experts than tokens: every mode has the bits of `none`.

The optimizer is that of runs, whose updates the mode may hide. An expert without a token decays and does nothing else.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.hf import TransformersModel, build_hf
from offload import BounceLinear, HostAdamW, LayerStream, Mode, Resident, ShardOffload, TensorSwap
from tests.models.helpers.hf_models import DECODER, MODELS
from tests.offload.helpers.models import under
from tests.test_any_model import COMMON
from tests.training.helpers.in_process import run_here
from tests.training.helpers.results import content, curve
from tests.training.parallel.conftest import run_ranks

STEPS, TOKENS, CHOSEN, EXPERTS = 2, 2, 2, 32
# Of three microbatches a step: sums of two do not depend on the order.
ORDERS = ((0, 1, 2), (2, 0, 1))
RATE, DECAY = 0.01, 0.1
OF_QWEN = {**DECODER, "moe_intermediate_size": 8}
MIXTURES = {
    "mixtral": (*MODELS["mixtral"], "num_local_experts"),
    "qwen3_moe": ("qwen3_moe", OF_QWEN, "num_experts"),
    "gpt_oss": (*MODELS["gpt_oss"], "num_local_experts"),
    "deepseek_v3": (*MODELS["deepseek_v3"], "n_routed_experts"),
    "glm4_moe": (
        "glm4_moe",
        {**OF_QWEN, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        "n_routed_experts",
    ),
}
MODES: dict[str, Callable[[], Mode]] = {
    "bounce_linear": lambda: BounceLinear(outside="stream", slots=8),
    "layer_stream": lambda: LayerStream(slots=2),
    "shard_offload": lambda: ShardOffload(shards=2),
    "layer_stream_swap": lambda: TensorSwap(LayerStream(slots=2)),
}


@functools.cache
def built(name: str) -> TransformersModel:
    torch.manual_seed(0)
    source, values, experts = MIXTURES[name]
    return build_hf(source, "causal_lm", {**values, "num_experts_per_tok": CHOSEN, experts: EXPERTS}).train()


def trained(name: str, mode: Mode, order: tuple[int, ...]) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of the microbatches of each step, in `order`, the weights, and where no gradient of a step was."""
    model = copy.deepcopy(built(name))

    def loss(step: int, number: int) -> Tensor:
        seed = torch.Generator().manual_seed(10 * step + number)
        ids = torch.randint(3, 40, (1, TOKENS + 1), generator=seed)
        return model(ids[:, :-1], ids[:, 1:])

    losses, untouched = [], {name: torch.ones_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    with under(mode, model) as attached:
        optimizer = HostAdamW(model.parameters(), lr=RATE, weight_decay=DECAY, threads=1)
        attached.overlap(optimizer, False, 0)
        for step in range(STEPS):
            with attached.step():
                losses += attached.accumulate([functools.partial(loss, step, number) for number in order])
            for of_one, parameter in model.named_parameters():
                if parameter.grad is not None:
                    untouched[of_one] &= parameter.grad == 0
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, untouched


@functools.cache
def of_the_resident_model(name: str, order: tuple[int, ...]) -> tuple:
    return trained(name, Resident(), order)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "mode", "order"),
    [
        (name, mode, ORDERS[(row + column) % 2])
        for row, name in enumerate(MIXTURES)
        for column, mode in enumerate(MODES)
    ],
)
@pytest.mark.usefixtures("small_activations")
def test_two_steps_are_those_of_the_resident_model(name: str, mode: str, order: tuple[int, ...]):
    (losses, weights, _), expected = trained(name, MODES[mode](), order), of_the_resident_model(name, order)
    assert all(map(torch.equal, losses, expected[0]))
    assert all(torch.equal(weight, expected[1][of_one]) for of_one, weight in weights.items())


@pytest.mark.parametrize("name", MIXTURES)
def test_an_expert_without_a_token_decays_as_under_torchs_adamw(name: str):
    _, weights, untouched = of_the_resident_model(name, ORDERS[0])
    experts = {of_one: weight for of_one, weight in weights.items() if of_one.endswith(("gate_up_proj", "down_proj"))}
    experts = {of_one: weight for of_one, weight in experts.items() if weight.ndim == 3}
    assert len(experts) == (2 if "first_k_dense_replace" in MIXTURES[name][1] else 4)
    for of_one, weight in experts.items():
        alone = untouched[of_one].flatten(1).all(1)
        assert EXPERTS - 3 * STEPS * TOKENS * CHOSEN <= alone.sum() < EXPERTS
        first = built(name).get_parameter(of_one).detach().clone().requires_grad_()
        optimizer = torch.optim.AdamW([first], lr=RATE, weight_decay=DECAY, foreach=False)
        first.grad = torch.zeros_like(first)
        for _ in range(STEPS):
            optimizer.step()
        assert torch.equal(weight[alone], first.detach()[alone])


@pytest.mark.slow
def test_two_ranks_compute_what_one_device_does(tmp_path: Path):
    values = {**MIXTURES["mixtral"][1], "num_local_experts": EXPERTS, "vocab_size": 300}
    overrides = ", ".join(f"{key}: {value}" for key, value in values.items())
    keys = (*COMMON, "model=hf", "model.source=mixtral", f"model.overrides={{{overrides}}}", "precision=fp32")
    keys += ("batch_size=2", "seq_len=4", "steps=2", "checkpoint.every=2", "optimizer=host_adamw")
    run_here(tmp_path / "one", *keys, "microbatches=2")
    run_ranks(tmp_path / "two", "offload=layer_stream", "devices=2", "microbatches=1", run=keys)
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    one, two = (content(tmp_path / each / "checkpoints" / "step-00000002") for each in ("one", "two"))
    assert all(one[file] == two[file] for file in one if file.endswith(".safetensors"))
