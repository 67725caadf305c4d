"""LoRA files that are written and read here compute what they do in diffusers, in peft and in ComfyUI."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.adapter_files import CONFIG_FILE, DIFFUSERS_FILE, WEIGHTS_FILE, check_adapter, load_adapter, shared_files
from models.adapter_targets import target_names
from models.adapters import Dora, Lora, RsLora, initialise_adapters, inject, merge_adapter
from models.diffusion_network import DiffusersNetwork
from models.lora_files import METADATA, folded, scale_of, scaled
from models.whole_folder import write_whole_folder
from tests.models.helpers.adapted import disturb
from tests.models.helpers.lora_writers import (
    PIPELINES,
    Written,
    by_model,
    by_pipeline,
    kohya,
    kohya_sgm,
    kohya_wan,
    older,
    patch_as_comfy,
    pipeline_of,
    saved,
    with_alphas,
    without_header,
)
from tests.models.helpers.saving import save_adapter
from tests.models.helpers.small_diffusion import TIMES, inputs_of, small

# ComfyUI has other names for the layers of Wan.
IN_COMFY = [name for name in PIPELINES if name != "wan"]
OF_WAN = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]
QKV = "lora_unet_double_blocks_0_img_attn_qkv"
OF_UNET = ["to_q", "to_out.0", "ff.net.0.proj", "proj_in", "conv1"]
EXACT = [Lora(4, 8.0), RsLora(4, 8.0), Dora(4, 8.0)]


def adapted(name: str, adapter: Lora, seed: int = 0) -> DiffusersNetwork:
    """The model with an adapter whose values are those after some training."""
    model = small(name)
    if name == "sdxl" and adapter.targets is None:
        adapter = type(adapter)(adapter.rank, adapter.alpha, targets=OF_UNET)
    inject(model, adapter, torch.float32)
    initialise_adapters(model, seed)
    return disturb(model, seed).eval()


@torch.no_grad()
def output(name: str, model: nn.Module) -> Tensor:
    noisy, condition = inputs_of(name)
    return model(noisy, TIMES, **condition)


def exported(model: nn.Module, folder: Path) -> Path:
    save_adapter(model, folder / "checkpoint")
    write_whole_folder(folder / "exported", shared_files(model, folder / "checkpoint"))
    return folder / "exported"


@pytest.mark.sampled
@pytest.mark.parametrize("adapter", [*EXACT, Lora(3, 8.0), RsLora(8, 5.0)], ids=str)
@pytest.mark.parametrize("name", PIPELINES)
def test_diffusers_and_peft_compute_the_same_with_an_exported_file(tmp_path: Path, name: str, adapter: Lora):
    model = adapted(name, adapter)
    folder, expected = exported(model, tmp_path), output(name, model)
    by_pipeline, by_model, by_peft = small(name), small(name), small(name)
    assert not torch.allclose(output(name, by_peft), expected, atol=1e-3)
    pipeline_of(name, by_pipeline.network).load_lora_weights(folder)
    prefix = "unet" if name == "sdxl" else "transformer"
    by_model.network.load_lora_adapter(folder / DIFFUSERS_FILE, prefix=prefix)
    # Trainable, because torch multiplies by a frozen matrix with another kernel.
    by_peft.network = PeftModel.from_pretrained(by_peft.network, folder, is_trainable=True).get_base_model().eval()
    for loaded in (by_pipeline, by_model, by_peft):
        if adapter in EXACT:
            assert torch.equal(output(name, loaded), expected)
        else:
            torch.testing.assert_close(output(name, loaded), expected, rtol=1e-5, atol=1e-5)
    again = adapted(name, adapter, seed=1)
    assert check_adapter(again, folder) == []
    load_adapter(again, folder)
    torch.testing.assert_close(output(name, again), expected, rtol=1e-5, atol=1e-5)
    assert adapter not in EXACT or torch.equal(output(name, again), expected)


@pytest.mark.parametrize("adapter", [Lora(4, 8.0), RsLora(8, 5.0)], ids=str)
@pytest.mark.parametrize("name", IN_COMFY)
def test_comfy_computes_the_same_with_an_exported_file(tmp_path: Path, name: str, adapter: Lora):
    model, patched = adapted(name, adapter), small(name)
    tensors = load_file(exported(model, tmp_path) / DIFFUSERS_FILE)
    assert patch_as_comfy(name, patched.network, tensors) == set(tensors)
    merge_adapter(model)
    torch.testing.assert_close(output(name, patched), output(name, model), rtol=1e-5, atol=1e-5)


def test_a_factor_is_exact_in_few_bits_or_rounds_in_float32():
    matrix = torch.randn(64, 4).bfloat16()
    for alpha in (2.0, 8.0, 32.0):
        assert scaled(matrix, alpha / 4).dtype == torch.bfloat16
        assert torch.equal(scaled(matrix, alpha / 4).double(), matrix.double() * (alpha / 4))
    # float16 would lose digits below 6e-5.
    small_matrix = matrix.half() * 1e-4
    assert torch.equal(scaled(small_matrix, 1 / 16).double(), small_matrix.double() / 16)
    tensors = folded({"x.lora_A.weight": matrix.T, "x.lora_B.weight": matrix, "norm.weight": matrix[0]}, 3.0)
    assert [tensor.dtype for tensor in tensors.values()] == [torch.float32, torch.float32, torch.bfloat16]
    assert torch.equal(tensors["x.lora_B.weight"], matrix.float() * 3)
    assert scale_of({"r": 16, "lora_alpha": 32, "use_rslora": True}) == 8


def test_what_trains_in_full_is_in_the_file_of_peft_alone(tmp_path: Path):
    model = adapted("sd3", Lora(4, 8.0, modules_to_save=["proj_out"]))
    folder = exported(model, tmp_path)
    assert "base_model.model.proj_out.weight" in load_file(folder / WEIGHTS_FILE)
    assert not any("proj_out" in key for key in load_file(folder / DIFFUSERS_FILE))
    assert json.loads((folder / CONFIG_FILE).read_text())["lora_alpha"] == 4


CASES = [(name, way) for name in PIPELINES for way in (by_model, by_pipeline, without_header)]
CASES += [("sdxl", older), ("sdxl", kohya), ("sdxl", kohya_sgm), ("flux", with_alphas), ("wan", kohya_wan)]
RSLORA = [pytest.param(*case, True, marks=() if case[1] is by_pipeline else pytest.mark.slow) for case in CASES]


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "written", "rslora"), [*((*case, False) for case in CASES), *RSLORA])
def test_a_file_is_read_as_diffusers_reads_it(tmp_path: Path, name: str, written: Written, rslora: bool):
    targets = {"sdxl": OF_UNET, "wan": OF_WAN}.get(name, ["to_q", "to_out.0"])
    source = small(name)
    config = LoraConfig(r=4, lora_alpha=3, target_modules=targets, init_lora_weights=False, use_rslora=rslora)
    source.network.add_adapter(config)
    path = written(name, source.network, tmp_path / "lora")
    theirs = small(name)
    if written is by_model:
        theirs.network.load_lora_adapter(path, weight_name=DIFFUSERS_FILE, prefix=None)
        assert torch.equal(output(name, theirs), output(name, source))
    else:
        pipeline_of(name, theirs.network).load_lora_weights(path)
    ours = adapted(name, Lora(4, 8.0, targets=targets))
    assert check_adapter(ours, path) == []
    load_adapter(ours, path)
    torch.testing.assert_close(output(name, ours), output(name, theirs), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(output(name, ours), output(name, small(name)), atol=1e-3)


def test_each_alpha_of_kohya_counts_as_in_comfy(tmp_path: Path):
    source, patched = small("sdxl"), small("sdxl")
    source.network.add_adapter(LoraConfig(r=4, target_modules=OF_UNET, init_lora_weights=False))
    tensors = load_file(kohya("sdxl", source.network, tmp_path / "plain"))
    alphas = [key for key in tensors if key.endswith(".alpha")]
    tensors |= {key: torch.tensor(float(1 + number)) for number, key in enumerate(alphas)}
    assert patch_as_comfy("kohya", patched.network, tensors) | set(alphas) == set(tensors)
    ours = adapted("sdxl", Lora(4, 8.0, targets=OF_UNET))
    load_adapter(ours, saved(tmp_path / "own", tensors))
    merge_adapter(ours)
    torch.testing.assert_close(output("sdxl", ours), output("sdxl", patched), rtol=1e-5, atol=1e-5)


def test_kohyas_file_for_flux_is_read_as_diffusers_reads_it(tmp_path: Path):
    torch.manual_seed(0)
    tensors = {f"{QKV}.lora_down.weight": torch.randn(4, 16), f"{QKV}.lora_up.weight": torch.randn(48, 4)}
    path = saved(tmp_path / "lora", tensors | {f"{QKV}.alpha": torch.tensor(2.0)})
    theirs, ours = small("flux"), adapted("flux", Lora(4, 4.0, targets=[f"transformer_blocks.*.to_{x}" for x in "qkv"]))
    pipeline_of("flux", theirs.network).load_lora_weights(path)
    load_adapter(ours, path)
    assert torch.equal(output("flux", ours), output("flux", theirs))


@pytest.mark.parametrize("key", [f"{QKV}.diff_b", "other.lora_down.weight"])
def test_keys_that_diffusers_drops_with_no_more_than_a_remark_are_refused(tmp_path: Path, key: str):
    model = adapted("flux", Lora(4, 4.0, targets=[f"transformer_blocks.*.to_{x}" for x in "qkv"]))
    tensors = {f"{QKV}.lora_down.weight": torch.ones(4, 16), f"{QKV}.lora_up.weight": torch.ones(48, 4)}
    check_adapter(model, saved(tmp_path / "zeros", tensors | {key: torch.zeros(16)}))
    path = saved(tmp_path / "lora", tensors | {key: torch.ones(16)})
    with pytest.raises(ValueError, match=rf"has {re.escape(key)}, which diffusers leaves out of a Flux"):
        check_adapter(model, path)


def sd3_tensors(rank: int = 4, *targets: str) -> dict[str, Tensor]:
    network = small("sd3").network
    network.add_adapter(LoraConfig(r=rank, target_modules=list(targets or ["to_q"])))
    return {f"transformer.{key}": tensor for key, tensor in get_peft_model_state_dict(network).items()}


Q = "transformer.transformer_blocks.0.attn.to_q"
LORA = sd3_tensors()
VECTORS = {
    f"transformer.transformer_blocks.{block}.attn.to_q.lora_magnitude_vector": torch.ones(16) for block in (0, 1)
}
OTHER_RANK = {f"{Q}.lora_A.weight": torch.ones(2, 16), f"{Q}.lora_B.weight": torch.ones(16, 2)}
HEADER = {"transformer.r": 4, "transformer.lora_alpha": 4}


@pytest.mark.parametrize(
    ("adapter", "tensors", "header", "problem"),
    [
        (
            Lora(2, 8.0, targets=["to_q"]),
            LORA,
            None,
            r"has rank 4 at \S*to_q, and this adapter 2: give adapter\.rank=4$",
        ),
        (
            Lora(4, 8.0, targets=["to_q"]),
            LORA | OTHER_RANK,
            None,
            r"has rank 2 at \S+\.0\.attn\.to_q and 4 at \S+\.1\.attn\.to_q, and an adapter has one here: give another",
        ),
        (Lora(4, 8.0, targets=["to_q"]), LORA | VECTORS, None, "has .*vector, which is DoRA's: give adapter=dora$"),
        (Dora(4, 8.0, targets=["to_q"]), LORA, None, "lacks lora_magnitude_vector of .*: give adapter=lora$"),
        (
            Lora(4, 8.0, targets=["to_q", "to_k"]),
            LORA,
            None,
            r"lacks \S*to_k \(and 1 more\), where this adapter has a part: give adapter\.targets=\[to_q\]$",
        ),
        (
            Lora(4, 8.0, targets=["to_q"]),
            sd3_tensors(4, "to_q", "to_v"),
            None,
            r"has \S*to_v \(and 1 more\), where this adapter has nothing: give adapter\.targets=\[to_q,to_v\]$",
        ),
        (
            Lora(4, 8.0, targets=["to_q"]),
            LORA | {f"{Q}.lokr_w1": torch.ones(2, 2)},
            None,
            rf"has {Q}\.lokr_w1, which fits nothing in a SD3Transformer2DModel: give a LoRA for this model$",
        ),
        (
            Lora(4, 8.0, targets=["to_q"]),
            LORA | {f"{Q}.dora_scale": torch.ones(16)},
            None,
            rf"has {Q}\.dora_scale: diffusers reads no DoRA in this form: give another file$",
        ),
        (
            Lora(4, 8.0, targets=["to_q"]),
            {key: tensor for key, tensor in LORA.items() if key != f"{Q}.lora_B.weight"},
            None,
            r"lacks B of \S*to_q: give a whole file$",
        ),
        (
            Lora(4, 8.0, targets=["to_q"]),
            LORA | {f"{Q}.lora_A.weight": torch.ones(4, 8)},
            None,
            r"A of \S*to_q has shape \(4, 8\), and the model's layer takes \(4, 16\): give a LoRA for this model$",
        ),
        (
            Lora(4, 8.0, targets=["to_q"], modules_to_save=["proj_out"]),
            LORA,
            None,
            r"has no proj_out, which trains in full here: give adapter\.modules_to_save=null$",
        ),
        (
            Lora(4, 8.0, targets=["to_q"]),
            LORA | {f"{Q}.alpha": torch.tensor(2.0)},
            HEADER,
            "has an alpha of .*to_q and a lora_adapter_metadata: remove one of the two$",
        ),
        (Lora(4, 8.0, targets=["to_q"]), LORA, {"transformer.rs": 3}, "has a lora_adapter_metadata that peft does not"),
        (
            Lora(4, 8.0, targets=["to_q"]),
            LORA,
            HEADER | {"transformer.init_lora_weights": "pissa"},
            "has init_lora_weights=pissa, which cannot be loaded here$",
        ),
        (Lora(4, 8.0, targets=["to_q"]), {}, None, "has no adapter of a SD3Transformer2DModel"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, adapter: Lora, tensors: dict[str, Tensor], header: dict | None, problem: str
):
    path = saved(tmp_path / "lora", tensors, header and {METADATA: json.dumps(header)})
    model = adapted("sd3", adapter)
    before = output("sd3", model)
    with pytest.raises(ValueError, match=problem) as refusal:
        load_adapter(model, path)
    assert "\n" not in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert torch.equal(output("sd3", model), before)
    with pytest.raises(ValueError, match=problem):
        check_adapter(model.to("meta"), path)


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_the_targets_that_an_error_names_fit(tmp_path: Path, name: str):
    source = small(name)
    blocks = target_names(source.network, None)
    chosen = [layer for layer in blocks if "time_emb" not in layer and "add_" not in layer]
    assert len(chosen) < len(blocks)
    source.network.add_adapter(LoraConfig(r=4, target_modules=chosen))
    path = by_pipeline(name, source.network, tmp_path)
    with pytest.raises(ValueError, match=r"where this adapter has a part: give adapter\.targets=\[\S+\]$") as refusal:
        check_adapter(adapted(name, Lora(4, 8.0, targets=["*blocks*"])), path)
    targets = str(refusal.value).rpartition("=[")[2].removesuffix("]").split(",")
    load_adapter(adapted(name, Lora(4, 8.0, targets=targets)), path)


def test_keys_that_diffusers_cannot_convert_are_one_line(tmp_path: Path):
    path = saved(tmp_path / "lora", {"lora_unet_double_blocks_0_nothing.lora_down.weight": torch.ones(4, 16)})
    with pytest.raises(
        ValueError, match=r"some\.safetensors has lora_unet_double_blocks_0_nothing\S+, which "
    ) as refusal:
        check_adapter(adapted("flux", Lora(4, 8.0)), path)
    assert "\n" not in str(refusal.value)


def test_text_encoders_are_named_and_left_out(tmp_path: Path):
    texts = ["text_encoder.text_model.q_proj.lora_A.weight", "lora_te1_text_model_q_proj.lora_down.weight"]
    header = {METADATA: json.dumps(HEADER | {"text_encoder.r": 2, "text_encoder_2.lora_alpha": 3})}
    path = saved(tmp_path / "lora", LORA | {key: torch.ones(4, 16) for key in texts}, header)
    model, other = (adapted("sd3", Lora(4, 8.0, targets=["to_q"])) for _ in range(2))
    assert sorted(check_adapter(model, path)) == sorted(texts)
    load_adapter(model, path)
    load_adapter(other, saved(tmp_path / "alone", LORA))
    assert torch.equal(output("sd3", model), output("sd3", other))


def test_a_folder_has_one_file_or_that_of_diffusers(tmp_path: Path):
    file = saved(tmp_path / "lora", LORA)
    model = adapted("sd3", Lora(4, 8.0, targets=["to_q"]))
    check_adapter(model, tmp_path / "lora")
    save_file({"another": torch.ones(1)}, tmp_path / "lora" / "a.safetensors")
    with pytest.raises(
        ValueError, match=r"lora has 2 \.safetensors files and no adapter_config\.json: give one, .*a\.saf"
    ):
        check_adapter(model, tmp_path / "lora")
    file.rename(tmp_path / "lora" / DIFFUSERS_FILE)
    check_adapter(model, tmp_path / "lora")
