"""Encodes captioned pictures once: text encoders and VAE run under the run's own mode, and leave before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import interpolate

from models.pipelines.calls import NetworkCall
from models.pipelines.latents import check_normalisation, encoded
from models.pipelines.model import PipelineModel
from models.pipelines.opening import encoders_of, open_pipeline
from models.pipelines.recording import Recorder
from models.pipelines.sampling import encoded_prompt
from models.pipelines.videos import check_frames
from offload import Mode, Resident, Streams
from training.data.captioned.dataset import LATENTS, MASK, Captioned, Missing
from training.errors import UserError, as_user_error
from training.metrics.progress import phase
from training.settle.components import Components, acquired
from training.tasks.pipeline_samples import sample_size


def encode_missing(dataset: object, components: Components) -> None:
    """Encodes what `dataset` has, if it is one of captioned pictures, and no run has encoded before.

    Raises UserError for a pipeline that cannot be used, MemoryError where an encoder does not fit.
    """
    if not isinstance(dataset, Captioned):
        return
    model = components.model
    if not isinstance(model, PipelineModel):
        raise UserError("dataset=captioned: take model=pipeline model.source=SOURCE, a whole pipeline")
    wanted = components.config.sample.prompts or () if components.config.sample.every is not None else ()
    prompts = [prompt for prompt in wanted if dataset.encoded.prompt_of(prompt) is None]
    if (missing := dataset.missing()) or prompts:
        with as_user_error(f"model.source={model.folder}: "), acquired(components.device) as streams:
            pipeline = open_pipeline(model.folder, model.network, components.dtype)
            if frames := components.config.dataset.frames:
                check_frames(pipeline, frames)
            _encode(dataset, missing, prompts, components, pipeline, streams)


def _encode(
    dataset: Captioned,
    missing: Missing,
    prompts: Sequence[str],
    components: Components,
    pipeline: Any,
    streams: Streams,
) -> None:
    network, kept = components.model.network, dataset.encoded
    texts, vae = encoders_of(pipeline, network)
    recorder, calls = Recorder(pipeline, network, components.device), {}
    with _placed(texts, components.mode, streams):
        for size in missing.sizes:
            calls[size] = NetworkCall.of(recorder, size)
            check_normalisation(recorder, vae, size)
            # First: a later run looks for pictures, and not for this.
            kept.write_call(calls[size])
        with phase(f"encoding {len(missing.captions)} captions"):
            for key, asked in missing.captions.items():
                kept.write(key, calls[asked.size].conditions(recorder.record(asked)))
        for prompt in prompts:
            kept.write_prompt(prompt, encoded_prompt(recorder, prompt, sample_size(components.config)))
    with _placed([vae], components.mode, streams), phase(f"encoding {len(missing.pictures)} pictures"):
        for key, (picture, flip) in missing.pictures.items():
            cropped = dataset.cropped(picture, flip)
            latents = encoded(vae, cropped.pixels.to(components.device), calls[picture.size].noise)
            tensors = {LATENTS: latents}
            if cropped.mask is not None:
                tensors[MASK] = interpolate(cropped.mask[None], size=latents.shape[-2:], mode="area")[0, 0]
            kept.write(key, tensors)


@contextmanager
def _placed(modules: Sequence[nn.Module], mode: Mode, streams: Streams) -> Iterator[None]:
    """Has `modules` under `mode` where that can stream them, else on the device, for forwards without gradients."""
    # Other systems take only what trains.
    mode = Resident() if mode.foreign else mode
    with ExitStack() as stack:
        for module in modules:
            module.requires_grad_(False).eval()
            try:
                attached = mode.attach(module, streams)
            except ValueError:
                # It has no blocks, as a VAE of convolutions.
                attached = Resident().attach(module, streams)
            stack.callback(attached.detach)
            stack.enter_context(attached.inference())
        with torch.no_grad():
            yield
