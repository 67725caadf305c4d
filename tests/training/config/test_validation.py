"""Configurations that nobody should write are refused in one line each, before anything is built or called.

Every key gets values of every kind. Most run in this process, where each takes a tenth of a second; a few go through
train.py. Keys that do nothing have a warning.
"""

from functools import cache
from pathlib import Path

import pytest
from hydra import compose
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from tests.training.helpers.in_process import conf_initialised
from training.config.validation import TURNED_ON_BY, check, warn_of_keys_without_effect
from training.errors import UserError
from training.runs.compose_errors import explain_refusal, is_refusal

PROFILE = settings(
    derandomize=True, max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
BASES = (
    (),
    ("offload=bounce_linear", "schedule=cosine"),
    ("offload=layer_stream_swap", "optimizer=host_adamw"),
    ("offload=shard_offload", "recompute=block"),
    ("offload=save_on_cpu", "dataset=hub", "dataset.name=some/text"),
    ("dataset=text", "dataset.files=a.txt", "schedule=linear"),
    ("dataset=synthetic", "tracking=disabled"),
)
# Values that fit no key, whatever its type.
NEVER = (
    "{}", "{a: 1}", "[[1]]", "[null]", "{_target_: os.system, command: id}", "[{_target_: os.system}]", "${nowhere}",
)  # fmt: skip
NUMBERS = ("nan", "inf", "-inf", "-1", "1e400", "1000000000000000000000000000000")
ODD = ("''", "abc", "1.5", "true", "null", "[]", "[1,2]", "-5GiB", "nanGiB", "101%", "../..", "???", "${oc.env:NOPE}")


@cache
def keys(base: tuple[str, ...]) -> tuple[str, ...]:
    """Returns every key of a configuration that has a value, without those that have other keys."""

    def within(node: DictConfig, prefix: str = ""):
        for name in node:
            if not OmegaConf.is_missing(node, name) and OmegaConf.is_dict(node[name]):
                yield from within(node[name], f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}"

    return tuple(within(composed(base)))


def composed(overrides) -> DictConfig:
    with conf_initialised():
        return compose("config", list(overrides))


def refusal(*overrides: str) -> str | None:
    """Returns the line that a user reads about a configuration, None where it is accepted. Raises other errors."""
    try:
        check(composed(overrides))
        return None
    except UserError as error:
        return str(error)
    except Exception as error:
        if not is_refusal(error):
            raise
        return explain_refusal(error)


BASE_AND_KEY = st.sampled_from(BASES).flatmap(lambda base: st.tuples(st.just(base), st.sampled_from(keys(base))))


@pytest.mark.slow
@PROFILE
@given(BASE_AND_KEY, st.sampled_from(NEVER))
def test_a_value_that_fits_no_key_is_refused(base_and_key, value):
    base, key = base_and_key
    line = refusal(*base, f"{key}={value}")
    assert line is not None
    assert "\n" not in line
    assert key.rpartition(".")[2] in line


@PROFILE
@given(BASE_AND_KEY, st.sampled_from(NUMBERS + ODD))
@pytest.mark.slow
def test_any_value_is_accepted_or_refused_in_one_line(base_and_key, value):
    base, key = base_and_key
    line = refusal(*base, f"{key}={value}")
    assert line is None or ("\n" not in line and key.rpartition(".")[2] in line)


TARGETS = ("os.system", "subprocess.Popen", "builtins.eval", "offload.modes.tensor_swap._tensors", "")


# Every target and every group, and each target in two groups.
@pytest.mark.parametrize(
    ("group", "target"),
    [
        *zip(("offload", "model", "dataset", "optimizer", "schedule"), TARGETS, strict=True),
        *zip(("offload.weights", "offload.weights", "offload", "model", "dataset"), TARGETS, strict=True),
    ],
)
@pytest.mark.slow
def test_no_configuration_names_other_code(group: str, target: str):
    line = refusal("offload=tensor_swap", f"{group}._target_={target}")
    assert line.startswith(f"{group}._target_=")


@pytest.mark.parametrize(
    "override",
    [
        "offload._convert_=none",
        "+offload._args_=[id]",
        "+offload._partial_=true",
        "+offload._recursive_=false",
        "+offload.weights={_target_: os.system, command: id}",
        "+more._target_=os.system",
        "+hook={_target_: os.system, command: id}",
        "++tracking._target_=os.system",
        "++recompute._target_=os.system",
    ],
)
@pytest.mark.slow
def test_no_other_way_to_call_code(override: str):
    assert refusal(override) is not None


def refusal_of_overlay(text: str, folder: Path) -> str | None:
    """Returns the refusal of an overlay that somebody else wrote."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "theirs.yaml").write_text("# @package _global_\n" + text)
    return refusal(f"hydra.searchpath=[file://{folder}]", "experiment=theirs")


@pytest.mark.parametrize(
    "text",
    [
        "offload:\n  _target_: os.system\n",
        "model:\n  weights:\n    _target_: os.system\n    command: id\n",
        "offload: 3\n",
        "offload: [none]\n",
        "steps: {a: 1}\n",
        "defaults:\n  - override /offload: tensor_swap\noffload:\n  weights: {_target_: os.system}\n",
        "defaults:\n  - override /dataset: text\ndataset:\n  files: [{_target_: os.system, command: id}]\n",
        "steps: !!python/object/apply:os.system [id]\n",
        "steps: [1\n",
        "- a\n- b\n",
    ],
)
@pytest.mark.slow
def test_overlays_of_others(text: str, tmp_path: Path):
    line = refusal_of_overlay(text, tmp_path)
    assert line is not None
    assert "\n" not in line


@pytest.mark.parametrize("key", ["vram_budget", "host_budget"])
def test_a_budget_without_its_unit_is_refused(key: str):
    assert refusal(f"{key}=22").startswith(f"{key}=22: is a number of bytes: give a unit, {key}=22GiB, or null for")
    assert [refusal(f"{key}={value}") for value in ("22GiB", "1KiB", 2**20, "null")] == [None] * 4


@pytest.mark.parametrize("model", ["vit_l", "unet_small", "dit_xl", "flux", "flux_small", "sdxl_unet", "ltx_video"])
def test_a_model_that_brings_a_dataset_trains_on_another(model: str):
    assert refusal(f"model={model}", "dataset=images", "dataset.folder=pictures", "dataset.size=8") is None


@pytest.mark.parametrize("model", ["hf", "diffusers"])
@pytest.mark.parametrize("overrides", ["3", "abc", "[1]"])
def test_overrides_that_are_no_keys(model: str, overrides: str):
    assert refusal(f"model={model}", "model.source=x", f"model.overrides={overrides}").startswith(
        f"model.overrides={overrides}: must be keys with values"
    )
    assert refusal(f"model={model}", "model.source=x", "model.overrides={a: 1}") is None


def test_weights_are_auto_where_a_source_may_have_some():
    assert refusal("model.weights=auto").startswith("model.weights=auto: the model has no source: give a folder")
    assert refusal("model=hf", "model.source=x") is None


@pytest.mark.parametrize("key", ["checkpoint", "eval", "parallel", "sample", "seed"])
def test_a_key_or_a_section_that_is_left_out_is_named(key: str):
    assert refusal(f"~{key}").startswith(f"{key} has no value: give it one, {key}=VALUE; --help explains it")


@pytest.mark.parametrize("key", TURNED_ON_BY)
def test_a_key_in_vain_is_named_with_its_switch(caplog, key: str):
    switch, _, value = TURNED_ON_BY[key]
    given = {"parallel.homes": "shared", "sample.prompts": "[a]"}.get(key, 1)
    overrides = [f"{key}={given}", "devices=1"]
    warn_of_keys_without_effect(composed(overrides), {key, "devices"})
    assert caplog.messages == [f"{key} has no effect without {switch}={value}"]


@pytest.mark.parametrize(
    ("overrides", "given"),
    [
        (["sample.every=5", "sample.prompt=a"], {"sample.every", "sample.prompt"}),
        (["devices=2", "parallel.homes=shared"], {"devices", "parallel.homes"}),
        # The command line does not give them.
        (["sample.prompt=a"], set()),
    ],
)
def test_a_key_that_has_an_effect_has_no_warning(caplog, overrides: list[str], given: set[str]):
    warn_of_keys_without_effect(composed(overrides), given)
    assert caplog.messages == []
