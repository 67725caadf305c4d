"""LoRA files as diffusers, kohya's scripts and ComfyUI write and read them."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import diffusers
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

PIPELINES = {
    "flux": diffusers.FluxPipeline,
    "sd3": diffusers.StableDiffusion3Pipeline,
    "sdxl": diffusers.StableDiffusionXLPipeline,
    "qwen": diffusers.QwenImagePipeline,
    "wan": diffusers.WanPipeline,
}


def pipeline_of(name: str, network: nn.Module) -> diffusers.DiffusionPipeline:
    kind = PIPELINES[name]
    parts = dict.fromkeys(kind._get_signature_keys(kind)[0])
    part = "unet" if name == "sdxl" else "transformer"
    return kind(**parts | {part: network})


# By suffix of the second matrix, that of the first.
COMFY_MATRICES = {
    ".lora_up.weight": ".lora_down.weight",
    "_lora.up.weight": "_lora.down.weight",
    ".lora_B.weight": ".lora_A.weight",
    ".lora.up.weight": ".lora.down.weight",
}


def comfy_key(name: str, layer: str) -> str:
    """The name that ComfyUI has for a layer of diffusers (`comfy/lora.py`, `model_lora_keys_unet`)."""
    if name == "kohya":
        return f"lora_unet_{layer.replace('.', '_')}"
    if name != "sdxl":
        return f"transformer.{layer}"
    return f"unet.{layer.replace('.to_', '.processor.to_')}".removesuffix(".0" if layer.endswith(".to_out.0") else "!")


def patch_as_comfy(name: str, network: nn.Module, tensors: dict[str, Tensor]) -> set[str]:
    """Adds a file to the weights as ComfyUI does (`comfy/weight_adapter/lora.py`), and returns the keys that it read.

    The product of the two matrices is scaled by alpha / rank where there is a tensor `LAYER.alpha`, else by 1.
    """
    read = set()
    for layer, module in network.named_modules():
        key = comfy_key(name, layer) if isinstance(module, nn.Linear | nn.Conv2d) else ""
        for second, first in COMFY_MATRICES.items():
            if f"{key}{second}" in tensors:
                up, down = tensors[f"{key}{second}"], tensors[f"{key}{first}"]
                alpha = tensors.get(f"{key}.alpha")
                scale = 1.0 if alpha is None else alpha.item() / len(down)
                module.weight.data += scale * (up.flatten(1) @ down.flatten(1)).reshape(module.weight.shape)
                read |= {f"{key}{second}", f"{key}{first}"}
    return read


Written = Callable[[str, nn.Module, Path], Path]


def by_model(name: str, network: nn.Module, folder: Path) -> Path:
    network.save_lora_adapter(folder)
    return folder


def by_pipeline(name: str, network: nn.Module, folder: Path, metadata: bool = True) -> Path:
    part = "unet" if name == "sdxl" else "transformer"
    given = {f"{part}_lora_adapter_metadata": network.peft_config["default"].to_dict()} if metadata else {}
    PIPELINES[name].save_lora_weights(folder, **{f"{part}_lora_layers": get_peft_model_state_dict(network)}, **given)
    return folder


def without_header(name: str, network: nn.Module, folder: Path) -> Path:
    return by_pipeline(name, network, folder, metadata=False)


def older(name: str, network: nn.Module, folder: Path) -> Path:
    names = {".lora_A": ".lora.down", ".lora_B": ".lora.up", ".to_": ".processor.to_", "to_out.0.lora.": "to_out_lora."}
    tensors = {}
    for key, tensor in get_peft_model_state_dict(network).items():
        for ours, other in names.items():
            key = key.replace(ours, other)
        tensors[f"unet.{key}"] = tensor
    return saved(folder, tensors)


def kohya(name: str, network: nn.Module, folder: Path) -> Path:
    tensors = {}
    for key, tensor in get_peft_model_state_dict(network).items():
        layer, _, matrix = key.partition(".lora_")
        layer = f"lora_unet_{layer.replace('.', '_')}"
        tensors[f"{layer}.lora_{'down' if matrix == 'A.weight' else 'up'}.weight"] = tensor
        tensors[f"{layer}.alpha"] = torch.tensor(3.0)
    return saved(folder, tensors)


def saved(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "some.safetensors", metadata)
    return folder / "some.safetensors"


def kohya_sgm(name: str, network: nn.Module, folder: Path) -> Path:
    """The names of blocks in Stability's code, which kohya's files of SDXL have."""
    theirs = {}
    for key, tensor in load_file(kohya(name, network, folder / "diffusers")).items():
        for block, layer, (number, kind) in product(range(2), range(2), enumerate(("resnets", "attentions"))):
            key = key.replace(f"down_blocks_{block}_{kind}_{layer}", f"input_blocks_{1 + 2 * block + layer}_{number}")
            key = key.replace(f"up_blocks_{block}_{kind}_{layer}", f"output_blocks_{2 * block + layer}_{number}")
        key = key.replace("mid_block_attentions_0", "middle_block_1").replace("mid_block_resnets_0", "middle_block_0")
        key = key.replace("mid_block_resnets_1", "middle_block_2").replace("_conv1.", "_in_layers_2.")
        theirs[key] = tensor
    return saved(folder, theirs)


def with_alphas(name: str, network: nn.Module, folder: Path) -> Path:
    """Diffusers reads these alphas for Flux alone, and refuses them for others."""
    tensors = get_peft_model_state_dict(network)
    layers = {key.partition(".lora_")[0] for key in tensors}
    alphas = {f"{layer}.alpha": torch.tensor(3.0 + layer.endswith("q")) for layer in layers}
    return saved(folder, {f"transformer.{key}": tensor for key, tensor in (tensors | alphas).items()})


def kohya_wan(name: str, network: nn.Module, folder: Path) -> Path:
    theirs = {"attn1": "self_attn", "attn2": "cross_attn", "to_out.0": "o", ".to_": ".", "net.0.proj": "0", "net.": ""}
    tensors = {}
    for key, tensor in get_peft_model_state_dict(network).items():
        for ours, other in theirs.items():
            key = key.replace(ours, other)
        layer, _, matrix = key.partition(".lora_")
        layer = f"lora_unet_{layer.replace('.', '_')}"
        tensors[f"{layer}.lora_{'down' if matrix == 'A.weight' else 'up'}.weight"] = tensor
        tensors[f"{layer}.alpha"] = torch.tensor(3.0)
    return saved(folder, tensors)
