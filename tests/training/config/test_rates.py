"""Learning rate, weight decay and warm-up follow what trains, unless something else gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.training.helpers.in_process import components_of, composed
from tests.training.helpers.pretrained_folder import save_pretrained
from training.checkpoints.changes import changed_values, config_text
from training.config.rates import KEYS
from training.runs.bounded_files import parse_yaml

FROM_SEED = [0.002, 0.1, 0]
HF = ("model=hf", "task=causal_lm")
FLUX = ("model=diffusers", "task=flow_matching", "dataset=synthetic_flux_latents")


def rates(*overrides: str) -> list[float]:
    config = composed(*overrides)[0]
    return [OmegaConf.select(config, key) for key in KEYS]


@pytest.mark.parametrize("optimizer", ["adamw", "host_adamw"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_from_the_seed_nothing_follows_the_adapter(optimizer: str, schedule: str):
    options = (f"optimizer={optimizer}", f"schedule={schedule}")
    assert rates(*options) == rates(*options, "adapter=lora") == FROM_SEED
    assert rates(*options, "model=hf", "model.source=qwen3") == FROM_SEED


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (HF, [1e-5, 0.01, 10]),
        ((*HF, "adapter=dora"), [2e-4, 0.0, 10]),
        (FLUX, [1e-5, 0.01, 10]),
        ((*FLUX, "adapter=lora"), [1e-4, 0.0, 10]),
        ((*HF, "task=dpo"), [5e-7, 0.01, 10]),
        ((*HF, "task=dpo", "adapter=lora"), [5e-6, 0.0, 10]),
    ],
)
def test_pretrained_weights_have_rates_of_fine_tuning(tmp_path: Path, overrides: tuple[str, ...], expected: list):
    (tmp_path / "unet").mkdir()
    empty = f"model.source={tmp_path}"
    assert rates(*overrides, empty) == FROM_SEED
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").touch()
    assert rates(*overrides, f"model.source={tmp_path}") == expected
    assert rates(*overrides, "model.source=OWNER/NAME") == expected
    assert rates(*overrides, "model.source=UNet2DModel", f"model.weights={tmp_path}") == expected
    assert rates(*overrides, "model.source=OWNER/NAME", "model.weights=null") == FROM_SEED


def test_what_is_given_wins():
    weights = "model.weights=OWNER/NAME"
    assert rates(weights, "optimizer.lr=3e-4", "optimizer.weight_decay=0", "schedule.warmup=0") == [3e-4, 0, 0]
    assert rates(weights, "model=llama70b") == [5e-6, 0.01, 10]
    assert rates(weights, "experiment=chat", "adapter=lora") == [3e-3, 0, 10]


def test_a_run_has_the_numbers_and_the_plan_says_why(tmp_path: Path):
    save_pretrained(tmp_path)
    options = (*HF, f"model.source={tmp_path}", "seq_len=64")
    components = components_of(*options, "adapter=lora")
    reasons = {key: components.settled.reasons[key] for key in KEYS}
    why = "because an adapter of pretrained weights trains"
    assert reasons == dict(zip(KEYS, (f"0.0002, {why}", f"0, {why}", f"10, {why}"), strict=True))
    # Whatever changes in the configuration later.
    assert not any(OmegaConf.is_interpolation(components.config[key.split(".")[0]], KEYS[key]) for key in KEYS)
    reasons = components_of(*options, "optimizer.lr=1e-3").settled.reasons
    assert reasons["optimizer.weight_decay"] == "0.01, because pretrained weights train"
    assert "optimizer.lr" not in reasons
    assert not components_of().settled.reasons.keys() & KEYS


def test_a_checkpoint_has_what_the_same_command_gives_again(tmp_path: Path):
    save_pretrained(tmp_path)
    options = (*HF, f"model.source={tmp_path}", "seq_len=64")
    saved = parse_yaml(config_text(components_of(*options).config))
    # As a sweep compares its jobs, before they are settled.
    assert not changed_values(composed(*options)[0], saved).keys() & KEYS
    assert not changed_values(components_of(*options, "steps=300").config, saved).keys() & KEYS
    assert changed_values(composed(*options, "optimizer.lr=1e-4")[0], saved)["optimizer.lr"] == ("1.0e-05", "0.0001")
