"""The blocks of a model: at the path that was given, at a usual path, or in the largest list."""

from __future__ import annotations

import pytest
from torch import nn

from offload.runtime.blocks import find_blocks


def layers(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


class Model(nn.Module):
    """A model with the lists of modules that it is given, by attribute."""

    def __init__(self, **lists: nn.Module):
        super().__init__()
        for name, modules in lists.items():
            setattr(self, name, modules)


def names(model: nn.Module, path: str | None = None) -> list[str]:
    return [name for name, _ in find_blocks(model, path)]


def test_a_path_names_the_list():
    model = Model(encoder=nn.ModuleList(layers(2)), decoder=nn.Sequential(*layers(3)))
    assert names(model, "decoder") == ["decoder.0", "decoder.1", "decoder.2"]
    assert [block for _, block in find_blocks(model, "encoder")] == list(model.encoder)


def test_the_model_itself_may_be_the_list():
    assert names(nn.Sequential(*layers(2)), "") == ["0", "1"]


def test_a_usual_path_goes_before_a_larger_list():
    model = Model(experts=nn.ModuleList(layers(9)), layers=nn.ModuleList(layers(1)), blocks=nn.ModuleList(layers(2)))
    assert names(model) == ["layers.0"]


def test_the_largest_list_by_parameters_goes_before_others_and_any_sequential():
    model = Model(
        many=nn.ModuleList(layers(5, width=2)), wide=nn.ModuleList(layers(2, width=8)), rest=nn.Sequential(*layers(9))
    )
    assert names(model) == ["wide.0", "wide.1"]
    assert names(Model(first=nn.Sequential(*layers(1)), second=nn.Sequential(*layers(2)))) == ["second.0", "second.1"]


@pytest.mark.parametrize(
    ("model", "path", "message"),
    [
        (
            Model(left=nn.ModuleList(layers(1)), right=nn.ModuleList()),
            "middle",
            "k=middle: .* of this model: left, right",
        ),
        (Model(left=nn.ModuleList(layers(1)), right=nn.ModuleList()), "right", "k=right: no list of blocks there"),
        (Model(left=nn.Linear(2, 2)), "left", "k=left: .* the lists of this model: none"),
        (nn.Linear(2, 2), None, "k=None: no list of blocks there"),
        (nn.Sequential(*layers(1)), "0", r"k=0: .* of this model: \(the model itself\)"),
    ],
)
def test_a_path_without_blocks_is_refused_with_the_lists_that_there_are(model: nn.Module, path: str, message: str):
    with pytest.raises(ValueError, match=message):
        find_blocks(model, path, key="k")
