"""Adapters of experts that are one tensor: peft's numbers and files, and the same bits in every mode."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from models.adapter_experts import ExpertsLora
from models.adapter_files import WEIGHTS_FILE, adapter_tensors, adapter_values, check_adapter, load_adapter
from models.adapters import (
    Dora,
    Lora,
    RsLora,
    adapter_layers,
    adapters_off,
    config_of,
    initialise_adapters,
    inject,
    merge_adapter,
    without_adapters,
)
from models.hf import TransformersModel, build_hf
from models.quantise import quantise
from models.quantise_formats import FORMATS
from models.safetensors_files import read_headers
from offload import BounceLinear, LayerStream, Mode, Resident, ShardOffload, TensorSwap, find_blocks, recompute
from offload.planning import dry_run
from offload.weights.units import partition
from tests.models.helpers.adapted import disturb, fill_base, with_memory
from tests.models.helpers.hf_models import GROUPED, MIXTRAL, tiny
from tests.models.helpers.saving import save_adapter
from tests.offload.helpers.models import under

QWEN = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MODELS = {"qwen3_moe": QWEN, "mixtral": MIXTRAL}
# The first has one tensor in a layer's experts whose matrices are transposed; the second has others beside experts.
OTHERS = ("gpt_oss", "deepseek_v3")
EXPERTS = Lora(4, 8, targets=["o_proj"], experts=True)
SHARED = replace(EXPERTS, experts="shared")
IDS = torch.arange(12).view(2, 6)
DEVICE = {"trained": "device"}
MODES: dict[str, Callable[[], Mode]] = {
    "bounce_linear": lambda: BounceLinear(**DEVICE),
    "bounce_linear_all": lambda: BounceLinear(outside="stream"),
    "layer_stream": lambda: LayerStream(slots=2, **DEVICE),
    "layer_stream_trained_too": lambda: LayerStream(slots=2),
    "shard_offload": lambda: ShardOffload(shards=2, **DEVICE),
    "layer_stream_swap": lambda: TensorSwap(LayerStream(slots=2, **DEVICE)),
}


def meta(name: str) -> TransformersModel:
    if name in OTHERS:
        return tiny(name, "meta")
    with torch.device("meta"):
        return build_hf(name, "causal_lm", MODELS[name])


def fill(model: nn.Module) -> None:
    fill_base(model)
    initialise_adapters(model, 0)
    disturb(model, 1)


def adapted(name: str, adapter: Lora = EXPERTS) -> nn.Module:
    model = meta(name)
    inject(model, adapter, torch.float32)
    return disturb(with_memory(model), 1)


def twin(model: TransformersModel) -> nn.Module:
    """A model of transformers with the base's weights."""
    made = type(model.hf)(model.hf.config)
    with without_adapters(model):
        made.load_state_dict(model.hf.state_dict())
    return made.eval()


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_each_expert_has_an_adapter_that_trains(name: str):
    model = adapted(name)
    layers = [layer for _, layer in adapter_layers(model) if isinstance(layer, ExpertsLora)]
    with_experts = 1 if name == "deepseek_v3" else 2
    assert [layer.parameter_name for layer in layers] == ["down_proj", "gate_up_proj"] * with_experts
    model(IDS, IDS).backward()
    for layer in layers:
        first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert len(first) == second.shape[1] == 4 * 4
        assert first.grad.any()
        assert second.grad.any()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_an_adapter_for_all_experts_of_a_layer_is_of_the_size_of_one():
    each, shared = (
        sum(map(Tensor.numel, adapter_tensors(adapted("mixtral", kind)).values())) for kind in (EXPERTS, SHARED)
    )
    assert each - shared == 3 * 2 * 4 * ((16 + 64) + (32 + 16))
    model = adapted("mixtral", SHARED)
    model(IDS, IDS).backward()
    assert all(parameter.grad.any() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [Lora(4, 8, experts=True), RsLora(4, 8, experts=True), Lora(4, 8, experts="shared")])
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_peft_reads_the_files_and_computes_and_merges_the_same(tmp_path: Path, name: str, kind: Lora):
    model = adapted(name, kind).eval()
    save_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(twin(model), tmp_path).eval()
    logits = model.hf(IDS).logits
    assert torch.equal(loaded(IDS).logits, logits)
    assert not torch.allclose(twin(model)(IDS).logits, logits, atol=1e-4)
    torch.testing.assert_close(loaded.merge_and_unload()(IDS).logits, logits, rtol=1e-6, atol=1e-6)
    names, plain = list(twin(model).state_dict()), twin(model)
    merge_adapter(model)
    assert list(model.hf.state_dict()) == names
    torch.testing.assert_close(model.hf(IDS).logits, logits, rtol=1e-6, atol=1e-6)
    assert type(model.hf.model.layers[1].mlp.experts) is type(plain.model.layers[1].mlp.experts)


