"""What a pipeline calls its network with is recorded, without a look at the network's weights."""

from __future__ import annotations

import diffusers
import pytest
import torch

from models.pipelines.recording import (
    REMEMBERED,
    Asked,
    NotTrainableError,
    Recorder,
    digits_needed,
    digits_of,
    places_in,
)
from tests.models.helpers.tiny_pipelines import clip, clip_tokenizer, made, network_of, t5, t5_tokenizer, vae

CPU = torch.device("cpu")


def recorder_of(name: str) -> Recorder:
    pipeline = made(name)
    return Recorder(pipeline, network_of(pipeline).to("meta"), CPU)


def test_a_record_has_the_call_the_steps_and_the_answer():
    record = recorder_of("flux").record(Asked(("a cube", "two"), (32, 64)))
    assert record.noise == (2, 4, 16, 32)
    assert record.arguments["hidden_states"].shape == (2, 8 * 16, 16)
    assert record.arguments["encoder_hidden_states"].shape == (2, 512, 32)
    assert record.predicted.shape == record.sample.shape == (2, 8 * 16, 16)
    assert record.steps[0] == 1000
    assert [time[0].item() for time in record.times] == pytest.approx([step / 1000 for step in record.steps])


def test_captions_are_encoded_once():
    recorder = recorder_of("sd3")
    first = recorder.record(Asked(("a cube",), (32, 32)))
    encoder = recorder._pipeline.text_encoder
    with torch.no_grad():
        encoder.text_model.final_layer_norm.weight.zero_()
    again = recorder.record(Asked(("a cube",), (32, 64)))
    assert torch.equal(again.arguments["encoder_hidden_states"], first.arguments["encoder_hidden_states"])
    for number in range(20):
        other = recorder.record(Asked((f"a ball {number}",), (32, 32)))
    assert len(recorder._encoded) == REMEMBERED
    assert not torch.equal(other.arguments["encoder_hidden_states"], first.arguments["encoder_hidden_states"])


def test_the_pipeline_is_as_before():
    pipeline = made("sdxl")
    recorder = Recorder(pipeline, pipeline.unet.to("meta"), CPU)
    step, encode = pipeline.scheduler.step, pipeline.encode_prompt
    recorder.record(Asked(("",), (32, 32)))
    assert pipeline.scheduler.step == step
    assert pipeline.encode_prompt == encode
    assert "forward" not in vars(pipeline.unet)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 14.6])
def test_digits_tell_places_after_a_scheduler_has_scaled_them(dtype: torch.dtype, factor: float):
    shape, order = (1, 5, 40, 41), torch.randperm(5 * 40 * 41)
    count = digits_needed(shape)
    assert count == 3
    found = [(digits_of(shape, digit).flatten(1)[:, order] * factor).to(dtype) for digit in range(count)]
    places, scale = places_in(found, len(order))
    assert torch.equal(places, order)
    assert scale == pytest.approx(factor, rel=1e-2)
    assert places_in([each[:, 1:] for each in found], len(order)) is None
    assert places_in([torch.zeros_like(each) for each in found], len(order)) is None


def test_a_pipeline_that_needs_an_image_is_refused():
    pipeline = made("wan")
    kind = type(pipeline)
    own = {"__module__": kind.__module__, "__call__": lambda self, image, prompt=None, **others: None}
    pipeline.__class__ = type("FromImage", (kind,), own)
    with pytest.raises(NotTrainableError, match=r"^FromImage needs image beside its prompt: none can be given$"):
        Recorder(pipeline, pipeline.transformer, CPU)


def test_what_a_pipeline_raises_is_told_in_a_line():
    """As pipelines of inpainting and of controlnets do, whose image is None by default."""
    pipeline = made("sd3")
    recorder = Recorder(pipeline, pipeline.transformer, CPU)
    pipeline.check_inputs = lambda *_, **__: len(None)
    with pytest.raises(
        ValueError, match=r"^StableDiffusion3Pipeline, called with prompt, .* alone, ends in TypeError: object of type"
    ):
        recorder.record(Asked(("",), (32, 32)))


def test_a_network_that_learns_a_variance_may_not_tell_its_channels():
    """As of HunyuanDiT."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2, "num_layers": 2}
    text = {"cross_attention_dim": 32, "cross_attention_dim_t5": 32, "pooled_projection_dim": 16}
    network = diffusers.HunyuanDiT2DModel(**sizes, **text, hidden_size=16).to("meta")
    pipeline = diffusers.HunyuanDiTPipeline(
        vae(), clip(), clip_tokenizer(), network, diffusers.DDPMScheduler(prediction_type="v_prediction"), None, None,
        requires_safety_checker=False, text_encoder_2=t5(), tokenizer_2=t5_tokenizer(),
    )  # fmt: skip
    record = Recorder(pipeline, network, CPU).record(Asked(("a cube",), (32, 64)))
    assert record.predicted.shape == record.noise == (1, 4, 16, 32)


def test_a_network_may_be_asked_for_its_sample():
    """As by the pipelines of Kandinsky 5."""
    recorder = recorder_of("flux")
    recorder._network.register_forward_hook(lambda network, given, output: (output.sample,))
    assert recorder.record(Asked(("",), (32, 32))).predicted.shape == (1, 8 * 8, 16)


def test_a_pipeline_that_does_not_step_is_refused():
    pipeline = made("sd3")
    recorder = Recorder(pipeline, pipeline.transformer, CPU)
    pipeline.scheduler.set_timesteps = lambda *_, **__: None
    pipeline.scheduler.timesteps = torch.tensor([])
    with pytest.raises(NotTrainableError, match="StableDiffusion3Pipeline does not draw noise, call"):
        recorder.record(Asked(("",), (32, 32)))
