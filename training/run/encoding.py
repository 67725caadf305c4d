"""Encodes captioned pictures once: text encoders and VAE run under the run's own mode, and leave before training."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils._pytree import tree_leaves

from models.pipelines.calls import PROBE
from models.pipelines.latents import check_normalisation, encoded
from models.pipelines.opening import encoders_of
from models.pipelines.recording import Asked, Recorder
from models.pipelines.sampling import encoded_prompt
from models.quiet_imports import remarks_collected
from offload import Streams
from training.data.captioned.dataset import LATENTS, MASK
from training.errors import as_user_error
from training.metrics.progress import phase
from training.planning.encoding import PlannedEncoding, ToEncode, encoder_mode, opened
from training.runs.files import LOG_FILE
from training.settle.components import Components, acquired
from training.tasks.pipeline_samples import sample_size

logger = logging.getLogger(__name__)


def encode_missing(dataset: object, components: Components, plan: PlannedEncoding | None = None) -> None:
    """Encodes the pictures and captions that no run has encoded yet, and prints the time beside that of `plan`.

    Raises UserError for a picture, text or pipeline that cannot be used, and MemoryError.
    """
    todo = ToEncode.of(dataset, components.config)
    if todo is None:
        return
    opening = perf_counter()
    with phase("reading the encoders"):
        pipeline = opened(components)
    start = perf_counter()
    with as_user_error(f"model.source={components.model.folder}: "), acquired(components.device) as streams:
        _encode(todo, components, pipeline, streams)
    planned = "" if plan is None else f" (planned {plan.seconds:,.1f} s)"
    print(f"encoded {todo} in {perf_counter() - start:,.1f} s{planned}, read the encoders in {start - opening:,.1f} s")


def _encode(todo: ToEncode, components: Components, pipeline: Any, streams: Streams) -> None:
    network, dataset, missing, kept = components.model.network, todo.dataset, todo.missing, todo.dataset.encoded
    texts, vae = encoders_of(pipeline, network)
    recorder, calls = Recorder(pipeline, network, components.device), {}
    with _placed(texts, components.config, streams):
        with remarks_collected() as asked_for:
            for size, call in todo.calls(recorder):
                calls[size] = call
                check_normalisation(recorder, vae, size)
                # Before the pictures: a later run that finds all pictures does not look for the call.
                kept.write_call(call)
        captions, size = [asked.prompts[0] for asked in missing.captions.values()], sample_size(components.config)
        # These remarks are about the longer of the probe and the longest caption; those about the probe are left out.
        if not any(len(caption) > len(PROBE) for caption in captions):
            asked_for = []
        asked_for += [*_cut_silently(captions, size, recorder), *_cut_silently(todo.prompts, size, recorder)]
        with phase(f"encoding {len(missing.captions)} captions"), _cut_off_told(asked_for):
            for key, asked in missing.captions.items():
                kept.write(key, calls[asked.size].conditions(recorder.record(asked)))
            for prompt in todo.prompts:
                kept.write_prompt(prompt, encoded_prompt(recorder, prompt, size))
    with _placed([vae], components.config, streams), phase(f"encoding {len(missing.pictures)} pictures"):
        for key, (picture, view) in missing.pictures.items():
            cropped = dataset.cropped(picture, view)
            latents = encoded(vae, cropped.pixels.to(components.device), calls[picture.size].noise)
            tensors = {LATENTS: latents}
            if cropped.mask is not None:
                tensors[MASK] = interpolate(cropped.mask[None], size=latents.shape[-2:], mode="area")[0, 0]
            kept.write(key, tensors)


def _cut_silently(texts: Sequence[str], size: tuple[int, int], recorder: Recorder) -> list[str]:
    """Returns a remark if more text behind the longest changes nothing: many pipelines (Wan, Qwen-Image) cut so."""
    longest = max(texts, key=len, default="")
    if len(longest) <= len(PROBE):
        return []
    with remarks_collected():
        asked = (Asked((text,), size, size) for text in (longest, f"{longest} {PROBE}"))
        own, other = (tree_leaves(recorder.encoded(each)) for each in asked)
    pairs = [pair for pair in zip(own, other, strict=True) if isinstance(pair[0], Tensor)]
    return [f"truncated, and perhaps others: {longest}"] if all(torch.equal(*pair) for pair in pairs) else []


def encode_prompts(prompts: Sequence[str], components: Components) -> None:
    """Encodes those of `prompts` that no run has encoded before, without any picture. Raises as `encode_missing`."""
    model, kept = components.model, components.model.encoded()
    missing = [prompt for prompt in prompts if kept.prompt_of(prompt) is None]
    if not missing:
        return
    pipeline = opened(components)
    with as_user_error(f"model.source={model.folder}: "), acquired(components.device) as streams:
        recorder, size = Recorder(pipeline, model.network, components.device), sample_size(components.config)
        with _placed(encoders_of(pipeline, model.network)[0], components.config, streams):
            remarks = _cut_silently(missing, size, recorder)
            with _cut_off_told(remarks):
                for prompt in missing:
                    kept.write_prompt(prompt, encoded_prompt(recorder, prompt, size))


@contextmanager
def _cut_off_told(before: Sequence[str] = ()) -> Iterator[None]:
    """Warns once if an encoder has cut off texts in the block; the library's remarks on each go to the log file.

    `before` are remarks from before the block, which count too.
    """
    with remarks_collected() as found:
        yield
    remarks = [*before, *found]
    for remark in remarks:
        # Goes to the log file only.
        logging.info("%s", remark)
    if any("truncated" in remark for remark in remarks):
        logger.warning("texts are longer than a text encoder takes, and are cut off there: %s has which", LOG_FILE)


@contextmanager
def _placed(modules: Sequence[nn.Module], config: DictConfig, streams: Streams) -> Iterator[None]:
    """Has `modules` under their `encoder_mode`, for forwards without gradients."""
    with ExitStack() as stack:
        for module in modules:
            module.requires_grad_(False).eval()
            attached = encoder_mode(module, config).attach(module, streams)
            stack.callback(attached.detach)
            stack.enter_context(attached.inference())
        with torch.no_grad():
            yield