def test_what_peft_saves_of_the_same_parameters_is_loaded(tmp_path: Path):
    model = adapted("qwen3_moe").eval()
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    theirs = get_peft_model(twin(model), config).eval()
    theirs.save_pretrained(tmp_path)
    load_adapter(model, tmp_path)
    assert torch.equal(model.hf(IDS).logits, theirs(IDS).logits)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_shared_adapter_computes_in_bfloat16_what_peft_does_with_its_file(tmp_path: Path, name: str):
    model = adapted(name, SHARED).eval().bfloat16()
    save_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(twin(model).bfloat16(), tmp_path, autocast_adapter_dtype=False).eval()
    assert torch.equal(loaded(IDS).logits, model.hf(IDS).logits)


def test_a_shared_adapter_is_read_from_a_file_where_all_experts_have_it(tmp_path: Path):
    model, other = adapted("mixtral", SHARED), adapted("mixtral", replace(SHARED, alpha=4))
    save_adapter(model, tmp_path)
    load_adapter(other, tmp_path)
    for name, tensor in adapter_tensors(other).items():
        assert torch.equal(tensor, adapter_tensors(model)[name] * (2 if "_B." in name else 1))
    load_adapter(adapted("mixtral"), tmp_path)
    averages = {name: tensor + 1 for name, tensor in adapter_tensors(model).items()}
    save_file(averages, tmp_path / "ema.safetensors")
    exported = adapter_values(tmp_path, read_headers([tmp_path / "ema.safetensors"]))
    save_file(exported, tmp_path / WEIGHTS_FILE)
    load_adapter(model, tmp_path)
    assert all(torch.equal(tensor, averages[name]) for name, tensor in adapter_tensors(model).items())
    save_adapter(adapted("mixtral"), tmp_path)
    with pytest.raises(ValueError, match=r"lora_A.weight is another for each expert, .*: give adapter.experts=true$"):
        check_adapter(model, tmp_path)


def test_first_values_are_those_of_the_base_and_a_function_of_seed_and_name():
    model = meta("mixtral")
    inject(model, EXPERTS, torch.float32)
    with_memory(model)
    assert torch.equal(model.eval().hf(IDS).logits, twin(model)(IDS).logits)
    firsts = {name: tensor for name, tensor in adapter_tensors(model).items() if "experts" in name and "_A." in name}
    assert len(firsts) == len({tensor.sum().item() for tensor in firsts.values()}) == 4
    for tensor in firsts.values():
        assert tensor.abs().max() <= tensor.shape[1] ** -0.5 < tensor.abs().max() * 1.1


def test_without_and_off_they_are_the_base():
    model = adapted("mixtral").eval()
    base, given = twin(model)(IDS).logits, model.hf(IDS).logits
    assert not torch.allclose(base, given, atol=1e-4)
    with without_adapters(model):
        assert torch.equal(model.hf(IDS).logits, base)
    with adapters_off(model):
        assert torch.equal(model.hf(IDS).logits, base)
    assert torch.equal(model.hf(IDS).logits, given)
    assert torch.equal(copy.deepcopy(model).hf(IDS).logits, given)


def test_the_weights_are_in_their_module_after_an_error():
    model = adapted("mixtral")
    experts = model.hf.model.layers[0].mlp.experts.get_base_layer()
    experts.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.hf(IDS)
    assert experts.gate_up_proj is dict(experts.named_parameters())["gate_up_proj"]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_autocast_computes_what_peft_does(precision: torch.dtype):
    model = adapted("qwen3_moe").eval()
    theirs = get_peft_model(twin(model), config_of(model)).eval()
    theirs.load_state_dict(
        {name.replace("hf.", "base_model.model.", 1): tensor for name, tensor in model.state_dict().items()}
    )
    with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
        assert torch.equal(theirs(IDS).logits, model.hf(IDS).logits)


