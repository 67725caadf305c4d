"""Pictures with captions: found, cut and mirrored as by hand, with masks; what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from training.data.captioned.pictures import CaptionedPicture, content_key, cropped, find_pictures
from training.errors import UserError

PLAIN = {"flip": False, "ground": "white", "alpha_mask": False}


def drawn(width: int, height: int, mode: str = "RGB") -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    levels = np.random.default_rng(width).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(levels.squeeze())


def save(path: Path, image: Image.Image, caption: str | None = "a picture", **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)


def found_in(folder: Path, size: int = 64, multiple: int = 16) -> list[CaptionedPicture]:
    return find_pictures({folder: 1}, size=size, multiple=multiple)


def test_pictures_are_found_folder_by_folder_in_the_order_of_paths(tmp_path: Path) -> None:
    save(tmp_path / "z" / "b.png", drawn(100, 100), "square")
    save(tmp_path / "z" / "a.jpg", drawn(200, 50), "wide")
    save(tmp_path / "y" / "sub" / "c.webp", drawn(30, 60), "")
    save(tmp_path / "z" / "b-mask.png", Image.new("L", (100, 100), 9), None)
    (tmp_path / "z" / ".trash.png").write_bytes(b"")
    found = find_pictures({tmp_path / "z": 2, tmp_path / "y": 1}, size=64, multiple=16)
    z, y = tmp_path / "z", tmp_path / "y"
    assert found == [
        CaptionedPicture(z / "a.jpg", "wide", 2, (32, 128), (50, 200), None),
        CaptionedPicture(z / "b.png", "square", 2, (64, 64), (100, 100), z / "b-mask.png"),
        CaptionedPicture(y / "sub" / "c.webp", "", 1, (80, 48), (60, 30), None),
    ]


def test_a_picture_on_its_side_goes_to_the_bucket_of_its_upright_shape(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    save(tmp_path / "a.jpg", drawn(200, 50), exif=exif)
    (picture,) = found_in(tmp_path)
    assert (picture.size, picture.original_size) == ((128, 32), (200, 50))
    assert cropped(picture, **PLAIN).pixels.shape == (3, 128, 32)


def as_pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()).float() / 127.5 - 1


@pytest.mark.parametrize(
    ("shape", "resized", "box"),
    [
        ((201, 101), (127, 64), (0, 0, 0, 0)),
        ((150, 90), (107, 64), (0, 0, 0, 0)),
        ((100, 100), (64, 64), (0, 0, 64, 64)),
        ((70, 64), (70, 64), (3, 0, 67, 64)),
        ((31, 33), (64, 68), (0, 2, 64, 66)),
    ],
)
def test_the_middle_of_the_resized_picture_is_cut(
    tmp_path: Path, shape: tuple[int, int], resized: tuple[int, int], box: tuple[int, int, int, int]
) -> None:
    image = drawn(*shape)
    save(tmp_path / "a.png", image)
    (picture,) = found_in(tmp_path)
    tall, wide = picture.size
    if picture.size != (64, 64):
        # By hand in floating point: the scale with which the picture covers the bucket.
        scale = max(wide / shape[0], tall / shape[1])
        resized = round(shape[0] * scale), round(shape[1] * scale)
        left, top = (resized[0] - wide) // 2, (resized[1] - tall) // 2
        box = left, top, left + wide, top + tall
    result = cropped(picture, **PLAIN)
    assert torch.allclose(
        result.pixels, as_pixels(image.resize(resized, Image.Resampling.BICUBIC).crop(box)), atol=1e-6
    )
    assert (result.pixels.dtype, result.mask, result.crop) == (torch.float32, None, (box[1], box[0]))
    mirrored = cropped(picture, **PLAIN | {"flip": True})
    assert torch.equal(mirrored.pixels, result.pixels.flip(-1))
    assert mirrored.crop == (box[1], resized[0] - box[2])


def test_a_cut_at_random_depends_on_its_integers_alone(tmp_path: Path) -> None:
    image = drawn(90, 64)
    save(tmp_path / "a.png", image)
    picture = replace(found_in(tmp_path)[0], size=(64, 64))
    cuts = [cropped(picture, **PLAIN, variation=(0, epoch)) for epoch in range(30)]
    assert {each.crop[0] for each in cuts} == {0}
    assert 10 < len({each.crop[1] for each in cuts}) <= 27
    for each in cuts[:3]:
        left = each.crop[1]
        assert torch.allclose(each.pixels, as_pixels(image.crop((left, 0, left + 64, 64))), atol=1e-6)
    again = cropped(picture, **PLAIN, variation=(0, 7))
    assert (again.crop, again.pixels.tolist()) == (cuts[7].crop, cuts[7].pixels.tolist())


def test_alpha_and_files_are_masks_that_are_cut_like_the_picture(tmp_path: Path) -> None:
    image, grey = drawn(70, 64, "RGBA"), drawn(70, 64, "L")
    save(tmp_path / "a.png", image)
    save(tmp_path / "a-mask.png", grey, None)
    (with_file,) = found_in(tmp_path)
    without_file = replace(with_file, mask_path=None)
    box = (3, 0, 67, 64)
    alpha, levels = (np.asarray(each.crop(box)) / 255 for each in (image.getchannel("A"), grey))
    seen = {}
    for picture, alpha_mask, expected in [
        (without_file, True, alpha), (with_file, False, levels), (with_file, True, alpha * levels)
    ]:  # fmt: skip
        result = cropped(picture, flip=False, ground="white", alpha_mask=alpha_mask)
        assert (result.mask.shape, result.mask.dtype) == ((1, 64, 64), torch.float32)
        assert np.allclose(result.mask[0], expected, atol=1e-6)
        mirrored = cropped(picture, flip=True, ground="white", alpha_mask=alpha_mask)
        assert torch.equal(mirrored.mask, result.mask.flip(-1))
        seen[alpha_mask] = result.pixels
    # The picture lies on the ground either way.
    assert torch.equal(seen[True], seen[False])
    assert cropped(without_file, **PLAIN).mask is None


def test_an_opaque_picture_has_no_alpha_for_a_mask(tmp_path: Path) -> None:
    save(tmp_path / "a.png", drawn(64, 64))
    assert cropped(found_in(tmp_path)[0], **PLAIN | {"alpha_mask": True}).mask is None


def test_a_transparent_picture_lies_on_the_ground(tmp_path: Path) -> None:
    save(tmp_path / "a.png", Image.new("RGBA", (64, 64), (255, 0, 0, 0)))
    (picture,) = found_in(tmp_path)
    assert cropped(picture, **PLAIN).pixels.unique().tolist() == [1.0]
    assert cropped(picture, **PLAIN | {"ground": "black"}).pixels.unique().tolist() == [-1.0]
    with pytest.raises(UserError, match=r"^dataset: the mask of .*a\.png leaves nothing to train on: "):
        cropped(picture, **PLAIN | {"alpha_mask": True})


def test_keys_depend_on_contents_and_options_and_not_on_paths(tmp_path: Path) -> None:
    save(tmp_path / "one" / "a.png", drawn(64, 64))
    save(tmp_path / "one" / "a-mask.png", drawn(64, 64, "L"), None)
    (picture,) = found_in(tmp_path / "one")
    key = content_key(picture, flip=False, ground="white")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    (moved,) = found_in(tmp_path / "two")
    assert content_key(moved, ground="white", flip=False) == key
    assert content_key(replace(picture, repeats=5), flip=False, ground="white") == key
    others = {
        content_key(picture, flip=True, ground="white"),
        content_key(replace(picture, caption="another"), flip=False, ground="white"),
        content_key(replace(picture, size=(32, 128)), flip=False, ground="white"),
        content_key(replace(picture, mask_path=None), flip=False, ground="white"),
    }
    drawn(63, 64, "L").resize((64, 64)).save(tmp_path / "two" / "a-mask.png")
    others.add(content_key(moved, flip=False, ground="white"))
    drawn(63, 64).resize((64, 64)).save(tmp_path / "two" / "a.png")
    others.add(content_key(moved, flip=False, ground="white"))
    assert len(others - {key}) == 6
    moved.path.unlink()
    with pytest.raises(UserError, match=r"^dataset: cannot use the picture .*a\.png: no such file"):
        content_key(moved)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("a.mp4", r"a video: give dataset\.frames=N, .*; or move it out of the folder"),
        ("sub/b.WEBM", r"a video: give dataset\.frames=N"),
        ("c.heic", r"of a kind that is not read: save it as \.png"),
    ],
)
def test_videos_and_pictures_that_are_not_read_are_refused(tmp_path: Path, name: str, advice: str) -> None:
    save(tmp_path / "sub" / "z.png", drawn(64, 64))
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=rf"^dataset\.folder=.*: {name} is {advice}"):
        found_in(tmp_path)


def test_folders_without_pictures_or_captions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^dataset\.folder=.*: no pictures in it; they end in \.png"):
        found_in(tmp_path)
    save(tmp_path / "a.png", drawn(64, 64))
    save(tmp_path / "b.png", drawn(64, 64), None)
    # A mask without its picture is a picture.
    save(tmp_path / "c-mask.png", drawn(64, 64), None)
    with pytest.raises(UserError, match=r"2 of 3 pictures have no caption, the first is b\.png"):
        found_in(tmp_path)


def test_damaged_pictures_and_masks_are_named(tmp_path: Path) -> None:
    save(tmp_path / "a.png", drawn(64, 64))
    (picture,) = found_in(tmp_path)
    drawn(64, 60).save(picture.path)
    with pytest.raises(UserError, match=r"^dataset: .*a\.png has changed since the run began: start again$"):
        cropped(picture, **PLAIN)
    save(tmp_path / "a-mask.png", drawn(64, 64, "L"), None)
    with pytest.raises(UserError, match=r"^dataset: the mask .*a-mask\.png has 64 x 64 pixels, its picture 64 x 60: "):
        found_in(tmp_path)
    drawn(64, 60, "LA").save(tmp_path / "a-mask.png")
    with pytest.raises(UserError, match=r"^dataset: the mask .*a-mask\.png is transparent: save it in grey, white to"):
        cropped(found_in(tmp_path)[0], **PLAIN)
    (tmp_path / "a.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"^dataset: cannot use the picture .*a\.png: it has no known format; repair"):
        found_in(tmp_path)
