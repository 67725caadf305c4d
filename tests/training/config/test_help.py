"""The help page lists every mode and explains the keys of the chosen options."""

from __future__ import annotations

import pytest
from hydra import compose

from offload.knobs import explanations
from tests.training.helpers.in_process import conf_initialised
from training.config import help, schema
from training.config.modes import ModeOption, mode_options
from training.sweeps import launcher

schema.register()
help.register()
launcher.register_launcher()


def knobs(group: str, *overrides: str) -> str:
    with conf_initialised():
        return help.knobs(group, compose("config", list(overrides)))


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
