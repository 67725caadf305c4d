"""build_diffusion: its sources, its refusals, and the uniform call."""

import json
import re
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from models.diffusion import CLASSES, SHAPES, DiffusionModel, build_diffusion
from models.diffusion_files import config_folder
from offload import LayerStream, Mode, Resident, acquire, release
from tests.models.helpers.small_diffusion import inputs_of
from tests.models.helpers.small_diffusion import small as small_of
from tests.models.helpers.unets import UNET

SMALL = {**UNET, "num_class_embeds": 4}
TIMES = torch.tensor([0.25, 0.75])


def small(**changes) -> DiffusionModel:
    torch.manual_seed(0)
    return build_diffusion("UNet2DModel", {**SMALL, **changes})


def saved(folder: Path) -> Path:
    small().network.save_pretrained(folder)
    return folder


def test_attributes_describe_the_model() -> None:
    model = small()
    assert model.sample_shape == (1, 8, 8)
    assert model.num_labels == 4
    assert model.condition_shapes == {"labels": ()}
    assert small(sample_size=None).sample_shape is None
    assert small(sample_size=[8, 16]).sample_shape == (1, 8, 16)
    unconditional = small(num_class_embeds=None)
    assert (unconditional.num_labels, unconditional.condition_shapes) == (None, {})


def test_a_folder_gives_the_same_model(tmp_path: Path) -> None:
    expected = {name: tensor.shape for name, tensor in small().state_dict().items()}
    model = build_diffusion(saved(tmp_path / "model"))
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == expected
    assert build_diffusion(tmp_path / "model", {"layers_per_block": 2}).network.config["layers_per_block"] == 2


@pytest.mark.parametrize("part", ["unet", "transformer"])
def test_a_pipelines_folder_has_the_model_in_a_part(tmp_path: Path, part: str) -> None:
    saved(tmp_path / part)
    (tmp_path / "model_index.json").write_text("{}")
    assert config_folder(tmp_path) == tmp_path / part
    assert build_diffusion(tmp_path).sample_shape == (1, 8, 8)


def test_it_is_built_where_the_caller_says_of_lists_of_any_kind() -> None:
    with torch.device("meta"):
        model = build_diffusion("UNet2DModel", OmegaConf.create(SMALL))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert json.loads(model.network.to_json_string())["block_out_channels"] == [8, 16]


def test_initialised_as_all_models_it_computes() -> None:
    model = small()
    model.initialise(0)
    velocity = model(torch.randn(2, 1, 8, 8), TIMES, labels=torch.tensor([0, 3]))
    assert velocity.isfinite().all()
    assert velocity.std() > 0


def test_floating_point_inputs_get_the_models_dtype_and_times_stay() -> None:
    model = small().bfloat16()
    seen = []
    model.network.time_proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].dtype))
    assert model(torch.randn(2, 1, 8, 8), TIMES, labels=torch.tensor([0, 3])).dtype == torch.bfloat16
    assert seen == [torch.float32]


