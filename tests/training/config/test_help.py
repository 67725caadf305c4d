"""The help page lists every mode and explains the keys of the chosen options."""

import pytest
from hydra import compose

from offload.knobs import explanations
from tests.training.helpers.in_process import conf_initialised
from training.config import help, schema
from training.config.modes import CONF, ModeOption, mode_options
from training.sweeps import launcher

schema.register()
help.register()
launcher.register_launcher()


def knobs(group: str, *overrides: str) -> str:
    with conf_initialised():
        return help.knobs(group, compose("config", list(overrides), return_hydra_config=True))


def test_the_page_has_the_values_of_the_configuration():
    with conf_initialised():
        overrides = ["steps=321", "offload=layer_stream", "offload.slots=7"]
        page = help.page(compose("config", overrides, return_hydra_config=True))
    assert "[321]" in page
    assert "offload.slots     blocks that fit on the device" in page
    assert "${" not in page


def test_values_are_written_as_the_command_line_takes_them():
    with conf_initialised():
        page = help.page(compose("config", ["trace=true"], return_hydra_config=True))
    assert "[None]" not in page
    assert "[False]" not in page
    assert "no limit [1.0]" in page
    assert "no metric has its time [true]" in page
    assert "the start of a document ['']" in page


def test_every_mode_is_listed_with_its_description():
    page = " ".join(help.modes().split())
    for option in mode_options().values():
        assert f"{option.name} {option.description}" in page


def test_a_dollar_sign_is_doubled_because_hydra_fills_in_a_template(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(help, "all_options", lambda: {"x": ModeOption("x", "costs $1.", None)})
    assert help.modes().endswith("costs $$1.")


def test_the_keys_of_a_mode_are_explained_with_their_values():
    page = knobs("offload", "offload=layer_stream", "offload.slots=7", "offload.layers=model.layers")
    assert "offload.slots     blocks that fit on the device" in page
    assert "[7]" in page
    assert "offload.layers    dotted path of the list of blocks" in page
    assert "[null]" in page
    assert "_target_" not in page


def test_the_keys_of_both_modes_are_explained_by_their_whole_path():
    page = knobs("offload", "offload=layer_stream_swap")
    assert "offload.weights.prefetch  blocks fetched ahead" in page
    assert "offload.budget            bytes that may stay" in page


def test_a_mode_without_knobs_says_so():
    assert knobs("offload") == "offload: no keys"


@pytest.mark.parametrize("name", schema.OPTIMIZERS)
def test_optimizers_explain_their_keys(name: str):
    keys = {key for key in schema.SCHEMAS["optimizer"][name].__dataclass_fields__ if not key.startswith("_")}
    assert keys <= explanations(schema.OPTIMIZERS[name]).keys()
    page = knobs("optimizer", f"optimizer={name}")
    assert all(f"optimizer.{key} " in page for key in keys)


@pytest.mark.parametrize("name", ["lora", "dora", "rslora"])
@pytest.mark.slow
def test_adapters_explain_their_keys(name: str):
    page = knobs("adapter", f"adapter={name}", "adapter.rank=7")
    assert "adapter.rank             of the two matrices beside a layer. [7]" in page
    keys = {key for key in schema.SCHEMAS["adapter"][name].__dataclass_fields__ if not key.startswith("_")}
    assert keys <= explanations(schema.ADAPTER_OPTIONS[name]).keys()
    assert all(f"adapter.{key} " in page for key in keys)
    assert knobs("adapter") == "adapter: no keys"


@pytest.mark.slow
def test_no_line_is_too_long():
    for option in mode_options():
        assert all(len(line) <= help.WIDTH for line in knobs("offload", f"offload={option}").splitlines())


OPTIONS = [
    (path.parent.name, path.stem)
    for path in sorted(CONF.glob("*/*.yaml"))
    if path.parent.name in schema.SCHEMAS and path.parent.name not in help.ALWAYS
]


@pytest.mark.parametrize(
    ("group", "option"),
    [pytest.param(*each, marks=[] if each[1] in ("hf", "chat", "cosine") else pytest.mark.slow) for each in OPTIONS],
)
def test_an_option_of_any_group_that_is_named_has_its_keys_on_the_page(group: str, option: str):
    overrides = [f"{group}={option}"]
    if group == "model":
        overrides.append("offload=none")
    with conf_initialised():
        config = compose("config", overrides, return_hydra_config=True)
        page, whole = help.given(config), help.page(config)
    keys = [key for key in config[group] if not key.startswith("_")]
    assert all(f"{group}.{key} " in page for key in keys)
    assert page in whole
    assert all(len(line) <= help.WIDTH for line in page.splitlines())


def test_keys_are_explained_by_the_comments_of_the_options_file():
    page = " ".join(knobs("dataset", "dataset=chat").split())
    assert "dataset.train_on assistant: every turn of the assistant, as the template marks them" in page
    assert "else found by comparing texts. last: the last of them. all: every token. [assistant]" in page
    assert "dataset.split [train]" in page


def test_keys_that_an_option_has_from_another_are_explained_as_there():
    page = " ".join(knobs("dataset", "dataset=letters").split())
    assert "dataset.size Height and width in pixels. [16]" in page
    assert "model.attention sdpa, eager or another backend" in " ".join(knobs("model", "model=gpt2").split())


def test_an_experiment_shows_what_it_sets():
    with conf_initialised():
        config = compose("config", ["experiment=quickstart"], return_hydra_config=True)
    assert "experiment=quickstart\n" in help.given(config)
    assert f"    steps: {config.steps}" in help.given(config)


def test_what_nobody_names_has_no_keys_on_the_page():
    with conf_initialised():
        assert help.given(compose("config", ["offload=none", "seed=3"], return_hydra_config=True)) == ""
