"""A model that was built on the meta device is refused until all of it has values, and then computes as any other."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from tests.offload.helpers import user_code
from tests.offload.helpers.models import under
from tests.offload.helpers.user_code import NoMode, alike, descend, evaluate, train_step

MODES = {
    "none": Resident,
    "bounce_linear": lambda: BounceLinear(outside="stream", slots=8),
    "layer_stream": LayerStream,
    "layer_stream_resident": lambda: LayerStream(resident=2),
    "shard_offload": lambda: ShardOffload(shards=2),
    "tensor_swap": lambda: TensorSwap(Resident()),
    "layer_stream_swap": lambda: TensorSwap(LayerStream()),
    "save_on_cpu": lambda: SaveOnCpu(Resident()),
}
EVERY_MODE = pytest.mark.parametrize("make", MODES.values(), ids=MODES.keys())


class Rotating(nn.Module):
    """A module with a table that no state dict has, as rotary embeddings do."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.sin(self.norm(self.linear(hidden)) * self.table)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Rotating(8) for _ in range(3))
        self.again = nn.Linear(8, 8)
        self.again.weight = self.blocks[0].linear.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.again(hidden)


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def on_the_cpu() -> Model:
    torch.manual_seed(0)
    return Model()


def by_load_state_dict(model: nn.Module, values: nn.Module) -> None:
    model.load_state_dict(values.state_dict())


def by_assignment(model: nn.Module, values: nn.Module) -> None:
    places = {name: tensor.device for name, tensor in model.state_dict().items()}
    state = {name: tensor.clone().to(places[name]) for name, tensor in values.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.again.weight = model.blocks[0].linear.weight


def by_data(model: nn.Module, values: nn.Module) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data.copy_(values.state_dict()[name])


def by_other_data(model: nn.Module, values: nn.Module) -> None:
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensor.data = values.state_dict()[name].clone().to(tensor.device)


def by_numpy(model: nn.Module, values: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.device.type == "cpu":
            tensor.numpy()[...] = values.state_dict()[name].numpy()
        else:
            tensor.copy_(values.state_dict()[name])


WAYS = [by_load_state_dict, by_assignment, by_data, by_other_data, by_numpy]


def inputs(step: int = 0, microbatch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    return torch.randn(4, 8, generator=generator).to(user_code.DEVICE)


def use_in_a_step(model: nn.Module, mode: Mode) -> None:
    train_step(model, mode, inputs=inputs())


def use_in_accumulate(model: nn.Module, attached: Mode) -> None:
    with attached.step():
        attached.accumulate([lambda: model(inputs()).mean()] * 2)


def use_in_evaluation(model: nn.Module, mode: Mode) -> None:
    evaluate(model, inputs())


def use_in_an_evaluation_of_a_part(model: nn.Module, mode: Mode) -> None:
    evaluate(model.blocks[1], inputs())


USES = [use_in_a_step, use_in_accumulate, use_in_evaluation, use_in_an_evaluation_of_a_part]


@EVERY_MODE
@pytest.mark.parametrize("use", USES)
def test_nothing_is_computed_with_a_buffer_that_nobody_filled(make: Callable[[], Mode], use: Callable):
    model, mode = on_meta(), make()
    with under(mode, model, user_code.DEVICE) as attached:
        by_load_state_dict(model, on_the_cpu())
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"^without values: blocks\.0\.table, blocks\.1\.table, blocks\.2\."):
                use(model, attached)
        for block in model.blocks:
            block.table.copy_(torch.linspace(0, 1, 8))
        use(model, attached)


@pytest.mark.sampled
@EVERY_MODE
@pytest.mark.parametrize("fill", WAYS)
def test_a_model_that_was_filled_trains_like_one_that_was_built_on_the_cpu(make: Callable[[], Mode], fill: Callable):
    model, twin, mode = on_meta(), on_the_cpu().to(user_code.DEVICE), make()
    expected = [train_step(twin, NoMode, inputs=inputs(step)) for step in range(2)]
    with under(mode, model, user_code.DEVICE) as attached:
        with pytest.raises(RuntimeError, match=r"blocks\.0\.linear\.weight, .* and \d+ more"), attached.step():
            pass
        fill(model, on_the_cpu())
        for block in model.blocks:
            block.table = torch.linspace(0, 1, 8, device=block.table.device)
        found = [train_step(model, attached, inputs=inputs(step)) for step in range(2)]
    assert all(map(alike, found, expected))
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert alike(one, other), name
    for (name, one), other in zip(model.named_buffers(), twin.buffers(), strict=True):
        assert alike(one, other), name


@EVERY_MODE
def test_the_next_mode_refuses_what_was_not_filled_under_the_last(make: Callable[[], Mode]):
    model = on_meta()
    with under(make(), model, user_code.DEVICE):
        by_load_state_dict(model, on_the_cpu())
    assert not any(module._forward_pre_hooks for module in model.modules())
    mode = make()
    with (
        under(mode, model, user_code.DEVICE) as attached,
        pytest.raises(RuntimeError, match=r"^without values: blocks\.0\.table"),
    ):
        use_in_a_step(model, attached)


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers", reason="builds Hugging Face's own models")


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def hugging_face(transformers) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).train()


def tokens(step: int) -> torch.Tensor:
    return torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(step)).to(user_code.DEVICE)


