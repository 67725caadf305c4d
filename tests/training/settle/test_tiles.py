"""Long microbatches compute in tiles, under modes that can; a number that cannot be followed is refused."""

from pathlib import Path

import pytest

from tests.training.helpers.in_process import TINY_RUN, components_of, run_here
from training.errors import UserError
from training.planning.dry_step import dry_step
from training.runs.records import read_metrics
from training.settle.components import reasons_of

LONG = ("dataset=synthetic", "seq_len=131072", "batch_size=1", "recompute=block")
ADAMW = "optimizer=host_adamw"


@pytest.mark.parametrize("offload", ["none", "layer_stream", "layer_stream_swap", "shard_offload"])
def test_long_sequences_are_tiled(offload: str):
    components = components_of(*LONG, f"offload={offload}")
    assert components.config.recompute.tile == 16_384
    assert reasons_of(components)["recompute.tile"] == "16,384, because a microbatch has 131,072 tokens"


@pytest.mark.parametrize(
    "given",
    [
        ("seq_len=131071",),
        ("recompute=none",),
        ("offload=bounce_linear",),
        ("offload=shard_offload", "offload.checkpoint=false", "recompute=none"),
        ("batch_size=2", "microbatches=2", "seq_len=65536"),
        ("recompute.tile=null",),
    ],
)
def test_shorter_ones_and_those_that_keep_all_are_not(given: tuple[str, ...]):
    assert components_of(*LONG, *given).config.recompute.tile is None


@pytest.mark.parametrize("offload", ["bounce_linear", "bounce_linear_swap", "fsdp2"])
def test_a_number_under_a_mode_of_single_layers_is_refused(offload: str):
    with pytest.raises(UserError, match=r"^recompute.tile=64: this mode brings single layers, .*tile=null"):
        components_of(*TINY_RUN, "recompute.tile=64", f"offload={offload}")


def test_a_number_for_a_model_without_such_modules_is_refused():
    with pytest.raises(UserError, match=r"^recompute.tile=64: .*: take recompute.tile=null$"):
        components_of("model=unet_small", "device=cpu", "hardware=h200", "recompute.tile=64")


def test_a_plan_has_less_memory_and_a_little_more_work():
    whole, tiled = (
        dry_step(components_of(*LONG, "offload=layer_stream", f"recompute.tile={tile}"), has_gpu=True)
        for tile in ("null", 4096)
    )
    assert tiled.activation_bytes < 0.8 * whole.activation_bytes
    # The last product of an MLP, which the recompute of a whole block leaves out.
    assert whole.total("flops") < tiled.total("flops") < 1.02 * whole.total("flops")


def test_a_run_in_tiles_has_the_losses_of_one_without(tmp_path: Path):
    runs = {}
    for name, tile, mode in (("whole", "null", "none"), ("tiled", 7, "none"), ("streamed", 7, "layer_stream")):
        run_here(tmp_path / name, *TINY_RUN, "recompute=block", f"recompute.tile={tile}", f"offload={mode}", ADAMW)
        runs[name] = [step["train/loss"] for step in read_metrics(tmp_path / name)]
    assert runs["streamed"] == runs["tiled"]
    assert runs["tiled"] == pytest.approx(runs["whole"], rel=1e-5)
    assert len(runs["whole"]) == 3
