"""Modules in tiles have the outputs of whole modules, and gradients that differ only in sums over tiles."""

import copy
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from models.llama import Llama
from offload.activations.checkpointing import recompute
from offload.activations.tiles import Tiles, compute_in_tiles
from offload.blocks import find_blocks
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.planning.dry_run import dry_run
from offload.torch_private.recomputed_blocks import RandomState
from offload.weights.windows import saved_weights
from tests.models.helpers.packed import SEGMENTS, VOCABULARY, packed_batch
from tests.offload.helpers.architectures import ADAPTED, DECODERS, ENCODERS, Architecture, of_transformers, tokens
from tests.offload.helpers.diffusion_architectures import DIFFUSION
from tests.offload.helpers.models import under

CASES = DECODERS | ADAPTED | {name: DIFFUSION[name] for name in ("dit", "flux", "sd3", "wan")}
MODES = {
    "none": Resident,
    "layer_stream": lambda: LayerStream(slots=4),
    "shard_offload": lambda: ShardOffload(shards=2),
    "layer_stream_swap": lambda: TensorSwap(LayerStream(slots=4)),
}
IDS = torch.arange(12).view(1, 12)
Result = tuple[Tensor, dict[str, Tensor]]


def llama() -> Llama:
    torch.manual_seed(0)
    return Llama(VOCABULARY, 32, 64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [block for _, block in find_blocks(model)]


def stepped(
    model: nn.Module,
    losses: list[Callable[[], Tensor]],
    mode: Mode | None = None,
    tile: int | None = None,
    again: bool = True,
) -> Result:
    """The sum of the losses and the gradients of a step, with blocks that compute again."""
    undo_tiles = compute_in_tiles(blocks_of(model), tile) if tile else lambda: None
    mode = mode or Resident()
    with under(mode, model) as attached:
        undo = recompute(blocks_of(model) if again and not mode.recomputes else ())
        with attached.step():
            total = sum(attached.accumulate(losses))
        gradients = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
        undo()
    undo_tiles()
    return total, gradients


def of_case(case: Architecture, **knobs: object) -> Result:
    torch.manual_seed(0)
    model = case.build().eval()
    torch.manual_seed(1)
    inputs = case.inputs()

    def loss() -> Tensor:
        found = model(**inputs)
        if getattr(found, "loss", None) is not None:
            return found.loss
        return sum(each.float().square().mean() for each in found.to_tuple() if isinstance(each, Tensor))

    return stepped(model, [loss], **knobs)


def assert_alike(found: Mapping[str, Tensor], whole: Mapping[str, Tensor], tolerance: float = 2e-5) -> None:
    assert found.keys() == whole.keys()
    for name, gradient in whole.items():
        assert (found[name] - gradient).abs().max() <= tolerance * gradient.abs().max().clamp(min=1e-4), name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_losses_and_gradients_are_those_of_whole_modules(name: str):
    loss, gradients = of_case(CASES[name])
    for tile in (2, 7):
        found, found_gradients = of_case(CASES[name], tile=tile)
        if name in DECODERS:
            assert torch.equal(found, loss)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
        assert_alike(found_gradients, gradients)


@pytest.mark.parametrize("length", [7, 80])
def test_several_rows_of_any_length_in_a_model_that_views_what_it_takes(length: int):
    sizes = {"n_positions": 80, "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY}
    case = of_transformers("GPT2LMHeadModel", lambda: dict.fromkeys(("input_ids", "labels"), tokens(length)), **sizes)
    loss, gradients = of_case(case)
    found, found_gradients = of_case(case, tile=6)
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    assert_alike(found_gradients, gradients)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2", "mixtral", "deepseek_v3", "dit", "lora"])
@pytest.mark.parametrize("mode", sorted(MODES.keys() - {"none"}))
@pytest.mark.sampled
def test_modes_have_the_numbers_of_none_in_tiles(mode: str, name: str):
    loss, gradients = of_case(CASES[name], tile=3)
    found, found_gradients = of_case(CASES[name], mode=MODES[mode](), tile=3)
    assert torch.equal(found, loss)
    assert found_gradients.keys() == gradients.keys()
    assert all(torch.equal(found_gradients[key], gradients[key]) for key in gradients)


def test_a_mode_looks_for_weights_in_no_state_of_a_generator(monkeypatch: pytest.MonkeyPatch):
    """It has 625 numbers, and each forward of a tiled module kept one."""
    looked, tensors_in = [], saved_weights.tensors_in
    monkeypatch.setattr(saved_weights, "tensors_in", lambda value: looked.append(value) or tensors_in(value))
    model = llama()
    stepped(model, [lambda: model(IDS, IDS)], LayerStream(slots=4), tile=4)
    assert any(isinstance(value, Tiles) for value in looked)
    assert not any(isinstance(value, RandomState) for value in looked)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("again", [False, True])
def test_several_microbatches_of_odd_lengths_and_packed_rows(mode: str, again: bool):
    ids, labels = packed_batch()

    def losses(model: Llama) -> list[Callable[[], Tensor]]:
        return [
            lambda: model(ids[:, :11], labels[:, :11]),
            lambda: model(ids, labels, segments=SEGMENTS),
            lambda: model(ids[:1, :5], labels[:1, :5]),
        ]

    loss, gradients = stepped(model := llama(), losses(model), again=False)
    found, found_gradients = stepped(model := llama(), losses(model), MODES[mode](), tile=4, again=again)
    assert torch.equal(found, loss)
    assert_alike(found_gradients, gradients, tolerance=1e-6)


class Counting(nn.Module):
    """A block whose MLP counts the rows that its first layer computes."""

    def __init__(self, wide: int = 256):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 8))
        self.rows: list[int] = []
        self.mlp[0].register_forward_hook(lambda module, given, result: self.rows.append(result.shape[-2]))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.norm(hidden))


