"""Records with what a pipeline of diffusers calls its network, so that training calls it in the same way.

Pipelines differ in all that is around their network: how latents lie in its input, which masks, places and sizes go
with them, how times are counted, what the output stands for. So the pipeline's own call is run for two steps, with a
recorder in the place of the network. Its noise, and the recorder's answers, are digits: they show which element of the
latents lies where in the network's input, and which element of the output the scheduler takes for it. No weight of the
network is read and none of its layers is computed, so it may be on the meta device; text encoders run as they are.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map, tree_map_only

# Digits are told apart in bfloat16, also after a scheduler has multiplied them.
BASE = 64
# The names of a network's argument that has the time.
TIMES = ("timestep", "t")
# Prompts whose embeddings are kept, on the device: those of one record and of the next size.
REMEMBERED = 8
CPU = torch.device("cpu")


class NotTrainableError(ValueError):
    """A pipeline calls its network in a way that cannot be trained here."""


@dataclass(frozen=True)
class Asked:
    """Request to a pipeline: prompts, and the sizes of the picture that goes with each, (height, width).

    That of a video is (frames, height, width).
    """

    prompts: tuple[str, ...]
    size: tuple[int, ...]
    original_size: tuple[int, int] | None = None
    crop: tuple[int, int] = (0, 0)


@dataclass
class Record:
    """The calls of one run of a pipeline, with all tensors on the CPU.

    Attributes:
        arguments: those of the network's first call, by name; lists of a tensor for each example as one tensor.
        lists, time: the names of these, and of the argument that has the time.
        steps, times: the scheduler's numbers of both steps, and what the network got for them.
        noise: the shape in which the pipeline drew its noise.
        sample, predicted: the latents and the network's answer as the scheduler got them, in the first step.
        inverted: the scheduler counts from noise to image, and steps along the negative velocity (Mochi).
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    lists: tuple[str, ...] = ()
    time: str = ""
    steps: list[float] = field(default_factory=list)
    times: list[Tensor] = field(default_factory=list)
    noise: tuple[int, ...] | None = None
    sample: Tensor | None = None
    predicted: Tensor | None = None
    inverted: bool = False


class _EnoughError(Exception):
    """Ends the run of a pipeline."""


class _Answer(tuple):
    """The result of a network or of a scheduler's step, whichever way a pipeline takes it."""

    sample = prev_sample = property(lambda self: self[0])


