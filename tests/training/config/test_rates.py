"""Values follow what trains and how large it is, unless something else gives them."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from tests.training.helpers.in_process import components_of, composed
from tests.training.helpers.pretrained_folder import save_pretrained
from training.checkpoints.changes import changed_values, config_text
from training.config.modes import options_of
from training.config.rates import shown, suit
from training.errors import UserError
from training.runs.bounded_files import parse_yaml
from training.settle.components import Components, recomputes

KEYS = ("optimizer.lr", "optimizer.weight_decay", "schedule.warmup", "seq_len")
HF = ("model=hf", "task=causal_lm")
IMAGES = ("model=diffusers", "task=flow_matching", "dataset=synthetic_flux_latents")
LARGE = ("llama7b", "llama13b", "llama70b", "qwen3_8b", "qwen3_30b_a3b", "gpt_oss_20b", "glm_air")
# Learning rate, weight decay, warm-up, tokens, whether blocks are recomputed, and the schedule: of all weights from the
# seed, and of an adapter.
TEXT, FLOW = ("2e-04", 0, 10), ("1e-04", 0, 10)
EXPECTED = {
    "tiny": [("2e-03", 0.1, 0, 256, False, "constant"), ("2e-04", 0, 0, 256, False, "constant")],
    "gpt2": [("6e-04", 0.1, 10, 1024, False, "cosine"), (*TEXT, 1024, False, "cosine")],
    "mamba": [("6e-04", 0.1, 10, 256, False, "cosine"), (*TEXT, 256, False, "cosine")],
    "llama1b": [("3e-04", 0.1, 10, 2048, True, "cosine"), (*TEXT, 2048, True, "cosine")],
    "mixtral_small": [("3e-04", 0.1, 10, 2048, True, "cosine"), (*TEXT, 2048, True, "cosine")],
    **{name: [("1e-05", 0.1, 10, 2048, True, "cosine"), (*TEXT, 2048, True, "cosine")] for name in LARGE},
    "unet_small": [("2e-03", 0.01, 50, None, False, "cosine"), ("1e-04", 0, 50, None, False, "cosine")],
    "vit_l": [("1e-04", 0.01, 10, None, False, "cosine"), (*FLOW, None, False, "cosine")],
    **{
        name: [("1e-04", 0.01, 10, None, True, "cosine"), (*FLOW, None, True, "cosine")]
        for name in ("dit_xl", "flux_small", "ltx_video", "sdxl_unet")
    },
    "flux": [("1e-05", 0.01, 10, None, True, "cosine"), (*FLOW, None, True, "cosine")],
}
# By the shape alone, without an option: as the option has it.
SHAPES = {
    "qwen3_8b": ("model=hf", "model.source=qwen3_8b"),
    "gpt2": ("model=hf", "model.source=gpt2_124m"),
    "flux": ("model=diffusers", "model.source=flux", "task=flow_matching", "dataset=synthetic_flux_latents"),
}


def chosen(components: Components) -> tuple:
    config = components.config
    is_text = components.task.unit == "tokens"
    return (
        f"{config.optimizer.lr:.0e}",
        config.optimizer.weight_decay,
        config.schedule.warmup,
        config.seq_len if is_text else None,
        recomputes(config),
        config.schedule._target_.rpartition(".")[2],
    )


def test_every_option_of_a_model_is_in_the_table():
    """Those that name no model have the same values by the same function."""
    assert EXPECTED.keys() == set(options_of("model")) - {"hf", "diffusers", "pipeline"}


# The large ones have the values of the first of them, sdxl_unet those of dit_xl, and take seconds.
@pytest.mark.sampled
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=pytest.mark.slow if name in (*LARGE[1:], "flux", "sdxl_unet") else ())
        for name in EXPECTED
    ],
)
def test_an_option_of_a_model_has_the_values_of_its_size(model: str, adapter: str):
    components = components_of(f"model={model}", f"adapter={adapter}", "hardware=h200")
    assert chosen(components) == EXPECTED[model][adapter == "lora"]
    beside_random = "trains beside random weights, because model.weights=null: give those of a trained model"
    assert components.settled.reasons.get("adapter") == (beside_random if adapter == "lora" else None)


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("model", SHAPES)
def test_a_shape_has_the_values_of_its_option(model: str, adapter: str):
    components = components_of(*SHAPES[model], f"adapter={adapter}", "hardware=h200")
    assert chosen(components) == EXPECTED[model][adapter == "lora"]


def test_the_plan_says_why():
    reasons = components_of("model=llama7b", "hardware=h200").settled.reasons
    why = "because 6.7 B parameters train from the seed"
    assert [reasons[key] for key in KEYS[:3]] == [f"1e-05, {why}", f"0.1, {why}", f"10, {why}"]
    assert reasons["seq_len"] == "2048, because the model has 6.7 B parameters"
    assert reasons["recompute"] == "block, because the model has 6.7 B parameters"
    assert not components_of().settled.reasons.keys() & {*KEYS, "recompute", "adapter"}
    reasons = components_of("model=llama7b", "adapter=lora", "quantize=int8", "hardware=h200").settled.reasons
    assert reasons["optimizer.lr"] == "0.0002, because an adapter beside 6.7 B parameters trains"


def values_of(*overrides: str, parameters: float = 1e6, text: bool = True) -> list[float]:
    config = composed(*overrides)[0]
    if config.model.weights == "auto":
        config.model.weights = config.model.source if "/" in config.model.source else None
    suit(config, int(parameters), is_text=text, positions=None)
    return [OmegaConf.select(config, key) for key in KEYS[:3]]


@pytest.mark.parametrize(
    ("overrides", "text", "expected"),
    [
        (HF, True, [1e-5, 0.01, 10]),
        ((*HF, "adapter=dora"), True, [2e-4, 0.0, 10]),
        (IMAGES, False, [1e-5, 0.01, 10]),
        ((*IMAGES, "adapter=lora"), False, [1e-4, 0.0, 10]),
        ((*HF, "task=dpo"), True, [5e-7, 0.01, 10]),
        ((*HF, "task=dpo", "adapter=rslora"), True, [5e-6, 0.0, 10]),
    ],
)
@pytest.mark.parametrize("parameters", [1e6, 8e9])
def test_pretrained_weights_have_rates_of_fine_tuning(overrides: tuple, text: bool, expected: list, parameters: float):
    assert values_of(*overrides, "model.source=OWNER/NAME", parameters=parameters, text=text) == expected
    given = (*overrides, "model.source=UNet2DModel", "model.weights=folder")
    assert values_of(*given, parameters=parameters, text=text) == expected


@pytest.mark.parametrize("optimizer", ["adamw", "host_adamw"])
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
def test_options_of_optimizer_and_schedule_leave_the_values_to_the_size(optimizer: str, schedule: str):
    options = (f"optimizer={optimizer}", f"schedule={schedule}")
    assert values_of(*options) == [2e-3, 0.1, 0]
    assert values_of(*options, parameters=1e9) == [3e-4, 0.1, 10]


def test_what_is_given_wins():
    weights = "model.weights=OWNER/NAME"
    assert values_of(weights, "optimizer.lr=3e-4", "optimizer.weight_decay=0", "schedule.warmup=0") == [3e-4, 0, 0]
    assert values_of("model=flux", "adapter=lora", "optimizer.lr=1e-5", text=False) == [1e-5, 0, 0]
    assert values_of(weights, "experiment=chat", "adapter=lora") == [3e-3, 0, 10]
    config = components_of("model=llama1b", "seq_len=64", "recompute=none", "hardware=h200").config
    assert config.seq_len == 64
    assert not recomputes(config)


def test_a_run_has_the_numbers_of_its_folder(tmp_path: Path):
    save_pretrained(tmp_path)
    options = (*HF, f"model.source={tmp_path}")
    components = components_of(*options, "adapter=lora")
    base = shown(sum(each.numel() for each in components.model.parameters() if not each.requires_grad))
    why = f"because an adapter beside {base} pretrained parameters trains"
    reasons = [components.settled.reasons[key] for key in KEYS[:3]]
    assert reasons == [f"0.0002, {why}", f"0, {why}", f"10, {why}"]
    assert "adapter" not in components.settled.reasons
    reasons = components_of(*options, "optimizer.lr=1e-3").settled.reasons
    assert reasons["optimizer.weight_decay"].endswith("pretrained parameters train")
    assert "optimizer.lr" not in reasons


def test_a_model_without_a_list_of_blocks_recomputes_nothing(monkeypatch: pytest.MonkeyPatch):
    def none_found(model: torch.nn.Module) -> list:
        raise ValueError("no list of blocks")

    monkeypatch.setattr("training.settle.settled.find_blocks", none_found)
    components = components_of("model=llama1b", "hardware=h200")
    assert not recomputes(components.config)
    assert "recompute" not in components.settled.reasons


@pytest.mark.parametrize("key", KEYS)
def test_a_word_in_place_of_a_number_is_refused(key: str):
    with pytest.raises(UserError, match=f"^{key}=fast: must be a number, or auto{' or max' * (key == 'seq_len')}$"):
        components_of(f"{key}=fast")
    assert components_of(f"{key}=auto").config.optimizer.lr == 2e-3


def test_a_checkpoint_has_what_the_same_command_gives_again(tmp_path: Path):
    save_pretrained(tmp_path)
    options = (*HF, f"model.source={tmp_path}", "seq_len=64")
    saved = parse_yaml(config_text(components_of(*options, "optimizer.weight_decay=0").config))
    assert not changed_values(components_of(*options, "optimizer.weight_decay=0.0").config, saved).keys() & {*KEYS}
    changed = changed_values(components_of(*options, "steps=300").config, saved)
    assert changed["optimizer.weight_decay"] == ("0", "0.01")
    assert "optimizer.lr" not in changed
