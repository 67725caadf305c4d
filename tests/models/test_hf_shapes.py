"""Well-known shapes, built without memory: their numbers of parameters are those that their authors state."""

from __future__ import annotations

import pytest
import torch

from models.hf import build_hf
from models.hf_shapes import SHAPES

MILLIONS = {"qwen3_8b": 8191, "mixtral_small": 1517, "gpt2_124m": 124, "mamba_130m": 129, "vit_l": 304}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str):
    with torch.device("meta"):
        model = build_hf(name, "classification" if name == "vit_l" else "causal_lm")
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == MILLIONS[name]
