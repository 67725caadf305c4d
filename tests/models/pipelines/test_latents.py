"""Latents are normalised as the pipeline expects them: decoded by it, they are the VAE's again."""

from __future__ import annotations

from unittest.mock import Mock

import diffusers
import pytest
import torch

from models.pipelines.latents import check_normalisation, encoded
from models.pipelines.recording import Asked, NotTrainableError, Recorder
from tests.models.helpers.tiny_pipelines import PIPELINES, made, network_of

SIZE = (32, 64)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, SIZE) for name in (*PIPELINES, "krea_2")),
        *((name, (9, *SIZE)) for name in ("wan", "ltx", "sana_video", "cogvideox")),
    ],
)
def test_the_pipeline_decodes_what_was_encoded(name: str, size: tuple[int, ...]):
    pipeline = made(name)
    recorder = Recorder(pipeline, network_of(pipeline).to("meta"), torch.device("cpu"))
    check_normalisation(recorder, pipeline.vae, size)
    noise = recorder.record(Asked(("",), size, size)).noise[1:]
    mean, std = encoded(pipeline.vae, torch.rand(3, *size) * 2 - 1, noise)
    assert mean.shape == noise
    assert (std > 0).all()


@torch.no_grad()
def test_frames_of_cogvideox_are_before_channels():
    """As in diffusers' train_cogvideox_lora.py."""
    vae, video = made("cogvideox").vae, torch.rand(3, 9, *SIZE) * 2 - 1
    theirs = vae.encode(video[None]).latent_dist.mean[0].permute(1, 0, 2, 3) * vae.config.scaling_factor
    mean, _ = encoded(vae, video, (3, 4, 4, 8))
    torch.testing.assert_close(mean, theirs)


# The second as Kandinsky 5 decodes with the VAE of Flux: without its shift.
@pytest.mark.parametrize("factor", [2, 1 / 1.5])
def test_an_unknown_normalisation_is_refused(factor: float):
    pipeline = made("sd3")
    recorder = Recorder(pipeline, pipeline.transformer.to("meta"), torch.device("cpu"))
    decode = pipeline.vae.decode
    recorder.decoded = lambda asked, latents, vae: factor * latents(torch.empty(1, 4, 16, 32))
    with pytest.raises(NotTrainableError, match="normalises the latents of AutoencoderKL in an unknown way"):
        check_normalisation(recorder, pipeline.vae, SIZE)
    assert pipeline.vae.decode == decode


def test_a_vae_of_another_size_is_refused():
    pipeline = made("sd3")
    with pytest.raises(NotTrainableError, match=r"makes latents \[4, 16, 32\], and the network takes \[4, 8, 8\]"):
        encoded(pipeline.vae, torch.zeros(3, *SIZE), (4, 8, 8))


def test_a_vae_that_encodes_nothing_is_refused(monkeypatch: pytest.MonkeyPatch):
    vae = made("sd3").vae
    # As that of Allegro.
    monkeypatch.setattr(vae, "encode", Mock(side_effect=NotImplementedError("not without tiling")))
    with pytest.raises(NotTrainableError, match=r"^AutoencoderKL: not without tiling$"):
        encoded(vae, torch.zeros(3, *SIZE), (4, 16, 32))


def test_latents_without_a_distribution_are_taken_as_they_are():
    channels = {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8)}
    blocks = {"num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}
    vae, pixels = diffusers.AutoencoderTiny(**channels, **blocks), torch.rand(3, *SIZE)
    mean, std = encoded(vae, pixels, (4, 16, 32))
    assert torch.equal(mean[None], vae.encode(pixels[None]).latents)
    assert not std.any()
