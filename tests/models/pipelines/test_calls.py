"""A network is called as its pipeline calls it: the same arguments, and the same meaning of its output."""

from __future__ import annotations

import inspect
import io
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models.pipelines.calls import NetworkCall
from models.pipelines.recording import Asked, Recorder
from tests.models.helpers.tiny_pipelines import PIPELINES, ltx_condition, made, mochi, network_of

SIZE, CAPTIONS = (32, 64), ("a cube", "a big red cube, with a hat")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, SIZE) for name in (*PIPELINES, "krea_2", "pag", "kontext", "longcat")),
        *((name, (9, *SIZE)) for name in ("wan", "ltx", "cogvideox")),
    ],
)
def test_the_network_gets_what_its_pipeline_gives_it(name: str, size: tuple[int, ...]):
    """In one step from noise of our own; the scheduler then gets what `prediction` returns."""
    pipeline = made(name)
    network = network_of(pipeline)
    recorder = Recorder(pipeline, network, torch.device("cpu"))
    call = NetworkCall.of(recorder, size)
    count = 2 * torch.Size(call.noise).numel()
    # No two are alike: their order tells their places.
    noise = torch.linspace(-2, 2, count)[torch.randperm(count)].view(2, *call.noise)
    examples = [call.conditions(recorder.record(Asked((caption,), size, size))) for caption in CAPTIONS]
    seen: dict[str, object] = {}
    step, forward = pipeline.scheduler.step, network.forward

    def stepping(predicted: Tensor, number: Tensor, sample: Tensor, *_: object, **__: object):
        if "number" not in seen:
            seen.update(predicted=predicted, number=number, sample=sample)
        return step(predicted, number, sample, return_dict=False)

    def calling(*arguments: object, **keywords: object):
        first = forward(*arguments, **keywords)
        seen.setdefault("arguments", (arguments, keywords))
        return first

    module = type(pipeline).__mro__[1].__module__
    with (
        torch.no_grad(),
        patch.object(pipeline.scheduler, "step", stepping),
        patch.object(network, "forward", calling),
        patch(f"{module}.randn_tensor", lambda *_, **__: noise),
    ):
        # These call their network once where their guidance is 0.
        guidance = 0.0 if name in ("z_image", "krea_2") else 1.0
        pipeline(**recorder.given(Asked(CAPTIONS, size, size), steps=1, guidance=guidance, output_type="latent"))
        positional, keywords = seen["arguments"]
        theirs = inspect.signature(type(network).forward).bind(network, *positional, **keywords).arguments
        number = seen["number"].float().expand(2)
        # A scheduler of noise scales latents for the network.
        latents = theirs[call.latents]
        latents = torch.stack(latents) if isinstance(latents, list) else latents
        scaled = latents.reshape(2, -1)[:, call.places.argsort()].view(noise.shape)
        ours = call.filled(scaled, number, call.merged(examples))
        assert_alike(ours, {key: value for key, value in theirs.items() if key in ours})
        prediction = call.prediction(forward(**ours)[0], noise)
    sample = seen["sample"].reshape(2, -1)
    factor = sample.abs().max() / noise.abs().max()
    order = (sample / factor).sort().indices.argsort(), noise.reshape(2, -1).sort().indices
    in_their_order = prediction.reshape(2, -1).gather(1, order[1].gather(1, order[0]))
    torch.testing.assert_close(in_their_order, seen["predicted"].reshape(2, -1), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(("make", "counts_up"), [(mochi, True), (ltx_condition, False), (PIPELINES["wan"], False)])
def test_times_and_velocities_of_a_scheduler_are_turned_where_it_goes_the_other_way(make, counts_up: bool):
    """Euler's method from noise at 1000 to the image at 0 makes what the pipeline makes in two steps."""
    pipeline, size = make(), (1, *SIZE)
    recorder = Recorder(pipeline, pipeline.transformer, torch.device("cpu"))
    call, asked = NetworkCall.of(recorder, size), Asked(CAPTIONS[:1], size, size)
    batch = call.merged([call.conditions(recorder.record(asked))])
    points = noise = torch.randn(1, *call.noise)
    given = recorder.given(asked, steps=2, guidance=1.0, output_type="latent")
    with patch(f"{type(pipeline).__mro__[1].__module__}.randn_tensor", lambda *_, **__: noise):
        theirs, (first, second) = pipeline(**given)[0], pipeline.scheduler.timesteps.tolist()
    numbers = [1000 - first, 1000 - second, 0] if counts_up else [first, second, 0]
    for number, following in pairwise(numbers):
        output = pipeline.transformer(**call.filled(points, torch.tensor([number]), batch))[0]
        points = points + (following - number) / 1000 * call.prediction(output, points)
    assert (first < second) == counts_up
    torch.testing.assert_close(points, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [mochi, PIPELINES["wan"]])
def test_times_in_bfloat16_are_those_of_the_pipeline(make):
    pipeline, size = make().to(torch.bfloat16), (1, *SIZE)
    recorder = Recorder(pipeline, pipeline.transformer, torch.device("cpu"))
    call, record = NetworkCall.of(recorder, size), recorder.record(Asked(CAPTIONS[:1], size, size))
    batch, noisy = call.merged([call.conditions(record)]), torch.zeros(1, *call.noise)
    for step, time in zip(record.steps, record.times, strict=True):
        number = torch.tensor([1000 - step if record.inverted else step])
        assert torch.equal(call.filled(noisy, number, batch)[call.time], time)


def assert_alike(ours: object, theirs: object) -> None:
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            assert_alike(ours[key], value)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_alike(one, other)
    elif isinstance(theirs, Tensor):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(
            ours, theirs.expand(ours.shape) if theirs.ndim == 0 else theirs, rtol=1e-4, atol=1e-5
        )
    else:
        assert ours == theirs


def test_a_call_is_kept_and_read_again():
    pipeline = made("qwen_image")
    recorder = Recorder(pipeline, pipeline.transformer.to("meta"), torch.device("cpu"))
    call, content = NetworkCall.of(recorder, SIZE), io.BytesIO()
    torch.save(call.state(), content)
    content.seek(0)
    again = NetworkCall.from_state(torch.load(content, weights_only=True))
    for name, value in vars(call).items():
        found = getattr(again, name)
        assert torch.equal(found, value) if isinstance(value, Tensor) else repr(found) == repr(value), name


def test_captions_of_one_length_have_no_mask_and_others_have():
    pipeline = made("qwen_image")
    recorder = Recorder(pipeline, pipeline.transformer.to("meta"), torch.device("cpu"))
    call = NetworkCall.of(recorder, SIZE)
    short, long = (call.conditions(recorder.record(Asked((caption,), SIZE, SIZE))) for caption in CAPTIONS)
    assert call.merged([short, short]).keys() == {"encoder_hidden_states"}
    lengths = [each["encoder_hidden_states"].shape[1] for each in (short, long)]
    mask = call.merged([short, long])["encoder_hidden_states_mask"]
    assert mask.sum(1).tolist() == lengths


def test_captions_of_different_lengths_without_a_mask_are_refused():
    pipeline = made("sdxl")
    recorder = Recorder(pipeline, pipeline.unet.to("meta"), torch.device("cpu"))
    call = NetworkCall.of(recorder, SIZE)
    example = call.conditions(recorder.record(Asked(("",), SIZE, SIZE)))
    shorter = example | {"encoder_hidden_states": example["encoder_hidden_states"][:, :10]}
    with pytest.raises(ValueError, match="captions of different lengths are in a batch, and the network takes no mask"):
        call.merged([example, shorter])


def test_without_its_caption_a_picture_keeps_its_sizes():
    pipeline = made("sdxl")
    recorder = Recorder(pipeline, pipeline.unet.to("meta"), torch.device("cpu"))
    call = NetworkCall.of(recorder, SIZE)
    picture = call.conditions(recorder.record(Asked(("a cube",), SIZE, (400, 500), (3, 4))))
    empty = call.conditions(recorder.record(Asked(("",), SIZE, SIZE)))
    found = call.without_caption(picture, empty)
    sizes, text = "added_cond_kwargs.time_ids", "encoder_hidden_states"
    assert found[sizes].tolist() == [[400, 500, 3, 4, *SIZE]]
    assert torch.equal(found[text], empty[text])
    assert not torch.equal(found[text], picture[text])
    assert {name: tensor.shape for name, tensor in call.meta_conditions(3).items()} == {
        name: tensor.shape for name, tensor in call.merged([picture] * 3).items()
    }


def test_a_call_on_a_device_has_all_its_tensors_there():
    pipeline = made("flux")
    recorder = Recorder(pipeline, pipeline.transformer.to("meta"), torch.device("cpu"))
    call = NetworkCall.of(recorder, SIZE)
    meta = torch.device("meta")
    noisy, number = torch.empty(2, *call.noise, device=meta), torch.empty(2, device=meta)
    arguments = call.on(meta).filled(noisy, number, call.meta_conditions(2))
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    assert len(tensors) == 7
    assert all(tensor.is_meta for tensor in tensors)
    assert not call.places.is_meta
