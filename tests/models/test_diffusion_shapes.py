"""The published sizes of the models in SHAPES."""

import pytest
import torch

from models.diffusion import build_diffusion
from models.diffusion_shapes import SHAPES

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
    model = on_meta("dit_xl")
    blocks = model.network.transformer_blocks
    copies = sum(parameters_of(block.norm1.emb) for block in blocks[1:])
    # Of which the paper's has 4,628 more: it predicts a variance too, 16 outputs of 1152 inputs and a bias each.
    assert round((parameters_of(model) - copies) / 1e6) == 675


def test_every_shape_is_tested() -> None:
    assert {*MILLIONS, "dit_xl"} == set(SHAPES)


def test_conditions_of_sdxl() -> None:
    assert on_meta("sdxl_unet").condition_shapes == {
        "encoder_hidden_states": (77, 2048),
        "text_embeds": (1280,),
        "time_ids": (6,),
    }
