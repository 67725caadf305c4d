"""Random images, labels and conditions: shapes, and that they depend on seed and index alone."""

import pytest
import torch

from training.data.synthetic_images import SyntheticImages
from training.errors import UserError

LATENTS = {"shape": [4, 8, 6], "num_classes": 5, "condition": {"encoder_hidden_states": [7, 3], "pooled": [2]}}
SIZES = {"seed": 0, "batch_size": 3}


def alike(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_batches_have_the_shapes_asked_for() -> None:
    dataset = SyntheticImages(**LATENTS, **SIZES)
    batch = dataset.batch(0)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == {
        "images": (3, 4, 8, 6),
        "encoder_hidden_states": (3, 7, 3),
        "pooled": (3, 2),
        "labels": (3,),
    }
    assert all(tensor.dtype == torch.float32 for name, tensor in batch.items() if name != "labels")
    labels = torch.cat([dataset.batch(index)["labels"] for index in range(50)])
    assert labels.unique().tolist() == [0, 1, 2, 3, 4]
    assert (dataset.num_blocks, dataset.num_classes) == (None, 5)


def test_images_alone() -> None:
    dataset = SyntheticImages([3, 16, 16], **SIZES)
    images = torch.cat([dataset.batch(index)["images"] for index in range(10)])
    assert list(dataset.batch(0)) == ["images"]
    assert images.mean().item() == pytest.approx(0, abs=0.03)
    assert images.std().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("options", [LATENTS, {}, {"shape": [128, 2, 4, 4]}])
def test_meta_batches_are_alike(options: dict) -> None:
    real, meta = SyntheticImages(**options, **SIZES).batch(0), SyntheticImages.meta_batch(3, **options, extra=1)
    assert {k: (v.shape, v.dtype) for k, v in real.items()} == {k: (v.shape, v.dtype) for k, v in meta.items()}
    assert all(tensor.is_meta for tensor in meta.values())


def test_batches_depend_on_seed_and_index_alone() -> None:
    dataset = SyntheticImages(**LATENTS, **SIZES)
    fifth = dataset.batch(5)
    dataset.batch(0)
    assert alike(fifth, dataset.batch(5))
    assert not torch.equal(fifth["images"], dataset.batch(4)["images"])
    assert not torch.equal(fifth["images"], SyntheticImages(**LATENTS, seed=1, batch_size=3).batch(5)["images"])
    held_out = dataset.eval_batches(6)
    assert len(held_out) == 6
    assert not torch.equal(held_out[5]["images"], fifth["images"])
    assert alike(held_out[5], dataset.eval_batches(6)[5])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": []}, r"dataset\.shape=\[\]: must be whole numbers"),
        ({"shape": [3, 0]}, r"dataset\.shape=\[3, 0\]: must be whole numbers of at least 1"),
        ({"condition": {"text": [2.5]}}, r"dataset\.condition\.text=\[2\.5\]: must be whole"),
        ({"condition": {"text": 2}}, r"dataset\.condition\.text=2: must be whole numbers of at least 1, in a list"),
        ({"condition": [2]}, r"dataset\.condition=\[2\]: must be shapes by name"),
        ({"condition": {"labels": [2]}}, r"dataset\.condition\.labels: the batch has labels already"),
        ({"num_classes": 0}, r"dataset\.num_classes=0: must be at least 1, or null"),
    ],
)
def test_shapes_without_numbers_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        SyntheticImages(**options, **SIZES)
