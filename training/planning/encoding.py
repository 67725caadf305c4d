"""Plans the encoding of captioned pictures, before the first step: the bytes and the time of text encoders and VAE.

They run without weights: so the calls of the network are known too, with which the plan of a step then goes on.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn

from models.pipelines.calls import NetworkCall
from models.pipelines.latents import decoding, encoded
from models.pipelines.opening import encoders_of, open_pipeline
from models.pipelines.recording import CPU, Asked, NotTrainableError, Recorder
from models.pipelines.videos import check_frames
from models.pipelines.without_values import EncoderForward, answering, parts_without_values
from models.quiet_imports import without_remarks
from offload import Mode, Resident
from offload.knobs import GIB, format_bytes
from offload.planning import dry_run_forwards
from training.config.construct import make_mode
from training.config.modes import weights_node
from training.data.captioned.dataset import Captioned, Missing
from training.errors import UserError, as_user_error, first_line
from training.planning.machine import Machine
from training.profiling.hardware import rss_gib
from training.settle.components import Components
from training.tasks.pipeline_samples import sample_size

TEXTS, VAE = "text encoders", "VAE"
# Among the parts of a pipeline.
VAE_PART = "vae"
# As in diffusers' training scripts for SDXL and SD3: bfloat16 is 1% off, in latents that are made once.
ENCODED_IN = torch.float32
# Mean and standard deviation of each latent, in float32.
LATENT_BYTES = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToEncode:
    """What no run has encoded yet: pictures and captions of `dataset`, and `prompts` of samples."""

    dataset: Captioned
    missing: Missing
    prompts: tuple[str, ...]

    @classmethod
    def of(cls, dataset: object, config: DictConfig) -> ToEncode | None:
        """Returns what `dataset` lacks; None if that is nothing, or it has no captions.

        Raises UserError if the run evaluates, and no picture is held out.
        """
        if not isinstance(dataset, Captioned):
            return None
        if config.eval.every is not None and not dataset.holds_out:
            raise UserError(
                f"eval.every={config.eval.every}: no picture is held out: give a larger dataset.eval_share (it is"
                f" {config.dataset.eval_share}), or eval.every=null"
            )
        wanted = config.sample.prompts or () if config.sample.every is not None else ()
        prompts = tuple(prompt for prompt in wanted if dataset.encoded.prompt_of(prompt) is None)
        missing = dataset.missing()
        return cls(dataset, missing, prompts) if missing or prompts else None

    def calls(self, recorder: Recorder) -> Iterator[tuple[tuple[int, int], NetworkCall]]:
        """Asks for the call of the network for each size of pictures, with the longest caption. As `NetworkCall.of`."""
        longest = max((asked.prompts[0] for asked in self.missing.captions.values()), key=len, default="")
        for size in self.missing.sizes:
            yield size, NetworkCall.of(recorder, size, longest)

    @property
    def texts(self) -> int:
        """How many texts the text encoders get."""
        return len({asked.prompts for asked in self.missing.captions.values()}) + len(self.prompts)

    def __str__(self) -> str:
        return f"{len(self.missing.pictures)} pictures and {self.texts} texts"


@dataclass(frozen=True)
class PlannedEncoding:
    """The encoding of `what`. `device_bytes` are those at the peak of each part, of which one is there at a time.

    `host_bytes` are all of the process, `loaded_bytes` of these the weights, which are read before the `seconds`;
    `kept_bytes` stay on the disk. `slots` is the key of the slots where text encoders stream; else None.
    """

    what: str
    device_bytes: dict[str, int]
    host_bytes: int
    loaded_bytes: int
    kept_bytes: int
    seconds: float
    slots: str | None

    @property
    def totals(self) -> dict[str, int]:
        """The bytes that each budget limits."""
        return {"vram_budget": max(self.device_bytes.values()), "host_budget": self.host_bytes}

    def advice(self, budget: str) -> str:
        """Returns what lowers the bytes that `budget` limits, in words."""
        elsewhere = "encode where there is more (steps=1), and copy ~/.cache/lightering/encoded"
        if budget == "host_budget":
            return elsewhere
        if self.device_bytes[VAE] > self.device_bytes[TEXTS]:
            return f"a smaller dataset.size, or {elsewhere}"
        return f"{'offload=layer_stream' if self.slots is None else f'fewer {self.slots}'}, or {elsewhere}"

    @property
    def summary(self) -> str:
        """All of it in a line."""
        loaded, kept = format_bytes(self.loaded_bytes), format_bytes(self.kept_bytes)
        return f"{self.what}: about {self.seconds:,.1f} s once {loaded} are read, {kept} on the disk"

    def rows(self, device: str, on_device: str, on_host: str) -> dict[str, str]:
        """Returns rows of a plan: values by label. The texts say of the bytes at the peak whether they fit."""
        return {
            "encoding": self.summary,
            **{f"encoding: {device}: {part}": format_bytes(nbytes) for part, nbytes in self.device_bytes.items()},
            f"encoding: {device}: at its peak": on_device,
            "encoding: host: in all": on_host,
        }


@contextmanager
def planned_encoding(
    dataset: object, components: Components, machine: Machine, has_gpu: bool
) -> Iterator[PlannedEncoding | None]:
    """Plans the encoding of what `dataset` lacks, and has the calls of the network known inside the block.

    Yields None where nothing is to be encoded, and for a pipeline that needs values.
    """
    todo, found = ToEncode.of(dataset, components.config), None
    if todo is not None:
        try:
            found = _planned(todo, components, machine, has_gpu)
        except UserError:
            raise
        except Exception as error:  # a part may fail in any way on tensors without values, and yet run on real ones
            if components.config.plan and isinstance(error, NotTrainableError):
                raise UserError(f"model.source={components.model.folder}: {error}") from error
            logger.warning("the encoding of pictures cannot be planned: %s", first_line(error))
            logger.debug("no plan of the encoding", exc_info=error)
    if found is None:
        yield None
        return
    plan, calls = found
    with dataset.encoded.planned(calls):
        yield plan


def decoding_bytes(components: Components, has_gpu: bool) -> int:
    """Returns the bytes of the VAE and its activations while it decodes a sample; 0 where it needs values to run."""
    try:
        parts = parts_without_values(components.model.folder, components.dtype, (VAE_PART,))
        vae, size = parts[VAE_PART], sample_size(components.config)
        run = dry_run_forwards(Resident(), vae, [decoding(vae, size)], on_gpu=has_gpu)
    except Exception as error:  # a part may fail in any way on tensors without values, and yet run on real ones
        logger.debug("no plan of a sample's decoding", exc_info=error)
        return 0
    return run.peak_bytes + sum(tensor.nbytes for tensor in (*vae.parameters(), *vae.buffers()))


def opened(components: Components, **options: Any) -> Any:
    """Returns the run's pipeline, as `open_pipeline` does, with its VAE in ENCODED_IN.

    Raises UserError for one that cannot be used.
    """
    model = components.model
    with as_user_error(f"model.source={model.folder}: "):
        pipeline = open_pipeline(model.folder, model.network, components.dtype, vae_dtype=ENCODED_IN, **options)
        if frames := components.config.dataset.get("frames"):
            check_frames(pipeline, frames)
    return pipeline


def encoder_mode(module: nn.Module, config: DictConfig) -> Mode:
    """Returns the run's mode where it can stream `module`, which is frozen; else one that keeps it on the device."""
    config = copy.deepcopy(config)
    _, knobs = weights_node(config)
    # Others were chosen for the network's units, and its files.
    knobs.update({name: value for name, value in {"resident": 0, "source": "memory"}.items() if name in knobs})
    mode = make_mode(config.offload)
    # Other systems take only what trains.
    if mode.foreign:
        return Resident()
    try:
        mode.footprint(module)
    except ValueError:
        # It has no blocks.
        return Resident()
    return mode