def by_hand(model: nn.Module, twin: nn.Module) -> None:
    model.load_state_dict(twin.state_dict())
    rotary = model.model.rotary_emb
    width = 2 * len(rotary.inv_freq)
    rotary.inv_freq.copy_(1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width))
    rotary.original_inv_freq.copy_(rotary.inv_freq)


def by_its_init_weights(model: nn.Module, twin: nn.Module) -> None:
    model.init_weights()
    model.load_state_dict(twin.state_dict())


def by_its_module(model: nn.Module, twin: nn.Module) -> None:
    model.load_state_dict(twin.state_dict())
    with torch.no_grad():
        model._init_weights(model.model.rotary_emb)


def loss(model: nn.Module, step: int) -> torch.Tensor:
    return model(input_ids=tokens(step), labels=tokens(step)).loss


def losses(model: nn.Module, attached: Mode) -> list[torch.Tensor]:
    seen = []
    for step in range(2):
        with attached.step():
            value = loss(model, step)
            value.backward()
        seen.append(value.detach())
        descend(model)
    return seen


FEW_MODES = {name: MODES[name] for name in ("none", "layer_stream")}
FILLS = [
    *((make, by_its_init_weights) for make in MODES.values()),
    *((make, fill) for make in FEW_MODES.values() for fill in (by_hand, by_its_module)),
]


@pytest.mark.parametrize(("make", "fill"), FILLS)
def test_a_hugging_face_model_has_its_rotary_table_before_it_trains(
    transformers, make: Callable[[], Mode], fill: Callable
):
    torch.manual_seed(0)
    twin = hugging_face(transformers).to(user_code.DEVICE)
    values = copy.deepcopy(twin).cpu()
    expected = losses(twin, NoMode)
    assert not expected[0].isnan()
    with torch.device("meta"):
        model = hugging_face(transformers)
    mode = make()
    with under(mode, model, user_code.DEVICE) as attached:
        model.load_state_dict(values.state_dict())
        with pytest.raises(RuntimeError, match=r"^without values: model\.rotary_emb\.inv_freq, .*original_inv_freq\. "):
            losses(model, attached)
        with pytest.raises(RuntimeError, match=r"^without values: model\.rotary_emb\.inv_freq"), torch.no_grad():
            loss(model, 0)
        fill(model, values)
        found = losses(model, attached)
    assert all(map(alike, found, expected))
    assert all(map(alike, model.parameters(), twin.parameters()))
