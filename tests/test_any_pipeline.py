"""What is trained with model=pipeline leaves as its pipeline loads it, and a resumed run goes on as if never ended."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, FluxTransformer2DModel, WanTransformer3DModel
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from models.diffusion_files import PIPELINE_FILE, SCHEDULER_FILE
from scripts import generate
from tests.models.helpers.tiny_pipelines import network_of, saved
from tests.scripts.conftest import called
from tests.test_any_model import curve
from tests.training.helpers.captioned import draw_pictures, given
from tests.training.helpers.in_process import components_of, run_here, saved_run
from tests.training.helpers.modes import small_modes
from tests.training.helpers.results import content, losses
from training.batches import Batch
from training.data.datasets import build_dataset
from training.errors import UserError
from training.planning.memory import PlannedUpdate
from training.saved_runs.export import export
from training.saved_runs.finding import load_model, newest_checkpoint
from training.seeds import seed_of
from training.settle.components import acquired, attached
from training.weights.filling import fill_buffers

NAMES = ("flux", "sd3", "sdxl", "qwen_image", "wan", "z_image")
TRAINED = ("offload=layer_stream", "optimizer.lr=0.05", "schedule.warmup=0", "checkpoint.every=2")
# The transformer of Wan has norms and times in float32 beside bf16.
MIXED = ("precision=bf16", "optimizer=host_adamw")
LORA = ("adapter=lora", "adapter.rank=4", "adapter.alpha=8")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_pictures(tmp_path_factory.mktemp("pictures"))


def job(name: str, pipeline: Path, pictures: Path) -> tuple[str, ...]:
    return tuple(given(name, pipeline, pictures, *TRAINED))


def trained(folder: Path, *overrides: str) -> tuple[nn.Module, Batch]:
    """Returns the model of a run as the loop has it, and its first batch with noise."""
    components = components_of(*overrides, "offload=none")
    with acquired(components.device) as streams, attached(components, streams) as found:
        model = found.model
        fill_buffers(model)
        load_model(model, newest_checkpoint(folder), components.config, torch.device("cpu"))
    dataset = build_dataset(components.config, components.model, folder)
    return model.eval(), components.task.prepared(dataset.batch(0), 0)


@torch.no_grad()
def output(model: nn.Module, batch: Batch) -> Tensor:
    given = {name: value for name, value in batch.items() if name.startswith("asked.")}
    return model(batch["noisy"], batch["timestep"], **given)


@pytest.fixture(scope="module")
def adapted(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, tuple]]:
    """Returns the folder of a pipeline, that of a run of four steps that trains an adapter of it, and the overrides."""

    @functools.cache
    def adapted(name: str) -> tuple[Path, Path, tuple]:
        folder, run = saved(name, tmp_path_factory), tmp_path_factory.mktemp("adapted") / "run"
        overrides = (*job(name, folder, pictures), *LORA, "steps=4")
        return folder, saved_run(run, *overrides), overrides

    return adapted


@pytest.fixture(scope="module")
def exported(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[Path, Path, tuple]]:
    """Returns the folder of a pipeline, one with a run and its export, whose adapter is merged, and the overrides."""

    @functools.cache
    def exported(merged: bool) -> tuple[Path, Path, tuple]:
        folder, made = saved("flux", tmp_path_factory), tmp_path_factory.mktemp("exported")
        overrides = (*job("flux", folder, pictures), "task.sample_steps=3", *(LORA if merged else ()))
        export(str(saved_run(made / "run", *overrides)), str(made / "out"), [], merge=merged)
        return folder, made, overrides

    return exported


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sdxl" else pytest.mark.slow) for name in NAMES]
)
def test_an_adapter_is_loaded_by_its_pipeline(name: str, adapted: Callable, tmp_path: Path):
    folder, run, overrides = adapted(name)
    export(str(run), str(tmp_path / "out"), [])
    model, batch = trained(run, *overrides)
    expected = output(model, batch)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    model.network = network_of(pipeline).eval()
    assert not torch.allclose(output(model, batch), expected, atol=1e-3)
    pipeline.load_lora_weights(tmp_path / "out")
    assert torch.equal(output(model, batch), expected)


@pytest.mark.parametrize("merged", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_exported_network_is_that_of_a_pipeline(merged: bool, exported: Callable):
    folder, made, overrides = exported(merged)
    model, batch = trained(made / "run", *overrides)
    expected = output(model, batch)
    network = type(model.network).from_pretrained(made / "out")
    model.network = network_of(DiffusionPipeline.from_pretrained(folder, transformer=network)).eval()
    # Merged weights are rounded once more.
    torch.testing.assert_close(output(model, batch), expected, rtol=0, atol=1e-5 if merged else 0)
    # Training goes on from there without task.scheduler.
    for file in (folder / "scheduler" / SCHEDULER_FILE, folder / PIPELINE_FILE):
        assert (made / "out" / file.name).read_bytes() == file.read_bytes()
    components = components_of(*overrides, f"model.weights={made / 'out'}")
    assert str(made / "out" / SCHEDULER_FILE) in components.settled.reasons["task.shift"]


def test_generate_makes_the_picture_of_the_pipeline(
    exported: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """A prompt that no run has encoded; the pipeline has the exported network, and is called as its users do."""
    folder, stored, _ = exported(False)
    found = []
    for offload in ("none", "layer_stream"):
        asked = ("a red circle", "--seed", "7", "--picture", tmp_path / f"{offload}.png", f"offload={offload}")
        assert called(monkeypatch, generate, stored / "run", *asked) == 0
        found.append(np.asarray(Image.open(tmp_path / f"{offload}.png")))
    network = FluxTransformer2DModel.from_pretrained(stored / "out")
    pipeline = DiffusionPipeline.from_pretrained(folder, transformer=network)
    generator = torch.Generator().manual_seed(7)
    made = pipeline("a red circle", height=64, width=64, num_inference_steps=3, generator=generator)[0][0]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], np.asarray(made))
    assert called(monkeypatch, generate, stored / "run", "a red circle") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: {stored / 'run'}: its model makes pictures: give --picture FILE.png"


def test_text_encoders_do_not_train(pictures: Path, tmp_path_factory):
    run = (*job("flux", saved("flux", tmp_path_factory), pictures), *LORA)
    with pytest.raises(
        UserError, match=r"^adapter\.targets=text_encoder\.\*: .*; text encoders do not train, only the"
    ):
        components_of(*run, "adapter.targets=['text_encoder.*']")


def test_a_resumed_run_is_that_without_an_end(adapted: Callable, pictures: Path, tmp_path: Path):
    _, whole, run = adapted("sdxl")
    checkpoints = whole / "checkpoints"
    run_here(tmp_path / "resumed", *run, f"resume={checkpoints / 'step-00000002'}")
    assert losses(tmp_path / "resumed") == losses(whole)[2:]
    last = "step-00000004"
    assert content(tmp_path / "resumed" / "checkpoints" / last) == content(checkpoints / last)
    caption = (pictures / "0.txt").read_text()
    (pictures / "0.txt").write_text("another caption")
    try:
        with pytest.raises(
            UserError, match="a picture, a mask or a caption has changed, or is new or gone; restore it"
        ):
            run_here(tmp_path / "other", *run, f"resume={checkpoints / 'step-00000002'}")
    finally:
        (pictures / "0.txt").write_text(caption)


def test_losses_are_those_of_a_loop_of_diffusers_and_peft(tmp_path: Path, tmp_path_factory):
    """The loop calls the transformer as diffusers' train_dreambooth_lora_flux.py, for the same noise and times."""
    folder, pictures = saved("flux", tmp_path_factory), draw_pictures(tmp_path / "pictures", 2)
    pipeline = DiffusionPipeline.from_pretrained(folder)
    transformer = pipeline.transformer.requires_grad_(False)
    torch.manual_seed(1)
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_out.0"]))
    adapter = get_peft_model_state_dict(transformer)
    pipeline.save_lora_weights(tmp_path / "lora", transformer_lora_layers=adapter)
    first = ("adapter=lora", "adapter.rank=4", "adapter.alpha=4", "adapter.targets=[to_q,to_out.0]")
    first += (f"adapter.weights={tmp_path / 'lora'}", f"dataset.folder={{{pictures}: 4}}", "dataset.caption_dropout=0")
    run = (
        *job("flux", folder, pictures),
        *first,
        "schedule=constant",
        "steps=4",
        "clip_norm=null",
        "optimizer.weight_decay=0",
    )
    run_here(tmp_path / "run", *run)
    components = components_of(*run)
    dataset = build_dataset(components.config, components.model, tmp_path)
    trained = [each for each in transformer.parameters() if each.requires_grad]
    # The run's rule is that of torch's fused kernel. The one in Python rounds in another way on some processors.
    optimizer = torch.optim.AdamW(trained, 0.05, (0.9, 0.95), weight_decay=0, fused=True)
    found = []
    for step in range(1, 5):
        batch = components.task.prepared(dataset.batch(step - 1), seed_of(components.config.seed, step))
        noisy, (count, channels, height, width) = batch["noisy"], batch["noisy"].shape
        # Pictures of one shape are the same one.
        caption = (pictures / f"{int(height == width)}.txt").read_text()
        with torch.no_grad():
            prompt, pooled, text_ids = pipeline.encode_prompt([caption] * count, None)
        predicted = transformer(
            hidden_states=FluxPipeline._pack_latents(noisy, count, channels, height, width),
            timestep=batch["timestep"] * 1000 / 1000,
            guidance=torch.ones(count),
            pooled_projections=pooled,
            encoder_hidden_states=prompt,
            txt_ids=text_ids,
            img_ids=FluxPipeline._prepare_latent_image_ids(count, height // 2, width // 2, "cpu", torch.float32),
            return_dict=False,
        )[0]
        scale = pipeline.vae_scale_factor
        predicted = FluxPipeline._unpack_latents(predicted, height * scale, width * scale, scale)
        loss = ((predicted - batch["target"]) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    assert found == losses(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("small_activations")
def test_weights_in_float32_beside_bf16_train_alike_in_every_mode(pictures: Path, tmp_path: Path, tmp_path_factory):
    run = (*job("wan", saved("wan", tmp_path_factory), pictures), *MIXED, "clip_norm=0.1", "microbatches=2")
    for mode in ("none", "bounce_linear", "shard_offload"):
        run_here(tmp_path / mode, *run, f"offload={mode}", *small_modes()[mode])
        assert curve(tmp_path / mode) == curve(tmp_path / "none"), mode


def test_a_run_saves_the_dtypes_that_its_library_loads(pictures: Path, tmp_path: Path, tmp_path_factory):
    run = saved_run(tmp_path / "run", *job("wan", saved("wan", tmp_path_factory), pictures), *MIXED)
    export(str(run), str(tmp_path / "out"), [])
    stored = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16).state_dict()
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32, torch.bfloat16}
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {name: t.dtype for name, t in stored.items()}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in loaded.items())


def test_a_plan_counts_the_bytes_of_each_dtype(pictures: Path, tmp_path_factory):
    run = (*job("wan", saved("wan", tmp_path_factory), pictures), *MIXED, "optimizer.device_share=1GiB")
    components = components_of(*run)
    units = components.footprint.trained
    assert len({parameter.dtype for unit in units for parameter in unit}) == 2
    expected = sum(parameter.nbytes for unit in units for parameter in unit)
    assert PlannedUpdate.of(components, 0).placed_gradient_bytes == expected
