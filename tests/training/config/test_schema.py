"""Every option composes under its schema, and unknown keys and wrong types are refused by name."""

import importlib
import inspect
from dataclasses import fields
from itertools import zip_longest

import pytest
from hydra import compose
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf

from models.quantise_formats import FORMATS
from peers import peer
from tests.training.helpers.in_process import composed as composed_run
from tests.training.helpers.in_process import conf_initialised
from training.config import schema
from training.config.modes import options_of
from training.config.schema import QUANTIZE, chosen_format, due, quantises
from training.config.validation import check
from training.errors import UserError
from training.runs.compose_errors import explain_refusal
from training.sweeps import launcher

GROUPS = ("offload", "model", "adapter", "dataset", "optimizer", "schedule", "recompute", "tracking")
# All options of all groups, one of each group at a time: a composition takes a tenth of a second.
OPTIONS = [dict(zip(GROUPS, row, strict=True)) for row in zip_longest(*map(options_of, GROUPS))]
OFFLOADS = (
    "bounce_linear, bounce_linear_swap, deepspeed_zero3, diffusers_group, fairscale, fsdp2, layer_stream,"
    " layer_stream_swap, none, ramtorch, roundpipe, save_on_cpu, shard_offload, tensor_swap, torchao_optimizer"
)
# Options that name something only the user knows.
REQUIRED = {
    "text": ["dataset.files=a.txt"],
    "hub": ["dataset.name=some/text"],
    "chat": ["dataset.files=a.jsonl"],
    "preferences": ["dataset.files=a.jsonl"],
    "images": ["dataset.folder=pictures"],
    "hf": ["model.source=gpt2"],
    "diffusers": ["model.source=UNet2DModel"],
    "pipeline": ["model.source=pipeline"],
    "captioned": ["dataset.folder=pictures"],
}

schema.register()
launcher.register_launcher()


@pytest.fixture(autouse=True)
def all_peers_installed(monkeypatch):
    """As if all other systems were installed: without them, their options are refused."""
    monkeypatch.setattr(peer, "find_spec", lambda name: True)


def composed(*overrides):
    with conf_initialised():
        return compose("config", list(overrides))


def refused(*overrides):
    """Returns the line that a user reads about these overrides."""
    with pytest.raises(CompactHydraException) as caught:
        composed(*overrides)
    line = explain_refusal(caught.value)
    assert "\n" not in line
    return line


def checked(*overrides):
    check(composed(*overrides))


@pytest.fixture
def overlay(tmp_path):
    """Writes an experiment overlay outside the repository and returns the overrides that choose it."""

    def write(text):
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\n" + text)
        return f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine"

    return write


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_composes_under_its_schema(options):
    options = {group: option for group, option in options.items() if option}
    required = (key for option in options.values() for key in REQUIRED.get(option, []))
    config = composed(*(f"{group}={option}" for group, option in options.items()), *required)
    check(config)
    assert all(OmegaConf.get_type(config[group]) in schema.SCHEMAS[group].values() for group in options)
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def test_schemas_are_not_offered_as_options():
    line = refused("offload=x")
    assert line.endswith(f"choose from {OFFLOADS}")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("stepz: 3", ["experiment/mine", "stepz", "Did you mean steps?"]),
        ("steps: many", ["experiment/mine", "steps=many"]),
        ("precision: fp16", ["experiment/mine", "precision", "bf16, fp32"]),
        ("optimizer:\n  lrr: 1", ["experiment/mine", "optimizer.lrr", "Did you mean optimizer.lr?"]),
        ("defaults:\n  - override /offload: bounce_liner", ["offload=bounce_liner", OFFLOADS]),
        ("defaults:\n  - override /ofload: none", ["ofload"]),
        ("defaults:\n  - override /offload: bounce_linear\noffload:\n  slot: 2", ["offload.slot", "offload.slots?"]),
    ],
)
def test_an_overlay_is_held_to_the_same_types(overlay, text, named):
    line = refused(*overlay(text))
    assert [words for words in named if words not in line] == []


