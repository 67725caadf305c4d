"""Adapters in a model: what trains, what they begin with, the base beneath them, and merging."""

from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from models.adapters import (
    Dora,
    Lora,
    RsLora,
    adapter_layers,
    adapters_off,
    config_of,
    initialise_adapters,
    inject,
    is_adapted,
    merge_adapter,
    root_of,
    without_adapters,
)
from models.diffusion import build_diffusion
from models.hf import build_hf
from models.initialise import initialise
from models.llama import Llama
from tests.models.helpers.adapted import disturb, with_memory
from tests.models.helpers.hf_models import DECODER, batch, tiny
from tests.models.helpers.unets import UNET

KINDS = (Lora, Dora, RsLora)
IDS = torch.arange(12).view(2, 6)


def plain() -> Llama:
    with torch.device("meta"):
        return Llama(40, 16, 32, 2, 2, 2)


def adapted(adapter: Lora, seed: int = 0, dtype: torch.dtype = torch.float32) -> Llama:
    """A model whose base is made from seed 0."""
    model = plain().to(dtype)
    inject(model, adapter, dtype)
    return with_memory(model, seed)


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_layers_where_peft_puts_no_adapter_are_refused_with_the_others_as_advice():
    sizes = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_dense_layers": 1}
    others, model = "k_proj,o_proj,q_proj,v_proj", partial(build_hf, "afmoe", "causal_lm", sizes)
    with torch.device("meta"), pytest.raises(ValueError, match=rf"AfmoeForCausalLM: take targets=\[{others}\]$"):
        inject(model(), Lora(4, 8), torch.float32)
    with torch.device("meta"):
        inject(model(), Lora(4, 8, targets=others.split(","), experts=True), torch.float32)