class Recorder:
    """Records runs of `pipeline`, whose network is `network`: its transformer or UNet."""

    def __init__(self, pipeline: Any, network: nn.Module, device: torch.device):
        """`device` is that of the text encoders' inputs. The class of `pipeline` changes, so that it computes there."""
        kind = type(pipeline)
        pipeline.__class__ = type(kind.__name__, (kind,), {"_execution_device": property(lambda _: device)})
        for part in pipeline.components.values():
            if isinstance(part, nn.Module) and part is not network:
                # By this, diffusers knows where inputs go to a part whose weights are somewhere else.
                part._hf_hook = SimpleNamespace(execution_device=device)
        pipeline.set_progress_bar_config(disable=True)
        self._pipeline, self._network = pipeline, network
        self._module = sys.modules[kind.__module__]
        self._parameters = inspect.signature(kind.__call__).parameters
        self._forward = inspect.signature(type(network).forward)
        # Also of models that were taught a guidance: 1 is that of the data.
        self._guidance = 1.0
        # By prompts and guidance.
        self._encoded: dict[tuple[tuple[str, ...], float | None], list[Any]] = {}
        if not hasattr(self._module, "randn_tensor") or not hasattr(kind, "encode_prompt"):
            raise NotTrainableError(f"{kind.__name__} does not draw its noise and encode its prompts as others do")
        given = "self", "prompt"
        needed = [
            name
            for name, each in self._parameters.items()
            if each.default is each.empty and each.kind is not each.VAR_KEYWORD and name not in given
        ]
        if needed:
            raise NotTrainableError(f"{kind.__name__} needs {', '.join(needed)} beside its prompt: none can be given")

    @property
    def name(self) -> str:
        return type(self._pipeline).__name__

    def record(self, asked: Asked, digit: int = 0) -> Record:
        """Records a run whose noise is digit number `digit` of each element's place. Raises NotTrainableError.

        Prompts that were asked for before are not encoded again.
        """
        record = Record()
        self._run(
            asked,
            (self._module, "randn_tensor", functools.partial(self._draw, record, digit)),
            (self._network, "forward", functools.partial(self._call, record, digit)),
            (self._pipeline.scheduler, "step", functools.partial(self._step, record)),
            guidance=self._guidance,
        )
        if self._guidance and (
            record.predicted is None or len(next(iter(record.arguments.values()))) == 2 * len(asked.prompts)
        ):
            # Z-Image and Krea 2 call their network without a caption too, unless their guidance is 0.
            self._guidance = 0.0
            return self.record(asked, digit)
        if record.noise is None or record.predicted is None or len(record.times) < 2:
            raise NotTrainableError(f"{self.name} does not draw noise, call its network and step, one after the other")
        return record

    def record_digits(self, asked: Asked) -> list[Record]:
        """Returns a record for each digit that tells the elements of the latents apart. Raises as `record`."""
        first = self.record(asked)
        return [first, *(self.record(asked, digit) for digit in range(1, digits_needed(first.noise)))]

    def encoded(self, asked: Asked) -> list[Any]:
        """Returns what the pipeline's `encode_prompt` returns with its own guidance, in the order of its calls."""

        def enough(*_: Any, **__: Any) -> None:
            raise _EnoughError

        self._run(asked, (self._network, "forward", enough), guidance=None)
        return self._encoded[asked.prompts, None]

    def decoded(self, asked: Asked, latents: Callable[[Tensor], Tensor], vae: nn.Module) -> Tensor:
        """Returns what the pipeline gives its VAE to decode, where all steps end in `latents` of those that began."""
        found: list[Tensor] = []

        def decode(given: Tensor, *_: Any, **__: Any) -> None:
            found.append(given)
            raise _EnoughError

        def zeros(*arguments: Any, **keywords: Any) -> _Answer:
            return _Answer((tree_map(torch.zeros_like, [*arguments, *keywords.values()][0]),))

        def step(predicted: Tensor, number: Any, sample: Tensor, *_: Any, **__: Any) -> _Answer:
            return _Answer((latents(sample),))

        patches = (self._network, "forward", zeros), (self._pipeline.scheduler, "step", step), (vae, "decode", decode)
        self._run(asked, *patches, output_type="pt")
        if not found:
            raise NotTrainableError(f"{self.name} does not decode latents by its VAE")
        return found[0]

    def _run(
        self,
        asked: Asked,
        *patches: tuple[Any, str, Callable],
        guidance: float | None = 1.0,
        output_type: str = "latent",
    ) -> None:
        """Runs the pipeline with other methods in the place of its own, until one of them has enough.

        Raises ValueError for what pipelines raise that need an image, a package or another size.
        """
        with ExitStack() as stack:
            for target, name, new in patches:
                stack.enter_context(patch.object(target, name, new))
            stack.enter_context(self._encoding_once(asked.prompts, guidance))
            stack.enter_context(suppress(_EnoughError))
            given = self.given(asked, steps=2, guidance=guidance, output_type=output_type)
            try:
                with torch.no_grad():
                    self._pipeline(**given)
            except NotTrainableError:
                raise
            except (AttributeError, LookupError, NameError, TypeError, ValueError) as error:
                reason = f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0]}"
                raise ValueError(f"{self.name}, called with {', '.join(given)} alone, ends in {reason}") from error

    def given(self, asked: Asked, *, steps: int, guidance: float | None, **others: Any) -> dict[str, Any]:
        """Returns the arguments of the pipeline's call: those of these that it takes."""
        *frames, height, width = asked.size
        count = frames[0] if frames else 1
        values = {
            "prompt": list(asked.prompts),
            "height": height,
            "width": width,
            # By the names of most, of Sana and of Latte.
            "num_frames": count,
            "frames": count,
            "video_length": count,
            "num_inference_steps": steps,
            "guidance_scale": guidance,
            # Else PixArt and Flux Kontext would take another size than the picture's.
            "use_resolution_binning": False,
            "max_area": height * width,
            # Else the network of PAG pipelines is called for each picture twice, by attention of another kind.
            "pag_scale": 0.0,
            # Else the text encoder of LongCat-Image would write another prompt, at random, in the place of the caption.
            "enable_prompt_rewrite": False,
            "original_size": asked.original_size,
            "crops_coords_top_left": asked.crop,
            **others,
        }
        return {name: value for name, value in values.items() if name in self._parameters and value is not None}

    @contextmanager
    def _encoding_once(self, prompts: tuple[str, ...], guidance: float | None) -> Iterator[None]:
        """Gives the pipeline what it has encoded for these prompts before, in the order in which it asked."""
        encode, results = self._pipeline.encode_prompt, self._encoded.get((prompts, guidance))
        again, found = iter(results or ()), []

        def encode_prompt(*arguments: Any, **keywords: Any) -> Any:
            if results is None:
                found.append(encode(*arguments, **keywords))
                return found[-1]
            return next(again)

        with patch.object(self._pipeline, "encode_prompt", encode_prompt):
            yield
        if results is None:
            if len(self._encoded) == REMEMBERED:
                self._encoded.pop(next(iter(self._encoded)))
            self._encoded[prompts, guidance] = found

    def _draw(self, record: Record, digit: int, shape: Sequence[int], *_: Any, **options: Any) -> Tensor:
        if record.noise is not None:
            raise NotTrainableError(f"{self.name} draws noise more than once")
        record.noise = tuple(shape)
        return digits_of(shape, digit).to(options.get("device"))

    def _call(self, record: Record, digit: int, *arguments: Any, **keywords: Any) -> _Answer:
        bound = dict(self._forward.bind(self._network, *arguments, **keywords).arguments)
        bound.pop("self")
        for name in [name for name, kind in self._forward.parameters.items() if kind.kind is kind.VAR_KEYWORD]:
            bound.update(bound.pop(name, {}))
        first, record.time = next(iter(bound)), next((name for name in TIMES if name in bound), "")
        record.lists = tuple(name for name, value in bound.items() if _has_each(value, len(bound[first])))
        # Shorter captions are filled up with zeros.
        bound |= {name: pad_sequence(bound[name], batch_first=True) for name in record.lists}
        if not isinstance(bound[first], Tensor) or not isinstance(bound.get(record.time), Tensor):
            raise NotTrainableError(f"{self.name} calls its network with something else than a tensor and its timestep")
        record.times.append(bound[record.time].cpu())
        if len(record.times) == 2:
            raise _EnoughError
        record.arguments = moved(bound, CPU)
        shape = list(bound[first].shape)
        config = self._network.config
        made = config.get("out_channels")
        if config.get("learn_sigma") or (made and made == 2 * config["in_channels"]):
            # A variance is predicted, too.
            shape[1] *= 2
        # A call of the network has the latents of a batch, whose first example the digits are of.
        answer = digits_of(shape, digit).to(bound[first])
        return _Answer((list(answer) if first in record.lists else answer,))

    def _step(self, record: Record, predicted: Tensor, step: Any, sample: Tensor, *_: Any, **others: Any) -> _Answer:
        # With a time for each token, diffusers' scheduler takes a step along the negative velocity.
        by_token = others.get("per_token_timesteps") is not None
        record.predicted, record.sample = (-predicted if by_token else predicted).cpu(), sample.cpu()
        scheduler = self._pipeline.scheduler
        record.steps = [float(number) for number in scheduler.timesteps[:2]]
        record.inverted = bool(scheduler.config.get("invert_sigmas"))
        return _Answer((sample,))