def trained(
    name: str, mode: Mode, again: bool = False, format: str | None = None, experts: bool | str = True
) -> list[Tensor]:
    """The losses of three steps of two microbatches, and what trains in the end; `again`: blocks recompute."""
    model = meta(name).train()
    if format is not None:
        names = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
        quantise(model, names, FORMATS[format]())
    inject(model, replace(EXPERTS, experts=experts), torch.float32)

    def loss(seed: int) -> Tensor:
        ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(seed))
        return model(ids[:, :-1], ids[:, 1:])

    seen = []
    with under(mode, model) as attached:
        fill(model)
        undo = recompute([block for _, block in find_blocks(model)] if again else [])
        found = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(found, lr=0.01, foreach=False)
        for step in range(3):
            with attached.step():
                seen += [
                    one.clone() for one in attached.accumulate([functools.partial(loss, 2 * step + n) for n in (0, 1)])
                ]
            optimizer.step()
            optimizer.zero_grad()
        undo()
        return seen + [parameter.detach().clone() for parameter in found]


@functools.cache
def of_the_resident_model(name: str, format: str | None = None, experts: bool | str = True) -> list[Tensor]:
    return trained(name, Resident(), format=format, experts=experts)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, small_activations: None) -> None:
    # As small as these models are, layers would join their neighbours.
    monkeypatch.setattr(partition, "SMALL_BYTES", 1)


@pytest.mark.parametrize(
    ("name", "mode", "again"),
    [("qwen3_moe", mode, False) for mode in MODES]
    + [("mixtral", mode, True) for mode in ("bounce_linear", "layer_stream", "shard_offload")],
)
@pytest.mark.usefixtures("small")
@pytest.mark.sampled
def test_three_steps_are_those_of_the_resident_model(name: str, mode: str, again: bool):
    expected, found = of_the_resident_model(name), trained(name, MODES[mode](), again)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("experts", [True, "shared"])
@pytest.mark.usefixtures("small")
def test_a_plan_counts_the_bytes_of_a_step(experts: bool | str):
    model = meta("mixtral").train()
    inject(model, replace(EXPERTS, experts=experts), torch.float32)
    mode, on_meta = MODES["layer_stream"](), IDS.to("meta")
    planned = dry_run(mode, model, [lambda: model(on_meta, on_meta)], on_gpu=False)
    with under(mode, model) as attached:
        fill(model)
        with attached.step():
            model(IDS, IDS).backward()
        counters = attached.counters()
    assert planned.total("h2d_bytes") == counters.h2d_bytes
    assert planned.total("d2h_bytes") == counters.d2h_bytes == 0
    assert planned.total("flops") > 0


@pytest.mark.parametrize("mode", ["bounce_linear", "layer_stream", "shard_offload"])
@pytest.mark.parametrize("format", ["int8", "nf4"])
@pytest.mark.usefixtures("small")
def test_quantised_experts_train_the_same_in_every_mode(format: str, mode: str):
    expected, found = of_the_resident_model("mixtral", format), trained("mixtral", MODES[mode](), format=format)
    assert not torch.equal(expected[0], of_the_resident_model("mixtral")[0])
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("mode", ["bounce_linear", "layer_stream_trained_too", "shard_offload"])
@pytest.mark.usefixtures("small")
def test_a_shared_adapter_trains_the_same_in_every_mode(mode: str):
    expected = of_the_resident_model("gpt_oss", "nf4", "shared")
    found = trained("gpt_oss", MODES[mode](), again=mode != "shard_offload", format="nf4", experts="shared")
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("name", "adapter", "message"),
    [
        ("mixtral", Lora(4, 8, experts="each"), "^experts=each: give true, false or shared$"),
        ("mixtral", Dora(4, 8, experts="shared"), "^experts=shared: DoRA has no form"),
        ("gpt2", Lora(4, 8, experts="shared"), "^experts=shared: the model has no experts"),
        ("mixtral", Dora(4, 8, experts=True), "^experts=true: DoRA has no form for experts .*: take adapter=lora$"),
        ("mixtral", Lora(4, 8, 0.1, experts=True), "^dropout=0.1: experts .* take none: give dropout=0 or"),
        ("gpt2", Lora(4, 8, experts=True), "^experts=true: the model has no experts that are one tensor: leave it"),
        ("mixtral", Lora(4, 8, modules_to_save=["experts"], experts=True), "^modules_to_save=.*experts: .* gets an ad"),
    ],
)
def test_what_has_no_adapter_is_refused(name: str, adapter: Lora, message: str):
    with pytest.raises(ValueError, match=message):
        inject(tiny(name, "meta"), adapter, torch.float32)


def test_files_with_and_without_experts_are_told_apart(tmp_path: Path):
    plain = Lora(4, 8, targets=["o_proj"])
    for own, other, state in ((EXPERTS, plain, "adapters"), (plain, EXPERTS, "no adapters")):
        save_adapter(adapted("mixtral", own), tmp_path)
        with pytest.raises(ValueError, match=f"has {state} of experts .*: give the same experts$"):
            check_adapter(adapted("mixtral", other), tmp_path)