@pytest.mark.parametrize(
    ("noisy", "condition", "message"),
    [
        ((2, 1, 8, 8), {}, "^UNet2DModel needs labels: choose a dataset with them$"),
        ((2, 1, 8, 8), {"labels": (2,), "text": (2, 3)}, "^UNet2DModel cannot use text; it takes labels$"),
        ((2, 3, 8, 8), {"labels": (2,)}, "^UNet2DModel takes 1 channels, not 3"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(noisy, condition, message: str) -> None:
    tensors = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in condition.items()}
    with pytest.raises(ValueError, match=message):
        small()(torch.zeros(noisy), TIMES, **tensors)


def test_padding_without_a_mask_is_refused() -> None:
    model = small_of("ltx")
    _, condition = inputs_of("ltx", tokens=5)
    text = condition["encoder_hidden_states"]
    model.refuse_padding(condition)
    padded = {**condition, "encoder_hidden_states": text.clone()}
    padded["encoder_hidden_states"][0, 3:] = 0
    words = "^encoder_hidden_states is padded with zeros in some examples, .*: give encoder_attention_mask too, bool"
    for each in (padded, {**padded, "encoder_hidden_states": padded["encoder_hidden_states"].flip(1)}):
        with pytest.raises(ValueError, match=words):
            model.refuse_padding(each)
    model.refuse_padding({**padded, "encoder_attention_mask": torch.ones(2, 5)})
    # A dropped caption.
    padded["encoder_hidden_states"][0] = 0
    model.refuse_padding(padded)


def test_padding_is_taken_where_the_model_takes_no_mask() -> None:
    _, condition = inputs_of("flux", tokens=5)
    condition["encoder_hidden_states"][0, 3:] = 0
    small_of("flux").refuse_padding(condition)


def test_velocities_and_gradients_of_masked_texts_are_the_same_when_layers_are_streamed() -> None:
    noisy, condition = inputs_of("ltx", tokens=5)

    def found(mode: Mode) -> list[torch.Tensor]:
        model, streams = small_of("ltx"), acquire("cpu")
        (mask,) = model.optional_conditions
        attached = mode.attach(model, streams)
        try:
            given = {**condition, mask: torch.arange(5) < torch.tensor([[3], [5]])}
            with attached.step():
                losses = attached.accumulate([lambda: model(noisy, TIMES, **given).square().mean()])
            return [*losses, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        finally:
            attached.detach()
            release(streams)

    streamed, resident = found(LayerStream()), found(Resident())
    assert len(streamed) == len(resident) > 10
    assert all(torch.equal(one, other) for one, other in zip(streamed, resident, strict=True))


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (
            "UNet2DModel",
            {"layer_per_block": 2},
            r"^layer_per_block=2: UNet2DModel has no such key\. Did you mean layers_per",
        ),
        ("UNet2DModel", {"zzz": 2}, r"^zzz=2: UNet2DModel has no such key\. It has sample_size, in_channels"),
        (
            "UNet2DModel",
            {"block_out_channels": [8]},
            "^UNet2DModel cannot be built with .*: Must provide the same number",
        ),
        # No head of 16 channels fits into 8.
        (
            "unet_small",
            {"block_out_channels": [8, 8]},
            r"^UNet2DModel cannot be built with .*: down_blocks\..*\.to_q\.weight would have the shape \[0, 8\]",
        ),
        (
            "Flux9Transformer2DModel",
            {},
            r"^Flux9Transformer2DModel is not among the transformers and UNets of diffusers 0\..*; classes without a p",
        ),
        (
            "no/such/folder",
            {},
            r"^no/such/folder: no folder with a config\.json: give one, one of dit_xl, .*UNet2DModel",
        ),
    ],
)
def test_what_is_unknown_is_refused_in_one_line(source: str, overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_diffusion(source, overrides)
    assert "\n" not in str(caught.value)


def test_every_other_class_is_trained_through_its_pipeline(tmp_path: Path) -> None:
    def refused(source: object) -> str:
        with pytest.raises(ValueError, match=r"^SD3Transformer2DModel is trained through its pipeline: ") as caught:
            build_diffusion(source)
        assert str(caught.value).endswith(f"; classes without a pipeline: {', '.join(CLASSES)}")
        (advice,) = re.findall(": take model=pipeline (.*) dataset=captioned dataset.folder=DIR;", str(caught.value))
        return advice

    network = tmp_path / "pipeline" / "transformer"
    small_of("sd3").network.save_config(network)
    assert refused("SD3Transformer2DModel") == "model.source=FOLDER (of a whole pipeline)"
    assert refused(network) == f"model.source=FOLDER (of a whole pipeline) model.weights={network}"
    assert refused(network.parent) == "with the same model.source"
    (network.parent / "model_index.json").write_text("{}")
    assert refused(network) == f"model.source={network.parent}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a configuration: download it again"),
        ('{"_class_name": 3}', "names no class of diffusers"),
        ('{"_class_name": "VQModel"}', "^VQModel is not among the transformers and UNets"),
        ('{"_class_name": "UNet2DModel", "new_key": 7}', "has new_key=7, which UNet2DModel of diffusers .* not know"),
    ],
)
def test_damaged_configurations_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        build_diffusion(tmp_path)


def test_unknown_keys_of_a_file_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    config = {**SMALL, "_class_name": "UNet2DModel", "old_key": None, "_diffusers_version": "0.1"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert build_diffusion(tmp_path).sample_shape == (1, 8, 8)


# In millions, from the papers and model cards.
MILLIONS = {"flux": 11901, "sdxl_unet": 2567, "ltx_video": 1923, "flux_small": 955, "unet_small": 1}


def on_meta(name: str):
    with torch.device("meta"):
        return build_diffusion(name)


def parameters_of(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MILLIONS)
def test_parameters(name: str) -> None:
    assert round(parameters_of(on_meta(name)) / 1e6) == MILLIONS[name]


def test_dit_xl_has_the_papers_parameters_besides_copies_of_embeddings() -> None:
    assert {*MILLIONS, "dit_xl"} == set(SHAPES)
    model = on_meta("dit_xl")
    copies = sum(parameters_of(block.norm1.emb) for block in model.network.transformer_blocks[1:])
    # Of which the paper's has 4,628 more: it predicts a variance too, 16 outputs of 1152 inputs and a bias each.
    assert round((parameters_of(model) - copies) / 1e6) == 675


def test_conditions_of_sdxl() -> None:
    assert on_meta("sdxl_unet").condition_shapes == {
        "encoder_hidden_states": (77, 2048),
        "text_embeds": (1280,),
        "time_ids": (6,),
    }
