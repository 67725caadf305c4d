"""The command line as Hydra gets it, and what is refused before."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from tests.training.helpers.in_process import CONF
from training.errors import UserError
from training.runs.command_line import for_hydra
from training.runs.invocation import Invocation


def test_overrides_stand_behind_the_flags():
    given = ["steps=1", "-m", "offload=none,layer_stream", "--config-dir", "mine", "+x=-1"]
    assert for_hydra(given) == ["-m", "--config-dir", "mine", "steps=1", "offload=none,layer_stream", "+x=-1"]


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["--steps", "10"], "steps=10"),
        (["offload=none", "--steps=10", "-m"], "steps=10"),
        (["-lr", "0.1"], "lr=0.1"),
        (["--seq-len", "128", "--plan"], "seq_len=128"),
        (["--plan", "steps=1"], "plan=true"),
    ],
)
def test_a_key_with_dashes_is_answered_with_what_to_write(arguments: list[str], written: str):
    with pytest.raises(UserError, match=rf"unknown flag: keys have no dashes: write {written}$"):
        for_hydra(arguments)


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("sample.prompts=[a cat, a dog] seed=1", '"sample.prompts=[a cat, a dog]"'),
        ("seed=1 sample.prompt=a cat", '"sample.prompt=a cat"'),
        ("sample.prompt=a cat, a dog", "\"sample.prompt='a cat, a dog'\""),
    ],
)
def test_words_of_a_value_without_quotes_are_shown_with_them(arguments: str, written: str):
    with pytest.raises(UserError, match=rf"^\S+: is not KEY=VALUE: .* write {re.escape(written)}$"):
        for_hydra(arguments.split())
    (word,) = shlex.split(written)
    override = OverridesParser.create().parse_override(word)
    assert not override.is_sweep_override()
    assert override.value() in ("a cat", "a cat, a dog", ["a cat", "a dog"])


def test_a_wrong_value_of_a_flag_is_one_line():
    with pytest.raises(UserError, match=r"^argument --cfg/-c: invalid choice: 'all_of_it' .*lists the flags") as raised:
        for_hydra(["--cfg", "all_of_it"])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("flag", ["--config-dir", "--config-path"])
def test_the_directory_of_a_run_has_no_options(tmp_path: Path, flag: str):
    assert for_hydra([flag, str(tmp_path)]) == [flag, str(tmp_path)]
    for name in ("config.yaml", "choices.yaml"):
        (tmp_path / name).write_text("seed: 1\n")
    with pytest.raises(UserError, match=f"{flag} {tmp_path}: .* would be ignored: write repeat={tmp_path}"):
        for_hydra([flag, str(tmp_path), "--config-name", "config"])


@pytest.mark.parametrize(
    ("override", "options"),
    [
        ("offload=[none]", "bounce_linear, "),
        ("offload=3", "bounce_linear, "),
        ("+model=[tiny,gpt2]", "diffusers, "),
        ("offload@offload.weights=[none,null]", "bounce_linear, "),
        ("tracking=false", "auto, disabled, offline, online"),
        ("adapter=null", "dora, lora, none, rslora"),
    ],
)
def test_a_group_takes_the_name_of_one_option(override: str, options: str):
    """Hydra would merge those of a list, and crash at the others."""
    for take in (for_hydra, Invocation.composed):
        with pytest.raises(UserError) as refused:
            take(["steps=1", override])
        assert str(refused.value).startswith(f"{override}: must be the name of one option: choose from {options}")
    assert for_hydra(["dataset.files=[a.txt]"]) == ["dataset.files=[a.txt]"]


@pytest.mark.parametrize("key", ["hydra.run.dir", "hydra.sweep.dir", "++hydra.run.dir"])
@pytest.mark.parametrize("given", ["~/runs/a", "'~/runs/a'", '"~/runs/a"'])
def test_a_directory_at_home_is_there_and_not_in_a_folder_named_tilde(monkeypatch, key: str, given: str):
    monkeypatch.setenv("HOME", "/home/O'Neill $x")
    (override,) = for_hydra([f"{key}={given}"])
    (parsed,) = OverridesParser.create().parse_overrides([override])
    assert parsed.value() == "/home/O'Neill $x/runs/a"
    assert parsed.key_or_group == key.lstrip("+")


def test_a_tilde_elsewhere_stays_as_it_is():
    given = ["hydra.run.dir='a~b'", "hydra.run.dir=runs/a", "~adapter", "resume='~/runs/a'"]
    assert for_hydra(given) == given


def test_the_home_of_nobody_is_refused():
    with pytest.raises(UserError, match=r"^hydra.run.dir=~nobody-here: there is no home directory of that name"):
        for_hydra(["hydra.run.dir=~nobody-here/a"])


def test_the_keys_of_swept_options_are_left_to_the_jobs():
    """Hydra composes the sweep itself with offload=none, which has no slots."""
    swept = ["-m", "offload=layer_stream,bounce_linear"]
    given = [
        "offload.slots=2", "offload.include=[a,'b c']", "steps=3", "seed=1,2", "hydra.sweep.dir=x", "+a.b=1", "a.b=",
    ]  # fmt: skip
    left = ["offload.slots=choice(2)", "offload.include=choice([a,'b c'])", *given[2:]]
    assert for_hydra([*swept, *given]) == [*swept, *left]
    assert for_hydra(["-m", "seed=1,2", *given]) == ["-m", "seed=1,2", *given]
    assert for_hydra(given) == given
    assert for_hydra([*swept, "offload.slots=[2"]) == [*swept, "offload.slots=[2"]


def test_the_jobs_take_the_keys_of_swept_options():
    (_, *overrides) = for_hydra(["-m", "offload=layer_stream,bounce_linear", "offload.slots=2"])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        loader.load_configuration("config", overrides, RunMode.MULTIRUN)
    parsed = OverridesParser.create().parse_overrides(overrides)
    jobs = [[f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()] for each in parsed]
    assert jobs == [["offload=layer_stream", "offload=bounce_linear"], ["offload.slots=2"]]