def saved_elements(function: Callable[[], Tensor], least: int) -> int:
    """Elements of all tensors of at least `least` that forward saves for backward."""
    found = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= least:
            found[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    del result
    return sum(tensor.numel() for tensor in found.values())


def test_forward_keeps_the_input_alone_and_the_mlp_at_the_end_of_a_block_is_not_computed_a_third_time():
    block, hidden = Counting(), torch.randn(1, 40, 8, requires_grad=True)
    whole = saved_elements(lambda: block(hidden), least=320)
    compute_in_tiles([block], 16)
    assert whole >= 40 * 256
    assert saved_elements(lambda: block(hidden), least=320) <= 3 * 320
    for blocks in ([], [block]):
        block.rows.clear()
        undo = recompute(blocks)
        block(hidden).square().mean().backward()
        undo()
        assert block.rows == [16, 16, 8] * 2
    with torch.no_grad():
        block.rows.clear()
        block(hidden)
        assert block.rows == [16, 16, 8]


def test_gradients_of_bf16_weights_are_added_up_in_float32():
    def gradient(tile: int | None) -> Tensor:
        torch.manual_seed(0)
        block = Counting(wide=8).to(torch.bfloat16)
        if tile:
            compute_in_tiles([block], tile)
        block(hidden.to(torch.bfloat16)).float().square().sum().backward()
        return block.mlp[2].bias.grad.float()

    hidden = torch.randn(1, 2048, 8, generator=torch.Generator().manual_seed(0))
    # Added up in bf16, 512 of them would be off by a hundredth.
    torch.testing.assert_close(gradient(4), gradient(None), rtol=0.004, atol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_dropout_and_autocast_in_backward_are_those_of_forward(autocast: bool):
    torch.manual_seed(0)
    block = Counting()
    block.mlp.append(nn.Dropout(0.5))
    one, other = copy.deepcopy(block), block
    compute_in_tiles([one], 16)
    hidden, drawn = torch.randn(1, 40, 8), []

    def by_hand(x: Tensor) -> Tensor:
        return x + torch.cat([other.mlp(part) for part in other.norm(x).split(16, 1)], 1)

    for function in (one, by_hand):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            result = function(hidden)
        result.square().mean().backward()
        drawn.append(torch.rand(1))
    assert torch.equal(*drawn)
    assert_alike(
        {name: each.grad for name, each in one.named_parameters()},
        {name: each.grad for name, each in other.named_parameters()},
        tolerance=1e-2 if autocast else 1e-5,
    )


class Squeezing(nn.Module):
    """Scales every position by what all of them have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bounded = nn.Linear(8, 8), nn.Sigmoid()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.bounded(self.scale(hidden.mean(1, keepdim=True)))


def test_a_module_that_mixes_positions_is_refused():
    block = Counting()
    block.mlp = Squeezing()
    compute_in_tiles([block], 16)
    with pytest.raises(RuntimeError, match=r"^a Squeezing does not compute each position by itself, .*tile=null"):
        block(torch.randn(1, 40, 8))


class Router(nn.Module):
    """Returns logits and the chosen experts, as that of HunYuan's mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(hidden)
        return logits, logits.argmax(-1)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_router_stays_whole(adapted: bool):
    block, hidden = Counting(), torch.randn(1, 40, 8)
    block.router = Router()
    if adapted:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(target_modules=["gate"]), block)
    expected = block.router(hidden)
    compute_in_tiles([block], 16)
    assert all(map(torch.equal, block.router(hidden), expected))


def test_where_nothing_can_be_tiled_and_with_a_wrong_number_it_says_so():
    model = ENCODERS["albert"].build()
    with pytest.raises(ValueError, match=r"^nothing in the blocks computes each position by itself"):
        compute_in_tiles(blocks_of(model), 4)
    with pytest.raises(ValueError, match=r"^tokens=0: must be at least 1$"):
        compute_in_tiles([Counting()], 0)


def test_units_smaller_than_what_is_tiled_are_refused():
    model, (ids, labels) = llama(), packed_batch()
    with pytest.raises(RuntimeError, match="units are whole blocks"):
        stepped(model, [lambda: model(ids, labels)], BounceLinear(slots=1), tile=4)


@pytest.mark.parametrize("mode", ["none", "layer_stream"])
def test_a_hook_on_a_weight_has_the_gradient_of_the_whole_once(mode: str):
    def result(mode: Mode, tile: int | None) -> tuple[list[Tensor], dict[str, Tensor]]:
        seen, model = [], llama()
        model.model.layers[0].mlp.up_proj.weight.register_hook(lambda one: seen.append(one.clone()) or 3 * one)
        loss = partial(model, IDS, IDS)
        return seen, stepped(model, [loss], mode, tile)[1]

    (before,), expected = result(Resident(), None)
    (given,), found = result(MODES[mode](), 3)
    torch.testing.assert_close(given, before, rtol=1e-5, atol=1e-7)
    assert_alike(found, expected)


def test_tiles_inside_a_mode_are_refused():
    model = llama()
    with under(LayerStream(slots=4), model) as attached:
        undo = compute_in_tiles(blocks_of(model), 4)
        with pytest.raises(RuntimeError, match=r"attached after compute_in_tiles$"), attached.step():
            model(IDS, IDS).backward()
        undo()


def test_undo_gives_back_the_forwards_it_found():
    model = llama()
    found = [dict(vars(module)) for module in model.modules()]
    undo = compute_in_tiles(blocks_of(model), 4)
    assert "forward" in vars(model.model.layers[0].mlp)
    undo()
    assert [dict(vars(module)) for module in model.modules()] == found


def test_without_values_a_tile_stands_for_all_like_it():
    """A dry run counts the FLOPs of every tile and computes three of them."""

    def flops(tile: int | None) -> float:
        with torch.device("meta"):
            block, hidden = Counting(), torch.empty(1, 1030, 8, requires_grad=True)
        model = nn.ModuleList([block])
        model.forward = lambda: block(hidden).square().mean()
        undo = compute_in_tiles([block], tile) if tile else lambda: None
        run = dry_run(Resident(), model, [model.forward])
        undo()
        assert not tile or sum(block.rows) < 1030 * 2
        return run.total("flops")

    products = 2 * 1030 * 8 * 256
    assert flops(None) == 2 * 3 * products
    # Backward computes the forward again.
    assert flops(16) == 2 * 4 * products