def _has_each(value: Any, examples: int) -> bool:
    return isinstance(value, list) and len(value) == examples and all(isinstance(each, Tensor) for each in value)


def moved(value: Any, device: torch.device) -> Any:
    """Returns `value`, a tensor or containers of tensors, with all tensors on `device`."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def digits_of(shape: Sequence[int], digit: int) -> Tensor:
    """Returns digit number `digit`, to the base of `BASE`, of the place of each element in an example: float32."""
    one = torch.arange(int(torch.Size(shape[1:]).numel()))
    return (one // BASE**digit % BASE).float().view(1, *shape[1:]).repeat(shape[0], *[1] * (len(shape) - 1))


def places_in(found: Sequence[Tensor], count: int) -> tuple[Tensor, float] | None:
    """Returns the places that digits tell of the elements of an example, int64 [count], and their common factor.

    `found` has them digit by digit, each scaled by the same factor. None: they are not each of `count` places once.
    """
    if found[0][:1].numel() != count:
        return None
    largest = min(count, BASE) - 1
    first = found[0][0].double().flatten()
    factor = float(first[first.abs().argmax()]) / max(largest, 1)
    places = sum((digits[0].double().flatten() / factor).round().long() * BASE**n for n, digits in enumerate(found))
    return (places, factor) if torch.equal(places.sort().values, torch.arange(count)) else None


def digits_needed(shape: Sequence[int]) -> int:
    """Returns how many digits tell the elements of an example apart."""
    count, digits = int(torch.Size(shape[1:]).numel()), 1
    while BASE**digits < count:
        digits += 1
    return digits