@dataclass(frozen=True)
class _Part:
    """Modules that are on the device together: bytes of weights that stay there, of slots and activations; and ms."""

    resident_bytes: int
    moving_bytes: int
    ms: float
    streams: bool

    @classmethod
    def of(
        cls,
        components: Components,
        machine: Machine,
        has_gpu: bool,
        forwards: Mapping[nn.Module, Sequence[Callable[[], object]]],
    ) -> _Part:
        """Runs the `forwards` of each module without values. `ms`: of the longest one of each, for one example."""
        footprints, peak, ms = [], 0, 0.0
        for module, calls in forwards.items():
            mode, longest = encoder_mode(module, components.config), 0.0
            footprints.append(mode.footprint(module))
            for call in calls:
                timed = machine.simulated(components.dtype)
                # The second of two finds on the device what the first has left there.
                found = dry_run_forwards(mode, module, [call] * 2, timed=timed, on_gpu=has_gpu)
                peak = max(peak, found.peak_bytes)
                if not isinstance(call, EncoderForward) or len(call.tokens) == 1:
                    longest = max(longest, found.ms / 2)
            ms += longest
        slots = sum(footprint.slot_bytes for footprint in footprints)
        resident = sum(footprint.resident_bytes for footprint in footprints)
        return cls(resident, slots + peak, ms, any(footprint.units for footprint in footprints))