def test_a_sound_overlay_is_accepted(overlay):
    overrides = overlay("defaults:\n  - override /offload: bounce_linear\nsteps: 3\noffload:\n  slots: 9")
    config = composed(*overrides)
    check(config)
    assert (config.steps, config.offload.slots) == (3, 9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps=0"], "steps=0: must be at least 1"),
        (["seed=-1"], "seed=-1: must be at least 0"),
        (["microbatches=0"], "microbatches=0: must be between 1 and batch_size=8"),
        (["batch_size=4", "microbatches=5"], "microbatches=5: must be between 1 and batch_size=4"),
        (["microbatches='2\n'"], r"microbatches=2\n: must be between 1 and batch_size=8"),
        (["devices=0"], "devices=0: must be at least 1"),
        (["parallel.timeout_s=0"], "parallel.timeout_s=0.0: must be above 0"),
        (["devices=2", "parallel.hosts=3"], "parallel.hosts=3: must be at most devices=2"),
        (["steps=null"], "steps=null: give steps=N, or epochs=N"),
        (["steps=3", "epochs=2"], "steps=3 epochs=2: give one of them, and the other as null"),
        (["epochs=0"], "epochs=0"),
        (["clip_norm=0"], "clip_norm=0.0: must be above 0"),
        (["device='cpu\n'"], r"device=cpu\n: must be auto, cuda, cuda:N"),
        (["devices=2", "device='cuda:0\n'"], r"device=cuda:0\n with devices=2: each rank takes the GPU"),
        (["optimizer.lr=-0.1"], "optimizer.lr=-0.1: must be at least 0"),
        (["optimizer=host_adamw", "optimizer.device_share=much"], "optimizer.device_share=much: must be bytes"),
        (["offload=bounce_linear", "offload.slots=0"], "offload.slots=0: must be at least 1"),
        (["model.num_attention_heads=3"], "model.hidden_size=128: must be a multiple of 6"),
        (["model.num_key_value_heads=3"], "model.num_key_value_heads=3: must divide model.num_attention_heads=4"),
        (["model.vocab_size=0"], "model.vocab_size=0: must be at least 1"),
        (["dataset=text"], "dataset.files has no value: give it one, dataset.files=VALUE"),
        (["dataset=hub"], "dataset.name has no value"),
        (["dataset=text", "dataset.files=3"], "dataset.files=3: must be a path or pattern"),
        (["+optimizer.lrr=1"], "optimizer.lrr: unknown key. Did you mean optimizer.lr?"),
        (["+stepz=1"], "stepz: unknown key. Did you mean steps?"),
        (["~steps"], "steps has no value"),
    ],
)
@pytest.mark.sampled
def test_check_names_key_value_and_range(overrides, message):
    with pytest.raises(UserError) as caught:
        checked(*overrides)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


# Arguments that the builder adds to the keys of a group, and keys that it takes away.
ADDED = {"dataset": {"seed", "batch_size"}, "optimizer": {"params"}, "schedule": {"optimizer", "steps"}}
TAKEN = {"model": {"weights"}, "adapter": {"weights"}}


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, options in schema.SCHEMAS.items() for name in options]
)
def test_the_keys_of_a_schema_are_arguments_of_its_target(group, name):
    option = schema.SCHEMAS[group][name]
    if not issubclass(option, schema.Built):
        assert "_target_" not in {entry.name for entry in fields(option)}
        return
    module, _, target = option._target_.rpartition(".")
    made = getattr(importlib.import_module(module), target)
    signature = inspect.signature(made)
    keys = {entry.name for entry in fields(option) if not entry.name.startswith("_")}
    added = ADDED.get(group, set()) | ({"seq_len"} if group == "dataset" and not hasattr(made, "meta_batch") else set())
    signature.bind(**dict.fromkeys(keys - TAKEN.get(group, set()) | added))


@pytest.mark.parametrize("name", sorted({*QUANTIZE, *FORMATS}))
def test_an_option_gives_the_keys_of_its_format(name: str):
    config, _ = composed_run(f"quantize={name}")
    assert quantises(config) == (name != "none")
    if name != "none":
        chosen, arguments = chosen_format(config)
        assert chosen == name
        # The values in conf/ are the defaults of the class.
        assert FORMATS[name](**arguments) == FORMATS[name]()


def test_a_value_reaches_the_format():
    config, _ = composed_run("quantize=int4", "quantize.group=32")
    assert chosen_format(config) == ("int4", {"group": 32})


@pytest.mark.parametrize(("every", "steps"), [(None, []), (1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5]), (9, [0, 5])])
def test_every_so_many_steps_and_after_the_last(every: int | None, steps: list[int]):
    assert [step for step in range(6) if due(every, step, 5)] == steps
