"""Frames of videos: which are taken, at which rate, and what is refused in one line."""

import builtins
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.bitstream import BitStreamFilterContext
from diffusers.video_processor import VideoProcessor
from PIL import Image

from tests.training.helpers.videos import drawn_frames, write_video
from training.data.captioned.pictures import content_key, cropped, find_pictures
from training.data.captioned.videos import frames_of, is_video, size_and_count
from training.errors import UserError

PLAIN = {"flip": False, "ground": "white", "alpha_mask": False}


def levels(frames: Any) -> np.ndarray:
    return np.stack([np.asarray(frame) for frame in frames])


@pytest.mark.parametrize(
    ("name", "codec", "pixels", "rounding"),
    [
        ("a.mkv", "ffv1", "bgr0", 0),
        ("a.mp4", "libx264rgb", "rgb24", 40),
        ("a.mov", "libx264", "yuv444p", 40),
        ("a.webm", "libvpx-vp9", "yuv444p", 40),
    ],
)
def test_each_format_has_its_frames_in_their_order(
    tmp_path: Path, name: str, codec: str, pixels: str, rounding: int
) -> None:
    frames = drawn_frames(7)
    write_video(tmp_path / name, frames, codec=codec, pixels=pixels)
    assert is_video(tmp_path / name)
    assert size_and_count(tmp_path / name, None) == ((48, 96), 7)
    found = levels(frames_of(tmp_path / name, 5, None)).astype(int)
    assert found.shape == (5, 48, 96, 3)
    assert np.abs(found - levels(frames[:5])).mean() <= rounding / 4
    apart = np.abs(found[:, None] - levels(frames)[None]).mean((2, 3, 4))
    assert apart.argmin(1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("fps", "places", "count"),
    [(5, [0, 2, 4, 6], 5), (10, [0, 1, 2, 3], 9), (15, [0, 1, 1, 2], 13), (3, [0, 3, 7], 3), (25, [0, 0, 1, 1], 21)],
)
def test_another_rate_takes_the_nearest_frames(tmp_path: Path, fps: float, places: list[int], count: int) -> None:
    write_video(tmp_path / "a.mkv", drawn_frames(9), rate=10)
    own = list(frames_of(tmp_path / "a.mkv", 9, None))
    assert size_and_count(tmp_path / "a.mkv", fps)[1] == count
    found = levels(frames_of(tmp_path / "a.mkv", len(places), fps))
    assert (found == levels([own[place] for place in places])).all()


def test_pixels_are_those_of_diffusers_video_processor(tmp_path: Path) -> None:
    frames = drawn_frames(5, 64, 64)
    write_video(tmp_path / "a.mkv", frames)
    (tmp_path / "a.txt").write_text("a")
    (video,) = find_pictures({tmp_path: 1}, size=64, multiple=16, frames=5)
    assert (video.size, video.original_size) == ((5, 64, 64), (64, 64))
    expected = VideoProcessor().preprocess_video(frames, height=64, width=64)[0]
    found = cropped(video, **PLAIN).pixels
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-7)
    assert torch.equal(cropped(video, **{**PLAIN, "flip": True}).pixels, found.flip(-1))


def test_each_frame_is_cut_as_a_picture_is(tmp_path: Path) -> None:
    frames = drawn_frames(3, 100, 40)
    write_video(tmp_path / "clip.mkv", frames)
    Image.new("L", (100, 40), 255).save(tmp_path / "clip-mask.png")
    for number, frame in enumerate(frames):
        frame.save(tmp_path / f"{number}.png")
    for name in ("clip", "0", "1", "2"):
        (tmp_path / f"{name}.txt").write_text(name)
    *pictures, video = find_pictures({tmp_path: 1}, size=64, multiple=16, frames=3)
    assert video.size == (3, *pictures[0].size)
    found = cropped(video, **PLAIN)
    assert torch.equal(found.pixels, torch.stack([cropped(each, **PLAIN).pixels for each in pictures], dim=1))
    assert found.mask.shape == (1, *video.size[1:])
    # What decides the latents is in the key.
    assert len({content_key(video, fps=fps) for fps in (None, 16.0, 25.0)}) == 3


