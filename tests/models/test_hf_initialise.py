import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, initialization

from models.hf import TransformersModel
from models.hf_initialise import initialise_hf
from models.initialise import HashNormal
from offload import BounceLinear, LayerStream, Mode
from tests.models.helpers.hf_models import MODELS, tiny, without_values
from tests.offload.helpers.models import under


def initialised(name: str, seed: int = 3, **overrides: object) -> TransformersModel:
    model = without_values(name, **overrides)
    initialise_hf(model, seed)
    return model


def values(model: TransformersModel) -> dict[str, Tensor]:
    return {name: parameter.detach().cpu().clone() for name, parameter in model.hf.named_parameters()}


def hashed(key: str, shape: tuple[int, ...], std: float) -> Tensor:
    target = torch.empty(shape)
    HashNormal(torch.device("cpu")).fill(target, key, std)
    return target


class Config(PreTrainedConfig):
    model_type = "tests_of_values"


class Own(PreTrainedModel):
    """A model whose first values the tests choose."""

    config_class = Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.table = nn.Parameter(type(self).value())
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self or isinstance(module, Own):
            type(self).fill(module)


def own(fill: Callable[[Own], None], value: Callable[[], Tensor] = lambda: torch.empty(6, 4)) -> TransformersModel:
    functions = {"fill": staticmethod(fill), "value": staticmethod(value)}
    kind = type("Chosen", (Own,), {**functions, "config_class": Config})
    with torch.device("meta"):
        model = TransformersModel(kind(Config())).to_empty(device="cpu")
    model.hf.table.detach().fill_(torch.nan)
    return model


