"""Pictures with captions: found, cut and mirrored as by hand, with masks; what is refused."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from PIL import Image

from training.data.captioned.pictures import (
    CaptionedPicture,
    bucket_sizes,
    content_key,
    cropped,
    find_pictures,
    folders_of,
    nearest_bucket,
)
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
        ("sub/e.jfif", r"of a kind that is not read: save it as \.png, or move it out of the folder"),
    ],
)
def test_videos_and_pictures_that_are_not_read_are_refused(tmp_path: Path, name: str, advice: str) -> None:
    save(tmp_path / "sub" / "z.png", drawn(64, 64))
    (tmp_path / name).write_bytes(b"")
    (tmp_path / name).with_suffix(".txt").write_text("a caption")
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


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    for name in ("cats", "dogs", "kohya/10_cat", "cats/old"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "repeats"),
    [
        ("ROOT/cats", {"cats": 1}),
        ("[ROOT/dogs,ROOT/cats]", {"dogs": 1, "cats": 1}),
        ("{ROOT/dogs:1,ROOT/cats:3}", {"dogs": 1, "cats": 3}),
        ("{ROOT/kohya/10_cat:10}", {"kohya/10_cat": 10}),
        ("{ROOT/kohya:1}", {"kohya": 1}),
    ],
)
def test_what_a_command_line_gives(folders: Path, given: str, repeats: dict[str, int]) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"dataset.folder={given.replace('ROOT', str(folders))}"])
    found = folders_of(override.value())
    assert list(found.items()) == [(folders / name, count) for name, count in repeats.items()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ROOT/birds", r"dataset\.folder=.*birds: no such folder"),
        ("", r"dataset\.folder=: no such folder"),
        ([], r"dataset\.folder is empty: give dataset\.folder=DIR, \[DIR, DIR\] or \{DIR: repeats\}$"),
        ({}, r"dataset\.folder is empty"),
        (None, r"dataset\.folder=None: must be DIR, \[DIR, DIR\] or \{DIR: repeats\}$"),
        ([3], r"dataset\.folder=\[3\]: must be DIR"),
        ({"ROOT/cats": 0}, r"dataset\.folder=\{.*cats: 0\}: repeats must be a whole number of at least 1$"),
        ({"ROOT/cats": 1.5}, r"dataset\.folder=\{.*cats: 1\.5\}: repeats must be"),
        ({"ROOT/cats": True}, r"dataset\.folder=\{.*cats: True\}: repeats must be"),
        (["ROOT/cats", "ROOT/cats"], r"dataset\.folder: .*cats and .*cats have the same pictures"),
        (["ROOT/cats/old", "ROOT/cats"], r"dataset\.folder: .*cats and .*old have the same pictures"),
        (["ROOT/cats", "ROOT/cats/old"], r"dataset\.folder: .*old and .*cats have the same pictures"),
        ("ROOT/kohya", r".*kohya: 10_cat is a name with repeats, .*\{ROOT/kohya/10_cat: 10\} .* or \{ROOT/kohya: 1\}"),
        (["ROOT/kohya/10_cat"], r".*: 10_cat is a name with repeats, which are not read: .*\{ROOT/kohya/10_cat: 10\}"),
    ],
)
def test_other_values_are_refused(folders: Path, given: object, message: str) -> None:
    def rooted(value: object) -> object:
        if isinstance(value, dict):
            return {rooted(name): count for name, count in value.items()}
        if isinstance(value, list):
            return [rooted(name) for name in value]
        return value.replace("ROOT", str(folders)) if isinstance(value, str) else value

    with pytest.raises(UserError, match=f"^{message.replace('ROOT', str(folders))}"):
        folders_of(rooted(given))


def kohyas(largest_area: int, smallest: int, largest: int, step: int) -> set[tuple[int, int]]:
    """The sizes of `make_bucket_resolutions` of kohya's scripts, which follow NovelAI's description."""
    sizes = {(math.isqrt(largest_area) // step * step,) * 2}
    for side in range(smallest, largest + 1, step):
        other = min(largest, largest_area // side // step * step)
        sizes |= {(side, other), (other, side)}
    return sizes


@pytest.mark.parametrize("size", [512, 1024])
@pytest.mark.parametrize("multiple", [8, 16, 32, 64])
def test_sizes_are_kohyas_at_their_limits(size: int, multiple: int) -> None:
    step = max(multiple, size // 16)
    assert set(bucket_sizes(size, multiple)) == kohyas(size**2, size // 2, 2 * size, step)


def test_at_1024_all_but_the_smaller_of_two_sizes_are_sdxls() -> None:
    sizes = bucket_sizes(1024, 8)
    # Of the table in appendix I of the SDXL paper.
    for pair in [
        (512, 2048),
        (512, 1856),
        (576, 1792),
        (640, 1536),
        (704, 1408),
        (768, 1344),
        (832, 1216),
        (896, 1152),
    ]:
        assert pair in sizes
        assert pair[::-1] in sizes
    assert (1024, 1024) in sizes


@pytest.mark.parametrize(
    ("size", "multiple"), [(16, 16), (17, 16), (64, 16), (100, 8), (1000, 8), (768, 28), (2048, 32)]
)
def test_sides_are_multiples_and_no_size_has_more_pixels(size: int, multiple: int) -> None:
    sizes = bucket_sizes(size, multiple)
    assert (size // multiple * multiple,) * 2 in sizes
    assert {(width, height) for height, width in sizes} == set(sizes)
    for height, width in sizes:
        assert height * width <= size**2
        assert height % multiple == width % multiple == 0
        assert min(height, width) > 0


@pytest.mark.parametrize("size", [15, 0, 8193])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"^dataset.size={size}: must be at least 16, .* at most 8192 pixels$"):
        bucket_sizes(size, 16)


def test_the_nearest_bucket_keeps_most_of_a_picture() -> None:
    sizes = bucket_sizes(512, 64)

    def kept(height: int, width: int, size: tuple[int, int]) -> float:
        scale = max(size[0] / height, size[1] / width)
        return size[0] * size[1] / (height * width * scale**2)

    for height, width in [(100, 100), (300, 200), (1080, 1920), (4000, 300), (511, 513), (7, 5)]:
        nearest = nearest_bucket(height, width, sizes)
        assert kept(height, width, nearest) == pytest.approx(max(kept(height, width, size) for size in sizes))
        assert nearest_bucket(width, height, sizes) == nearest[::-1]


def test_of_sizes_that_keep_as_much_the_largest_is_taken() -> None:
    assert nearest_bucket(10, 10, [(64, 64), (512, 512), (128, 128)]) == (512, 512)
