"""Of long sequences the inputs of blocks are on the host between forward and backward, and nothing else of a block."""

import pytest

from tests.training.helpers.in_process import components_of
from training.planning.dry_step import dry_step

TOKENS, WIDTH = 262144, 512
HEADS = "num_attention_heads:4,num_key_value_heads:2,head_dim:128,intermediate_size:1024,vocab_size:1024"
GPT2 = f"n_embd:{WIDTH},n_head:4,vocab_size:1024,n_positions:{TOKENS}"


NAMES = ("llama", "gemma3", "gpt2", "dit")


def of_library(source: str, layers: int, values: str, name: str = "num_hidden_layers") -> tuple[str, ...]:
    return ("model=hf", f"model.source={source}", f"model.overrides={{{values},{name}:{layers}}}")


def overrides(name: str, layers: int) -> tuple[str, ...]:
    text = ("dataset=synthetic", f"seq_len={TOKENS}")
    if name == "llama":
        sizes = (f"model.hidden_size={WIDTH}", "model.intermediate_size=1024", "model.num_attention_heads=4")
        return ("model=tiny", *sizes, f"model.num_hidden_layers={layers}", *text)
    if name == "dit":
        # 256 tokens of 16 x 72 in an image.
        return ("model=dit_xl", f"model.overrides={{num_layers:{layers}}}", "dataset=synthetic_imagenet_latents")
    if name == "gpt2":
        return (*of_library("gpt2", layers, GPT2, "n_layer"), *text)
    if name == "gemma3":
        types = ",".join(["sliding_attention", "full_attention"] * (layers // 2))
        values = f"{HEADS},hidden_size:{WIDTH},sliding_window:1024,layer_types:[{types}]"
        return (*of_library("gemma3_text", layers, values), *text)
    return (*of_library("qwen3", layers, f"{HEADS},hidden_size:{WIDTH}"), *text)


@pytest.mark.parametrize("mode", ["layer_stream_swap", pytest.param("shard_offload", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.slow) for each in NAMES] + ["qwen3"])
def test_a_block_more_has_its_input_more_on_the_host(name: str, mode: str):
    """All of them: copies under way take the same of the device, however many blocks there are."""
    batch = 512 if name == "dit" else 1
    keys = (f"offload={mode}", "recompute=block", "precision=bf16", f"batch_size={batch}", "hardware=h100")
    few, many = (dry_step(components_of(*keys, *overrides(name, n)), has_gpu=True) for n in (4, 8))
    inputs = 2 * (512 * 256 * 16 * 72 if name == "dit" else TOKENS * WIDTH)
    assert few.total("activation_d2h_bytes") >= 4 * inputs
    assert many.total("activation_d2h_bytes") - few.total("activation_d2h_bytes") == 4 * inputs
    assert many.turn_bytes - few.turn_bytes < inputs / 100
