"""The table of cards: each has a rate in the data sheets, and is an option of hardware with figures to replace."""

import pytest
import torch

from tests.training.helpers.in_process import composed
from training.config.cards import CARDS, PRESETS
from training.config.modes import options_of
from training.profiling.hardware import datasheet_flops


@pytest.mark.parametrize("card", CARDS)
def test_a_card_has_its_rate_in_the_data_sheets_and_is_an_option(card: str):
    assert datasheet_flops(CARDS[card].name, torch.bfloat16) > 5e13
    config, invocation = composed(f"hardware={card}", "hardware.vram_gib=12")
    assert invocation.choices["hardware"] == card
    assert (config.hardware.vram_gib, config.hardware.host_gib) == (12, None)


def test_the_options_of_hardware_are_those_of_the_table_too():
    assert options_of("hardware") == sorted([*PRESETS, "auto", "measured"])