class TestDistributions:
    @pytest.mark.sampled
    @pytest.mark.parametrize("name", [*MODELS, "rwkv", "xlstm"])
    def test_they_are_those_of_transformers(self, name: str):
        expected = tiny(name)
        model = initialised(name)
        for (path, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert one.isfinite().all(), path
            if other.std(correction=0) == 0:
                # Constants: ones or zeros for norms, zeros for biases.
                assert torch.equal(one, other), path
            elif other.numel() >= 64:
                ratio = one.std() / other.std()
                assert 0.6 < ratio < 1.6, (path, ratio)
                # Six deviations of the difference of two means.
                spread = other.std() * math.sqrt(2 / other.numel())
                assert abs(one.mean() - other.mean()) < 6 * spread, path

    def test_normal_numbers_are_hashed_by_name(self):
        model = initialised("qwen3", seed=5)
        name = "model.layers.1.mlp.up_proj.weight"
        assert torch.equal(model.hf.get_parameter(name), hashed(f"5/{name}", (32, 16), 0.02))

    def test_projections_into_the_residual_stream_of_gpt2_are_smaller(self):
        model = initialised("gpt2")
        name = "transformer.h.0.mlp.c_proj.weight"
        assert torch.equal(model.hf.get_parameter(name), hashed(f"3/{name}", (64, 16), 0.02 / math.sqrt(4)))

    def test_the_state_of_mamba_is_its_own(self):
        mixer = initialised("mamba").hf.backbone.layers[1].mixer
        assert torch.equal(mixer.A_log, torch.arange(1.0, 5.0).log().expand(32, -1))
        assert (mixer.D == 1).all()
        # The step, the softplus of the bias, is between time_step_min and time_step_max.
        steps = nn.functional.softplus(mixer.dt_proj.bias)
        assert 0.00099 < steps.min() < steps.max() < 0.101

    def test_a_tied_weight_has_the_value_of_the_embedding(self):
        # The head would have no row of zeros for the padding.
        for model in (initialised("qwen3_tied"), tiny("qwen3_tied")):
            assert not model.hf.lm_head.weight[0].any()
        name = "model.embed_tokens.weight"
        assert torch.equal(initialised("qwen3_tied").hf.lm_head.weight[1:], hashed(f"3/{name}", (40, 16), 0.02)[1:])


class TestWritesOfAnyKind:
    def test_parts_are_written_where_the_parameter_begins(self):
        def fill(module: Own) -> None:
            initialization.normal_(module.table)
            initialization.zeros_(module.table[2])
            initialization.constant_(module.table[4, 1:3], 7.0)

        model = own(fill)
        # A parameter in the middle of a block of memory, as modes allocate them.
        block = torch.full((100,), torch.nan)
        model.hf.table = nn.Parameter(block[10:34].view(6, 4))
        initialise_hf(model, 1)
        expected = hashed("1/table", (6, 4), 1.0)
        expected[2] = 0
        expected[4, 1:3] = 7
        assert torch.equal(model.hf.table, expected)
        assert block.isnan().sum() == 76

    @pytest.mark.parametrize(
        "fill",
        [
            lambda module: initialization.trunc_normal_(module.table, std=0.1),
            lambda module: initialization.kaiming_uniform_(module.table),
            lambda module: initialization.orthogonal_(module.table),
            lambda module: initialization.normal_(module.table, mean=2.0),
            lambda module: initialization.copy_(module.table, torch.rand(6, 4).log()),
            # After a plain write, something else.
            lambda module: initialization.normal_(module.table).mul_(3),
            lambda module: (initialization.zeros_(module.table), initialization.trunc_normal_(module.table)),
        ],
        ids=["truncated", "uniform", "orthogonal", "mean", "computed", "scaled", "twice"],
    )
    def test_what_is_no_plain_normal_is_computed_as_transformers_does(self, fill: Callable[[Own], None]):
        first, again, other = own(fill), own(fill), own(fill)
        state = torch.get_rng_state()
        initialise_hf(first, 1)
        assert torch.equal(torch.get_rng_state(), state)
        torch.rand(5)
        initialise_hf(again, 1)
        initialise_hf(other, 2)
        assert first.hf.table.isfinite().all()
        assert torch.equal(first.hf.table, again.hf.table)
        assert not torch.equal(first.hf.table, other.hf.table)

    def test_a_parameter_that_is_only_changed_is_refused(self):
        with pytest.raises(ValueError, match=r"^table: its library gives it no first value"):
            initialise_hf(own(lambda module: module.table.mul_(2)), 1)

    def test_a_parameter_that_is_left_has_the_value_it_is_made_with(self):
        def made_with(value: Callable[[], Tensor], seed: int) -> Tensor:
            model = own(lambda module: None, value)
            state, settings = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
            initialise_hf(model, seed)
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.are_deterministic_algorithms_enabled() == settings
            return model.hf.table.detach()

        one, same, other = (made_with(lambda: torch.rand(6, 4), seed) for seed in (1, 1, 2))
        assert 0 < one.min() < one.max() < 1
        assert torch.equal(one, same)
        assert not torch.equal(one, other)
        with pytest.raises(ValueError, match=r"^table: its library gives it no first value"):
            made_with(lambda: torch.empty(6, 4), 1)


class TestDependsOnSeedAndNameAlone:
    @pytest.mark.parametrize("name", ["qwen3", "mamba", "vit"])
    def test_the_seed_changes_the_numbers(self, name: str):
        one, same, other = (values(initialised(name, seed)) for seed in (1, 1, -2))
        assert all(torch.equal(one[path], same[path]) for path in one)
        assert any(not torch.equal(one[path], other[path]) for path in one)

    @pytest.mark.parametrize("name", ["qwen3_next", "mamba", "vit"])
    def test_layers_below_do_not_move_those_above(self, name: str):
        few = values(initialised(name))
        more = values(initialised("mamba" if name == "mamba" else name, **deeper(name)))
        assert len(more) > len(few)
        assert all(torch.equal(few[path], more[path]) for path in few)

    @pytest.mark.parametrize("name", ["qwen3_tied", "mamba", "mixtral", "vit"])
    @pytest.mark.parametrize("mode", [BounceLinear(slots=8), LayerStream()], ids=["bounce_linear", "layer_stream"])
    def test_modes_have_the_same_values(self, name: str, mode: Mode):
        model = tiny(name, "meta")
        with under(mode, model):
            initialise_hf(model, 3)
            found = values(model)
        expected = values(initialised(name))
        assert all(torch.equal(found[path], expected[path]) for path in expected)

    @pytest.mark.parametrize("name", ["qwen3", "mamba"])
    def test_a_narrow_model_has_the_rounded_values(self, name: str):
        model = without_values(name).to(torch.bfloat16)
        initialise_hf(model, 3)
        expected = values(initialised(name))
        assert all(torch.equal(value, expected[path].bfloat16()) for path, value in values(model).items())


def deeper(name: str) -> dict[str, object]:
    if name == "qwen3_next":
        return {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    # Each layer of Mamba is scaled by the number of layers only where it says so.
    return {"num_hidden_layers": 3}


class TestRefuses:
    def test_parameters_without_memory(self):
        with pytest.raises(ValueError, match=r"embed_tokens\.weight is on the meta device: allocate"):
            initialise_hf(tiny("qwen3", "meta"), 0)

    def test_parameters_that_have_lost_their_tie(self):
        with pytest.raises(ValueError, match=r"lm_head\.weight is tied to another parameter in transformers"):
            initialise_hf(tiny("qwen3_tied", "meta").to_empty(device="cpu"), 0)
