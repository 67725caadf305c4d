"""The blocks of a model: those of the list at the path that was given, or of all its lists."""

import pytest
from torch import nn

from offload.blocks import find_blocks, outside_blocks


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


def test_all_lists_together_are_the_blocks():
    """Encoder and decoder, the towers of a model of text and images, two kinds of blocks."""
    tower = Model(layers=nn.ModuleList(layers(2)))
    model = Model(
        text=tower, vision=Model(encoder=Model(blocks=nn.ModuleList(layers(1)))), single=nn.ModuleList(layers(2))
    )
    assert names(model) == ["text.layers.0", "text.layers.1", "vision.encoder.blocks.0", "single.0", "single.1"]


def test_lists_inside_blocks_are_not_blocks():
    """The experts of a layer are such a list."""
    model = Model(layers=nn.ModuleList(Model(experts=nn.ModuleList(layers(4))) for _ in range(9)))
    assert names(model) == [f"layers.{index}" for index in range(9)]


def test_large_stages_are_taken_apart():
    """In a U-Net one stage may be half of the model, and a block should be a small part of it."""
    stages = [Model(resnets=nn.ModuleList(layers(1))), Model(resnets=nn.ModuleList(layers(9)), norm=nn.LayerNorm(4))]
    assert names(Model(stages=nn.ModuleList(stages))) == ["stages.0", *(f"stages.1.resnets.{k}" for k in range(9))]


def test_a_large_block_with_most_of_its_weights_outside_of_lists_is_one_block():
    block = Model(heads=nn.ModuleList(layers(2)), wide=nn.Linear(8, 8))
    assert names(Model(blocks=nn.ModuleList([block]))) == ["blocks.0"]


def test_nobody_calls_a_list_in_a_list():
    rows = nn.ModuleList(nn.ModuleList(layers(1, width=2)) for _ in range(3))
    assert names(Model(rows=rows)) == ["rows.0.0", "rows.1.0", "rows.2.0"]


def test_small_lists_and_parametrisations_are_not_blocks():
    head = nn.utils.parametrizations.weight_norm(nn.Linear(40, 40))
    model = Model(layers=nn.ModuleList(layers(3, width=40)), upsamplers=nn.ModuleList(layers(1)), head=head)
    assert names(model) == ["layers.0", "layers.1", "layers.2"]


def test_a_module_of_two_lists_is_in_one_block():
    shared = nn.Linear(4, 4)
    model = Model(first=nn.ModuleList([shared, *layers(1)]), second=nn.ModuleList([Model(inner=shared), *layers(1)]))
    assert names(model) == ["first.0", "first.1", "second.1"]


def test_blocks_may_have_a_small_module_in_common():
    for common in (nn.GELU(), nn.Linear(2, 2)):
        model = Model(blocks=nn.ModuleList(Model(layer=layer, common=common) for layer in layers(3)))
        assert names(model) == ["blocks.0", "blocks.1", "blocks.2"]
    model = Model(blocks=nn.ModuleList(Model(layer=layer, common=layers(1)[0]) for layer in layers(1) * 3))
    assert names(model) == ["blocks.0"]


def test_without_a_module_list_the_largest_sequential_has_the_blocks():
    model = Model(first=nn.Sequential(*layers(1)), second=nn.Sequential(*layers(2)))
    assert names(model) == ["second.0", "second.1"]
    assert names(Model(blocks=nn.ModuleList(layers(1, width=2)), rest=nn.Sequential(*layers(9)))) == ["blocks.0"]


def test_small_lists_are_blocks_where_there_is_nothing_else():
    model = Model(embedding=nn.Embedding(10_000, 4), blocks=nn.ModuleList(layers(2)))
    assert names(model) == ["blocks.0", "blocks.1"]
    model.rest = nn.Sequential(*layers(3))
    assert names(model) == ["rest.0", "rest.1", "rest.2"]


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


def test_outside_the_blocks_are_the_owners_of_other_parameters():
    stem = nn.Sequential(*layers(1))
    model = Model(layers=nn.ModuleList(layers(2)), stem=stem, empty=nn.ReLU(), head=nn.Linear(4, 4))
    blocks = [block for _, block in find_blocks(model)]
    assert [name for name, _ in outside_blocks(model, blocks)] == ["stem.0", "head"]
    model.scale = nn.Parameter(nn.Linear(4, 4).bias)
    assert next(iter(outside_blocks(model, blocks))) == ("Model", model)
