"""The keys of the group `quantize`."""

from __future__ import annotations

import pytest

from models.quantise_formats import FORMATS
from tests.training.helpers.in_process import composed
from training.config.quantize import OPTIONS, chosen_format, quantises


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_gives_the_keys_of_its_format(name: str):
    config, _ = composed(f"quantize={name}")
    assert quantises(config) == (name != "none")
    if name != "none":
        chosen, arguments = chosen_format(config)
        assert chosen == name
        # The values in conf/ are the defaults of the class.
        assert FORMATS[name](**arguments) == FORMATS[name]()


def test_every_format_is_an_option():
    assert set(OPTIONS) == {"none", *FORMATS}


def test_a_value_reaches_the_format():
    config, _ = composed("quantize=int4", "quantize.group=32")
    assert chosen_format(config) == ("int4", {"group": 32})