def _planned(
    todo: ToEncode, components: Components, machine: Machine, has_gpu: bool
) -> tuple[PlannedEncoding, list[NetworkCall]]:
    model, missing = components.model, todo.missing
    parts = parts_without_values(model.folder, components.dtype, vae_dtype=ENCODED_IN)
    pipeline = opened(components, parts=parts)
    texts, vae = encoders_of(pipeline, model.network)
    recorder, size = Recorder(pipeline, model.network, CPU), sample_size(components.config)
    # A run makes them.
    with without_remarks(), answering(texts) as forwards:
        calls = [call for _, call in todo.calls(recorder)]
        for prompt in todo.prompts:
            recorder.encoded(Asked((prompt,), size, size))
    latents_of = {call.size: torch.Size(call.noise).numel() for call in calls}
    largest = max(calls, key=lambda call: latents_of[call.size], default=None)
    encode = []
    if missing.pictures:
        encode.append(lambda: encoded(vae, torch.empty(3, *largest.size, device="meta"), largest.noise))
    part_of = partial(_Part.of, components, machine, has_gpu)
    text = part_of({encoder: [each for each in forwards if each.encoder is encoder] for encoder in texts})
    parts = {TEXTS: text, VAE: part_of({vae: encode})}
    kept, pictures = 0, 0.0
    if largest is not None:
        latents = sum(latents_of[picture.size] for picture, _ in missing.pictures.values())
        pictures = latents / latents_of[largest.size]
        conditions = sum(tensor.nbytes for tensor in largest.meta_conditions(1).values())
        kept = LATENT_BYTES * latents + len(missing.captions) * conditions
    weights = sum(tensor.nbytes for part in (*texts, vae) for tensor in (*part.parameters(), *part.buffers()))
    plan = PlannedEncoding(
        what=str(todo),
        device_bytes={name: part.resident_bytes + part.moving_bytes for name, part in parts.items()},
        # What is on the device was on the host before; without a GPU it stays there.
        host_bytes=weights + int(rss_gib() * GIB) + (0 if has_gpu else max(p.moving_bytes for p in parts.values())),
        loaded_bytes=weights,
        kept_bytes=kept,
        seconds=(todo.texts * text.ms + pictures * parts[VAE].ms) / 1e3,
        slots=f"{weights_node(components.config)[0]}.slots" if text.streams else None,
    )
    return plan, calls