def base_alone() -> Llama:
    base = plain().to_empty(device="cpu")
    initialise(base, 0)
    return base


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_adapter_computes_what_the_base_does(kind: type[Lora]):
    base, model = base_alone(), adapted(kind(4, 8))
    assert torch.equal(model(IDS), base(IDS))
    with without_adapters(model):
        assert model.state_dict().keys() == base.state_dict().keys()
        assert all(torch.equal(tensor, base.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert len(list(adapter_layers(model))) == 14


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_trains_and_nothing_else(kind: type[Lora]):
    model = adapted(kind(4, 8, dropout=0.1))
    model(IDS, IDS).backward()
    found = trained(model)
    assert all(".lora_" in name and parameter.grad is not None for name, parameter in found.items())
    assert len(found) == 14 * (3 if kind is Dora else 2)
    assert all(p.grad is None for name, p in model.named_parameters() if name not in found)
    # B is zero, so nothing reaches A in the first step.
    assert all(parameter.grad.any() for name, parameter in found.items() if "lora_B" in name)


def test_the_kinds_are_those_of_peft():
    configs = [config_of(adapted(kind(4, 8, 0.25, ["q_proj"]))) for kind in KINDS]
    assert [config.use_dora for config in configs] == [False, True, False]
    assert [config.use_rslora for config in configs] == [False, False, True]
    assert all((c.r, c.lora_alpha, c.lora_dropout, c.bias) == (4, 8, 0.25, "none") for c in configs)
    scales = [next(adapter_layers(adapted(kind(4, 8))))[1].scaling["default"] for kind in KINDS]
    assert scales == [2, 2, 4]


def test_adapters_have_the_dtype_of_their_layer_as_in_peft():
    model = plain().to(torch.bfloat16)
    model.model.layers[0].self_attn.q_proj.float()
    inject(model, Dora(4, 8, targets=["q_proj"]), torch.bfloat16)
    adapters = {name: parameter.dtype for name, parameter in model.named_parameters() if "lora" in name}
    assert len(adapters) == 6
    assert all(dtype == (torch.float32 if "layers.0" in name else torch.bfloat16) for name, dtype in adapters.items())


def test_first_values_are_a_function_of_seed_and_name():
    assert {one.dtype for one in adapted(Dora(4, 8), dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    one, same, other = (trained(adapted(Lora(4, 8), seed)) for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    firsts = [name for name in one if "lora_A" in name]
    assert not any(torch.equal(one[name], other[name]) for name in firsts)
    assert len({one[name].sum().item() for name in firsts}) == len(firsts)
    # Fewer targets leave the values of the others as they are.
    fewer = trained(adapted(Lora(4, 8, targets=["v_proj"]), 1))
    assert len(fewer) == 4
    assert all(torch.equal(tensor, one[name]) for name, tensor in fewer.items())
    some = one[firsts[0]]
    assert some.abs().max() <= 16**-0.5 < some.abs().max() * 1.1


def test_dora_refuses_rows_of_zeros():
    model = adapted(Dora(4, 8))
    name, layer = next(iter(adapter_layers(model)))
    layer.get_base_layer().weight.detach()[3].zero_()
    with pytest.raises(ValueError, match=f"^{name} has rows of zeros, which have no direction: take another"):
        initialise_adapters(model, 0)


def test_the_magnitudes_of_dora_are_the_lengths_of_the_rows():
    model = adapted(Dora(4, 8))
    for _, layer in adapter_layers(model):
        expected = torch.linalg.norm(layer.get_base_layer().weight, dim=1)
        assert torch.equal(layer.lora_magnitude_vector["default"].weight, expected)


def test_modules_to_save_train_in_full_and_are_not_copied():
    count = len(list(adapted(Lora(4, 8)).parameters()))
    model = adapted(Lora(4, 8, modules_to_save=["lm_head", "model.norm"]))
    assert len(list(model.parameters())) == count
    assert {"lm_head.weight", "model.norm.weight"} == {name for name in trained(model) if ".lora_" not in name}
    model(IDS, IDS).backward()
    assert model.lm_head.weight.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_is_a_plain_one_that_computes_the_same(kind: type[Lora]):
    model = adapted(kind(4, 8, modules_to_save=["lm_head"]))
    disturb(model)
    expected = model(IDS)
    merge_adapter(model)
    assert not is_adapted(model)
    assert model.state_dict().keys() == plain().state_dict().keys()
    torch.testing.assert_close(model(IDS), expected)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_values_and_a_quantised_base_are_not_merged():
    model = plain()
    inject(model, Lora(4, 8), torch.float32)
    with pytest.raises(ValueError, match=r"q_proj is on meta: merge a model that is on one device$"):
        merge_adapter(model)
    model = adapted(Lora(4, 8))
    _, layer = list(adapter_layers(model))[-1]
    layer.get_base_layer().weight = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.down_proj is quantised: merge the adapter into"):
        merge_adapter(model)
    assert is_adapted(model)


def test_layers_of_one_weight_with_an_adapter_each_are_not_merged():
    model = adapted(Lora(4, 8))
    first, second = (layer.self_attn.q_proj.get_base_layer() for layer in model.model.layers)
    second.weight = first.weight
    shared = r"^model\.layers\.1\.self_attn\.q_proj and model\.layers\.0\.self_attn\.q_proj have one weight and an"
    with pytest.raises(ValueError, match=shared):
        merge_adapter(model)
    assert is_adapted(model)


def test_without_adapters_puts_them_back_after_an_error():
    model = adapted(Lora(4, 8))
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ArithmeticError), without_adapters(model):
        raise ArithmeticError
    assert [name for name, _ in model.named_parameters()] == names
    untouched = nn.Linear(2, 2)
    with without_adapters(untouched):
        assert not is_adapted(untouched)


@pytest.mark.parametrize("name", ["gpt2", "qwen3_next", "vit"])
def test_models_of_transformers_keep_their_interface(name: str):
    """Every adapter has an effect: that of a layer whose weight others read would get no gradient."""
    model = tiny(name, "meta")
    inject(model, Dora(2, 4), torch.float32)
    with_memory(model)
    assert root_of(model) is model.hf
    model(*batch(name)).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for n, p in trained(model).items() if "lora_B" in n)


def test_layers_of_images_can_be_named():
    """Convolutions too, which by default have no adapter."""
    for targets, kinds in ((None, {nn.Linear}), (["conv1", "time_emb_proj"], {nn.Linear, nn.Conv2d})):
        with torch.device("meta"):
            model = build_diffusion("UNet2DModel", UNET)
        inject(model, Dora(2, 4, targets=targets), torch.float32)
        # DoRA refuses layers that begin at zero, as some of diffusers do.
        model.initialise = lambda seed, model=model: initialise(model, seed)
        with_memory(model)
        assert {type(layer.get_base_layer()) for _, layer in adapter_layers(model)} == kinds
        images, times = torch.ones(2, 1, 8, 8), torch.tensor([0.1, 0.9])
        given = model(images, times)
        with without_adapters(model):
            torch.testing.assert_close(model(images, times), given)


def test_a_model_with_statistics_is_refused():
    with pytest.raises(ValueError, match=r"^targets: .* is a batch norm, whose statistics would change in training"):
        inject(tiny("resnet", "meta"), Lora(2, 4), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_whose_adapters_are_off_computes_what_its_base_does(kind: type[Lora]) -> None:
    base, model = base_alone(), disturb(adapted(kind(rank=2, alpha=4)))
    with_adapters = model(IDS)
    with adapters_off(model):
        assert torch.equal(model(IDS), base(IDS))
        assert trained(model)
    with suppress(ZeroDivisionError), adapters_off(model):
        raise ZeroDivisionError
    assert torch.equal(model(IDS), with_adapters)
    assert not torch.equal(with_adapters, base(IDS))
