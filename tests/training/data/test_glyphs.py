"""Glyphs: letters that can be told apart, the same in every process, and a digest of all of them."""

import numpy as np
import pytest
import torch

from training.data import glyphs
from training.data.glyphs import CHARACTERS, FONTS, Glyphs
from training.errors import UserError

SIZES = {"seed": 0, "batch_size": 8}


def test_batches_have_images_and_labels() -> None:
    batch = Glyphs(size=20, **SIZES).batch(0)
    assert batch["images"].shape == (8, 1, 20, 20)
    assert batch["images"].dtype == torch.float32
    assert batch["labels"].dtype == torch.int64
    assert batch["images"].min() == -1
    assert 0.8 < batch["images"].amax(dim=(1, 2, 3)).min() <= 1
    assert len(CHARACTERS) == 62


@pytest.mark.parametrize("labels", [True, False])
def test_meta_batches_are_alike(labels: bool) -> None:
    dataset = Glyphs(size=20, labels=labels, **SIZES)
    real = dataset.batch(0)
    assert ("labels" in real) == labels == (dataset.num_classes is not None)
    meta = Glyphs.meta_batch(8, characters=CHARACTERS, size=20, labels=labels, count=10, variation=1.0, eval_share=0.0)
    assert {k: (v.shape, v.dtype) for k, v in real.items()} == {k: (v.shape, v.dtype) for k, v in meta.items()}
    assert all(tensor.is_meta for tensor in meta.values())


def test_an_example_is_the_same_for_every_seed_and_epoch() -> None:
    one, other = (Glyphs(count=16, seed=seed, batch_size=16, eval_share=0) for seed in (0, 1))
    assert not torch.equal(one.batch(0)["labels"], one.batch(1)["labels"])
    drawn = [
        dict(zip(batch["labels"].tolist(), batch["images"], strict=True))
        for batch in (one.batch(0), one.batch(1), other.batch(0))
    ]
    for label in range(16):
        assert torch.equal(drawn[0][label], drawn[1][label])
        assert torch.equal(drawn[0][label], drawn[2][label])


def test_letters_can_be_told_apart() -> None:
    # Without variation, the nearest mean image is nearly always that of the same letter.
    dataset = Glyphs("AEIOUxz79", count=900, variation=0, seed=0, batch_size=400)
    train, test = dataset.batch(0), dataset.batch(1)
    means = torch.stack([train["images"][train["labels"] == label].mean(0) for label in range(9)])
    nearest = torch.cdist(test["images"].flatten(1), means.flatten(1)).argmin(1)
    assert (nearest == test["labels"]).float().mean() > 0.8


def test_glyphs_are_in_the_middle() -> None:
    for font in FONTS:
        ink = glyphs._drawn(font, "H", 32).astype(float)
        rows, columns = np.nonzero(ink > 128)
        assert abs(rows.min() + rows.max() - 63) <= 2
        assert abs(columns.min() + columns.max() - 63) <= 2


def test_variations_move_scale_and_turn() -> None:
    still, moved = (Glyphs("H", count=400, variation=v, seed=0, batch_size=100, eval_share=0) for v in (0, 1))
    assert len({image.numpy().tobytes() for image in still.batch(0)["images"]}) <= len(FONTS)
    images = moved.batch(0)["images"]
    assert len({image.numpy().tobytes() for image in images}) == 100
    ink = images[:, 0] > 0
    assert len({int(rows.nonzero().min()) for rows in ink.any(2)}) > 2
    assert len({int(columns.nonzero().min()) for columns in ink.any(1)}) > 2


def test_the_digest_tells_what_is_drawn(monkeypatch) -> None:
    options = {"characters": "AB", "count": 10, "size": 16, **SIZES}
    changes = ({}, {"characters": "BA"}, {"size": 17}, {"count": 11}, {"variation": 0.5})
    digests = {Glyphs(**options | change).data_sha256 for change in changes}
    assert len(digests) == 5
    assert Glyphs(**options | {"seed": 9, "batch_size": 3}).data_sha256 in digests
    monkeypatch.setattr(glyphs, "FONTS", (FONTS[1], FONTS[0], *FONTS[2:]))
    assert Glyphs(**options).data_sha256 not in digests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"characters": ""}, "dataset.characters='': must be"),
        ({"characters": "ABA"}, "dataset.characters='ABA': must be characters that differ"),
        ({"characters": "A\N{SNOWMAN}"}, "dataset.characters: '\N{SNOWMAN}' is not in the font"),
        ({"size": 4}, "dataset.size=4: must be at least 8 and at most 256"),
        ({"variation": 5.0}, "dataset.variation=5.0: must be"),
    ],
)
def test_values_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        Glyphs(**options, **SIZES)


def test_a_font_that_is_not_there_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(glyphs, "FONTS", ("missing.ttf",))
    with pytest.raises(UserError, match=r"^dataset=glyphs: there is no font .*missing\.ttf: install matplotlib again"):
        Glyphs("A", **SIZES)