def test_a_gif_of_one_picture_is_a_picture(tmp_path: Path) -> None:
    drawn_frames(1, 64, 64)[0].save(tmp_path / "still.gif")
    (tmp_path / "still.txt").write_text("")
    (found,) = find_pictures({tmp_path: 1}, size=64, multiple=16, frames=3)
    assert found.size == (64, 64)


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png"])
def test_moving_pictures_are_refused_as_videos(tmp_path: Path, name: str) -> None:
    first, second = (Image.new("RGB", (64, 64), colour) for colour in ("red", "blue"))
    first.save(tmp_path / name)
    assert not is_video(tmp_path / name)
    first.save(tmp_path / name, save_all=True, append_images=[second])
    with pytest.raises(UserError, match=rf"{name} is a moving picture, .* not read: save it as \.mp4"):
        is_video(tmp_path / name)


@pytest.mark.parametrize(
    ("frames", "fps", "message"),
    [
        (None, None, r"dataset\.folder=.*: a\.mkv is a video: give dataset\.frames=N, how many are taken of each"),
        (9, None, r"dataset\.frames=9: 2 videos below .* have fewer, the first is a\.mkv with 5: take fewer frames"),
        (5, 16.0, None),
        (5, 4.0, r"dataset\.frames=5: 2 videos below .* have fewer, the first is a\.mkv with 3: take fewer frames"),
    ],
)
def test_short_videos_are_counted(tmp_path: Path, frames: int | None, fps: float | None, message: str | None) -> None:
    for name in ("a.mkv", "b.mkv"):
        write_video(tmp_path / name, drawn_frames(5))
        (tmp_path / name).with_suffix(".txt").write_text("")
    if message is None:
        assert len(find_pictures({tmp_path: 1}, size=64, multiple=16, frames=frames, fps=fps)) == 2
        return
    with pytest.raises(UserError, match=f"^{message}"):
        find_pictures({tmp_path: 1}, size=64, multiple=16, frames=frames, fps=fps)


@pytest.mark.parametrize(("angle", "lit"), [(90, "bottom"), (270, "top"), (180, "right")])
def test_a_video_that_lies_on_its_side_is_set_upright(tmp_path: Path, angle: int, lit: str) -> None:
    picture = Image.new("RGB", (96, 48))
    picture.paste("white", (0, 0, 24, 48))
    with av.open(str(tmp_path / "a.ts"), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 48, "yuv444p"
        # Anticlockwise (ITU-T H.264, D.2.27).
        turned = BitStreamFilterContext(f"h264_metadata=display_orientation=insert:rotate={angle}", stream)
        for packet in (*stream.encode(av.VideoFrame.from_image(picture)), *stream.encode(), None):
            container.mux(turned.filter(packet))
    assert size_and_count(tmp_path / "a.ts", None) == ((48, 96) if angle == 180 else (96, 48), 1)
    (frame,) = frames_of(tmp_path / "a.ts", 1, None)
    width, height = frame.size
    across, down = width // 2, height // 2
    ends = {"left": (4, down), "right": (width - 4, down), "top": (across, 4), "bottom": (across, height - 4)}
    assert [name for name, place in ends.items() if frame.getpixel(place)[0] > 128] == [lit]


@pytest.mark.parametrize("curve", [1, 16, 18])
def test_light_of_hdr_is_refused(tmp_path: Path, curve: int) -> None:
    """A telephone records HLG (18), which would be trained on as grey pictures; BT.709 (1) is taken."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        stream.codec_context.color_trc = curve
        container.mux([*stream.encode(av.VideoFrame.from_image(Image.new("RGB", (64, 64)))), *stream.encode()])
    if curve == 1:
        assert size_and_count(tmp_path / "a.mp4", None) == ((64, 64), 1)
        return
    with pytest.raises(UserError, match=r"the video .*a\.mp4: its light is that of HDR: convert it to SDR; repair or"):
        size_and_count(tmp_path / "a.mp4", None)


def test_damaged_videos_and_a_missing_library_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.mp4").write_bytes(b"no video")
    with pytest.raises(UserError, match=r"^dataset: cannot use the video .*a\.mp4: .*; repair or remove") as refusal:
        size_and_count(tmp_path / "a.mp4", None)
    assert "\n" not in str(refusal.value)
    write_video(tmp_path / "b.mkv", drawn_frames(2))
    with pytest.raises(UserError, match=r"the video .*b\.mkv has fewer than 3 frames"):
        list(frames_of(tmp_path / "b.mkv", 4, None))
    imports = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "av":
            raise ImportError(name)
        return imports(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"^dataset: the video .*b\.mkv is read by PyAV: pip install av$"):
        size_and_count(tmp_path / "b.mkv", None)
