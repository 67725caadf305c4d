"""Models of many kinds on the meta device, and the share of their bytes that each mode streams.

`python -m tests.training.helpers.streamed_shapes` prints the table of docs/measurements.md.
"""

from collections.abc import Callable

import torch
from torch import nn

from models.diffusion import build_diffusion
from models.hf import build_hf
from offload import BounceLinear, LayerStream, ShardOffload

MODES = {"bounce_linear": BounceLinear, "layer_stream": LayerStream, "shard_offload": ShardOffload}


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16))


def _autoencoder() -> nn.Module:
    """Makes the autoencoder of Stable Diffusion (Rombach et al. 2022)."""
    from diffusers import AutoencoderKL

    stages = 4
    return AutoencoderKL(
        block_out_channels=[128, 256, 512, 512],
        down_block_types=["DownEncoderBlock2D"] * stages,
        up_block_types=["UpDecoderBlock2D"] * stages,
        layers_per_block=2,
        latent_channels=4,
    )


# DeepSeek-V2-Lite (DeepSeek-AI 2024).
DEEPSEEK = {
    "num_hidden_layers": 27,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "vocab_size": 102400,
}
# Stable Diffusion 1.5 (Rombach et al. 2022).
SD15 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}

SHAPES: dict[str, Callable[[], nn.Module]] = {
    "GPT-2, 124M": lambda: build_hf("gpt2_124m", "causal_lm"),
    "Qwen3, 8B": lambda: build_hf("qwen3_8b", "causal_lm"),
    "Mixtral, 8 x 7B": lambda: build_hf("mixtral", "causal_lm"),
    "DeepSeek-V2-Lite": lambda: build_hf("deepseek_v2", "causal_lm", DEEPSEEK),
    "Mamba, 130M": lambda: build_hf("mamba_130m", "causal_lm"),
    "ViT-L": lambda: build_hf("vit_l", "classification"),
    "T5-large": _t5,
    "Flux": lambda: build_diffusion("flux"),
    "DiT-XL": lambda: build_diffusion("dit_xl"),
    "UNet2DConditionModel, SD 1.5": lambda: build_diffusion("UNet2DConditionModel", SD15),
    "UNet2DConditionModel, SDXL": lambda: build_diffusion("sdxl_unet"),
    "AutoencoderKL": _autoencoder,
}


def built(name: str) -> nn.Module:
    """Returns the model of a shape, in bf16, without memory."""
    with torch.device("meta"):
        return SHAPES[name]().to(torch.bfloat16)


def share(model: nn.Module, mode: str, outside: str) -> float:
    """Returns the share of the bytes of parameters and buffers that `mode` streams."""
    footprint = MODES[mode](outside=outside).footprint(model)
    return footprint.host_weight_bytes / (footprint.host_weight_bytes + footprint.resident_bytes)


def share_of_tables(model: nn.Module) -> float:
    """Returns the share of the bytes that are in embedding tables and in the head of a language model."""
    tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    heads = {p for name, p in model.named_parameters() if name.endswith("lm_head.weight")}
    total = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return sum(parameter.nbytes for parameter in tables | heads) / total


def table() -> str:
    """Returns the shares as a table of Markdown: without and with `outside=stream`."""
    lines = ["| | parameters | tables and head |", "|---|---|---|"]
    for mode in MODES:
        lines[0] += f" `{mode}` | `outside=stream` |"
        lines[1] += "---|---|"
    for name in SHAPES:
        model = built(name)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        cells = [name, f"{millions:,.0f} M", f"{share_of_tables(model):.1%}"]
        cells += [f"{share(model, mode, outside):.1%}" for mode in MODES for outside in ("resident", "stream")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
