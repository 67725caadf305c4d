"""Groups and options as the folder conf/ has them."""

from __future__ import annotations

from training.config.groups import is_group, options_of


def test_groups_and_their_options_are_those_of_the_folder():
    assert is_group("offload")
    assert not is_group("steps")
    assert not is_group("offload/none")
    assert {"none", "layer_stream"} <= {*options_of("offload")}
    assert options_of("steps") == []
