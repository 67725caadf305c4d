"""NetworkCall: how a pipeline calls its network for pictures of one size, made of records; and batches of conditions.

Arguments that depend on a caption, or on the picture's own sizes, are *conditions*: they are kept for each picture, and
come with a batch. All others (places, masks of nothing, guidance) are the same for every picture of a size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from models.diffusion_scheduler import STEPS
from models.pipelines.recording import (
    BASE,
    Asked,
    NotTrainableError,
    Record,
    Recorder,
    places_in,
)

# Captions of different lengths, also in tokens: what differs between their records depends on the caption.
PROBE = "a photograph of a red cube, two green spheres and 7 yellow cones on a table; soft light, high contrast."
# Before the names of conditions in a batch: a task passes these on as they are.
ASKED = "asked."
# After the name of a condition that is a list: the condition with the lengths of its entries, where they differ.
LENGTHS = ".lengths"
# Of text encoders in bfloat16 for two captions at once, and one after the other.
ROUNDING = 0.05
# The network's time is one of these multiples of the scheduler's number, plus that: (divided by, sign, plus).
COUNTS = ((1, 1, 0), (1000, 1, 0), (1000, -1, 1), (1, -1, 1000))


@dataclass(frozen=True)
class Leaf:
    """An argument, or a part of one: `value` for every picture, or where `is_condition` the condition of its name.

    `batch_dim` is the dimension of its examples, None if there is none. `of_caption`: it depends on the caption, and
    not only on the picture's sizes. `is_mask`: the pipeline passes None in its place, unless captions of different
    lengths are in a batch. A condition has the shape and dtype of an example in `value`, on the meta device.
    """

    value: Any
    is_condition: bool = False
    batch_dim: int | None = None
    of_caption: bool = False
    is_mask: bool = False


@dataclass(frozen=True)
class Repeated:
    """A list with an entry for each example."""

    entry: Any


@dataclass(frozen=True)
class NetworkCall:
    """The call of a network for latents of one shape.

    Attributes:
        noise: the shape of the latents of one example, in which the pipeline draws its noise.
        arguments: by name; dictionaries, lists and tuples of `Leaf` and `Repeated`.
        lists, time: as of a `Record`.
        latents, places, shape: the argument that has the latents; the place of each of its elements among the latents,
            int64; and the shape of an example there.
        answer, sign: the place in the network's output of each element of the latents, int64; -1 where the network
            predicts the negative.
        time_dtype, time_shape, count: the dtype of the network's time, the shape of an example's after the first
            dimension, and a row of `COUNTS`.
        size: of the pictures, (height, width) in pixels; of videos (frames, height, width).
    """

    noise: tuple[int, ...]
    arguments: dict[str, Any]
    lists: tuple[str, ...]
    time: str
    latents: str
    places: Tensor
    shape: tuple[int, ...]
    answer: Tensor
    sign: int
    time_dtype: torch.dtype
    time_shape: tuple[int, ...]
    count: tuple[int, int, int]
    size: tuple[int, ...]

    @classmethod
    def of(cls, recorder: Recorder, size: tuple[int, ...], longest: str = "") -> NetworkCall:
        """Asks a pipeline for its call for pictures of `size`, as that of `Asked`. Raises NotTrainableError.

        `longest` is a caption, which is asked for where `PROBE` is shorter.
        """
        probes = "", max(PROBE, longest, key=len)
        plain = Asked(probes[:1], size, size)
        first, *_ = records = recorder.record_digits(plain)
        latents = next(iter(first.arguments))
        count = int(torch.Size(first.noise[1:]).numel())
        given = places_in([record.arguments[latents] for record in records], count)
        sample = places_in([record.sample for record in records], count)
        if given is None or sample is None:
            raise NotTrainableError(f"{recorder.name} gives its network more than the noise: an image, or a mask")
        # Places in the output are told by digits of the output's own size.
        answer = answer_places(recorder, plain, records, count)
        order = torch.empty(count, dtype=torch.int64)
        order[sample[0]] = answer.abs() - 1
        other = recorder.record(Asked(probes[1:], size, (size[-2] * 2, size[-1] * 3), (4, 8)))
        twice = recorder.record(Asked(probes[:1] * 2, size, size))
        both = recorder.record(Asked(probes, size, size))
        compared = (first, other, twice, both)
        if any(record.lists != first.lists for record in compared):
            raise NotTrainableError(f"{recorder.name} gives its network lists of another kind than captions")
        names = [name for name in first.arguments | both.arguments if name not in (latents, first.time)]
        time = first.times[0]
        made = cls(
            noise=first.noise[1:],
            arguments={
                name: _leaves(recorder.name, name, *(record.arguments.get(name) for record in compared))
                for name in names
            },
            lists=first.lists,
            time=first.time,
            latents=latents,
            places=given[0],
            shape=tuple(first.arguments[latents].shape[1:]),
            answer=order,
            sign=int(answer.sign()[0]) * (-1 if first.inverted else 1),
            time_dtype=time.dtype,
            time_shape=tuple(time.shape[1:]),
            count=_count(recorder.name, first),
            size=size,
        )
        made._check_batch([recorder.record(Asked((probe,), size, size)) for probe in probes], both, recorder.name)
        return made

    def on(self, device: torch.device) -> NetworkCall:
        """Returns the call with its tensors on `device`, so that none is copied there in each forward."""
        arguments = {name: _on(tree, device) for name, tree in self.arguments.items()}
        return replace(self, arguments=arguments, places=self.places.to(device), answer=self.answer.to(device))

    def conditions(self, record: Record) -> dict[str, Tensor]:
        """Returns the conditions of a record of one picture by name: tensors with a dimension for examples, of size 1.

        Masks that the pipeline leaves out of the call of one caption are left out.
        """
        found = {}
        for name, _ in self._condition_leaves():
            value = _part_of(record.arguments, name)
            if value is not None:
                found[name] = value
        return found

    def merged(self, examples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the conditions of a batch. Shorter captions are filled up with zeros, which mask or list leave out.

        Raises ValueError where captions differ in length, and the network takes neither.
        """
        batch, padded = {}, None
        leaves = dict(self._condition_leaves())
        for name, leaf in leaves.items():
            if leaf.is_mask:
                continue
            tensors = [example[name] for example in examples]
            longest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
            for dim in range(len(longest)):
                lengths = [tensor.shape[dim] for tensor in tensors]
                if dim != leaf.batch_dim and len({*lengths}) > 1:
                    padded = lengths
            filled = [_filled(tensor, longest, leaf.batch_dim) for tensor in tensors]
            batch[name] = torch.cat(filled, dim=leaf.batch_dim)
        if padded is None:
            return batch
        masks = [name for name, leaf in leaves.items() if "mask" in name]
        listed = [name for name in self.lists if name in batch]
        batch |= {name + LENGTHS: torch.tensor([len(each[name][0]) for each in examples]) for name in listed}
        if not masks and not listed:
            raise ValueError(
                "captions of different lengths are in a batch, and the network takes no mask: take batch_size=1"
            )
        for name in masks:
            if leaves[name].is_mask:
                rows = torch.arange(max(padded)) < torch.tensor(padded)[:, None]
                batch[name] = rows.to(leaves[name].value.dtype)
        return batch

    def without_caption(self, example: Mapping[str, Tensor], empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the conditions of a picture with `empty`, those of the empty caption, in place of its own."""
        kept = {name for name, leaf in self._condition_leaves() if not leaf.of_caption}
        return {name: example[name] if name in kept else value for name, value in empty.items()}

    def meta_conditions(self, rows: int) -> dict[str, Tensor]:
        """Returns the conditions of a batch of `rows` examples of a long caption, on the meta device."""
        return {
            name: torch.cat([leaf.value] * rows, dim=leaf.batch_dim)
            for name, leaf in self._condition_leaves()
            if not leaf.is_mask
        }

    def filled(self, noisy: Tensor, number: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Returns the arguments of the call.

        Args:
            noisy: [B, *noise], of the network's dtype, on the device that the call is `on`.
            number: float32 [B], in the scheduler's numbers (0 to its num_train_timesteps).
            batch: the conditions, as `merged`; floating-point ones of the network's dtype.
        """
        rows = len(noisy)
        arguments = {name: self._value(tree, name, rows, batch) for name, tree in self.arguments.items()}
        arguments[self.latents] = noisy.reshape(rows, -1)[:, self.places].view(rows, *self.shape)
        divided_by, sign, plus = self.count
        number = number if self.time_dtype.is_floating_point else number.round()
        # Rounded last: bfloat16 has 3 and 4, but of 996 and 997 only the first.
        time = (plus + sign * number / divided_by).to(self.time_dtype)
        time = time.view(rows, *[1] * len(self.time_shape)).expand(rows, *self.time_shape)
        for name in self.lists:
            lengths, rows = batch.get(name + LENGTHS), list(arguments[name])
            if lengths is not None and not lengths.is_meta:
                rows = [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
            arguments[name] = rows
        return arguments | {self.time: time}

    def prediction(self, output: Tensor | list[Tensor], noisy: Tensor) -> Tensor:
        """Returns what the network predicts, in the shape of `noisy`, of its output."""
        output = torch.stack(output) if isinstance(output, list) else output
        found = output.reshape(len(noisy), -1)[:, self.answer].view(noisy.shape)
        return -found if self.sign < 0 else found

    def _condition_leaves(self) -> list[tuple[str, Leaf]]:
        return [(name, leaf) for name, leaf in _named_leaves(self.arguments, "") if leaf.is_condition]

    def _value(self, tree: Any, name: str, rows: int, batch: Mapping[str, Tensor]) -> Any:
        if isinstance(tree, Leaf):
            if tree.is_condition:
                return batch.get(name)
            if tree.batch_dim is None:
                return tree.value
            return tree.value.expand(*(rows if dim == tree.batch_dim else -1 for dim in range(tree.value.ndim)))
        if isinstance(tree, Repeated):
            return [self._value(tree.entry, name, rows, batch) for _ in range(rows)]
        if isinstance(tree, dict):
            return {key: self._value(each, f"{name}.{key}", rows, batch) for key, each in tree.items()}
        return type(tree)(self._value(each, f"{name}.{n}", rows, batch) for n, each in enumerate(tree))

    def _check_batch(self, alone: Sequence[Record], both: Record, pipeline: str) -> None:
        """Raises NotTrainableError where the pipeline makes something else of two captions than `merged` does."""
        try:
            merged = self.merged([self.conditions(record) for record in alone])
        except ValueError:
            # Batches of captions of one length remain.
            return
        for name, value in merged.items():
            if name.endswith(LENGTHS):
                continue
            found = _part_of(both.arguments, name)
            if found is None or found.shape != value.shape or not _alike(found, value):
                raise NotTrainableError(f"{pipeline} joins captions in an unknown way: {name}")

    def state(self) -> dict[str, Any]:
        """Returns the call as plain containers and tensors, for `torch.save`."""
        return {
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "arguments": _plain(self.arguments),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> NetworkCall:
        """Returns the call of a `state`."""
        return cls(**{**state, "arguments": _unplain(state["arguments"])})


def answer_places(recorder: Recorder, asked: Asked, records: Sequence[Record], count: int) -> Tensor:
    """Returns for each element that the scheduler gets its place in the network's output, plus 1; negative: negated."""
    predicted = [record.predicted for record in records]
    sign = -1 if float(predicted[0].double().sum()) < 0 else 1
    digits = [(sign * each).double() for each in predicted]
    # An output with a variance has more elements than the latents, and perhaps a digit more.
    extra = recorder.record(asked, len(records)).predicted
    digits.append((sign * extra).double())
    if digits[0].numel() != count:
        raise NotTrainableError(f"{recorder.name} makes latents of another size of its network's output")
    places = sum(each.flatten().round().long() * BASE**number for number, each in enumerate(digits))
    if len(places.unique()) != count:
        raise NotTrainableError(f"{recorder.name} computes with its network's output before the scheduler gets it")
    return (places + 1) * sign


def _leaves(pipeline: str, name: str, first: Any, other: Any, twice: Any, both: Any) -> Any:
    """Returns the tree of an argument, given it of a caption, of another, of the first twice, and of both at once."""
    if isinstance(first, dict) and first:
        return {
            key: _leaves(pipeline, f"{name}.{key}", *(each[key] for each in (first, other, twice, both)))
            for key in first
        }
    if isinstance(first, list) and len(first) == 1 and isinstance(twice, list) and len(twice) == 2:
        entry = _leaves(pipeline, name, first[0], other[0], twice[0], both[0])
        if any(leaf.is_condition for _, leaf in _named_leaves(entry, name)):
            raise NotTrainableError(f"{pipeline} gives its network a list of captions in {name}")
        return Repeated(entry)
    if isinstance(first, (list, tuple)) and first:
        entries = zip(first, other, twice, both, strict=True)
        return type(first)(_leaves(pipeline, f"{name}.{n}", *each) for n, each in enumerate(entries))
    if isinstance(first, Tensor):
        grown = [dim for dim in range(first.ndim) if twice.shape[dim] == 2 * first.shape[dim] == 2]
        batch_dim = grown[0] if grown else None
        if other.shape == first.shape and torch.equal(other, first):
            return Leaf(first, batch_dim=batch_dim)
        if batch_dim is None:
            raise NotTrainableError(f"{name} of {pipeline}'s network depends on the caption, and has no batch")
        rows = both.unbind(batch_dim)
        of_caption = not torch.equal(*rows)
        return Leaf(other.to("meta"), is_condition=True, batch_dim=batch_dim, of_caption=of_caption)
    if first is None and isinstance(both, Tensor) and "mask" in name:
        return Leaf(both[:1].to("meta"), is_condition=True, batch_dim=0, of_caption=True, is_mask=True)
    if first != other:
        raise NotTrainableError(f"{name} of {pipeline}'s network depends on the caption, and is no tensor")
    return Leaf(first)


def _on(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, Leaf):
        moves = isinstance(tree.value, Tensor) and not tree.is_condition
        return replace(tree, value=tree.value.to(device)) if moves else tree
    if isinstance(tree, Repeated):
        return Repeated(_on(tree.entry, device))
    if isinstance(tree, dict):
        return {key: _on(each, device) for key, each in tree.items()}
    return type(tree)(_on(each, device) for each in tree)


def _count(pipeline: str, record: Record) -> tuple[int, int, int]:
    """Returns the row of `COUNTS` by which the network's time follows from the scheduler's, counted from the image."""
    times = [float(time.flatten()[0]) for time in record.times]
    steps = [STEPS - step if record.inverted else step for step in record.steps]
    for row in COUNTS:
        divided_by, sign, plus = row
        expected = [plus + sign * step / divided_by for step in steps]
        if all(
            abs(time - want) <= 0.01 * max(abs(want), plus, 1e-2) for time, want in zip(times, expected, strict=True)
        ):
            return row
    raise NotTrainableError(f"{pipeline} counts times in an unknown way: {record.steps} as {times}")


def _named_leaves(tree: Any, name: str) -> list[tuple[str, Leaf]]:
    if isinstance(tree, Leaf):
        return [(name, tree)]
    if isinstance(tree, Repeated):
        return _named_leaves(tree.entry, name)
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree)
    prefix = f"{name}." if name else ""
    return [found for key, each in entries for found in _named_leaves(each, f"{prefix}{key}")]


def _part_of(arguments: Mapping[str, Any], name: str) -> Any:
    found: Any = arguments
    for key in name.split("."):
        found = found[int(key)] if isinstance(found, (list, tuple)) else found.get(key)
    return found


def _filled(tensor: Tensor, longest: Sequence[int], batch_dim: int) -> Tensor:
    missing = [0 if dim == batch_dim else size - tensor.shape[dim] for dim, size in enumerate(longest)]
    return pad(tensor, [amount for each in reversed(missing) for amount in (0, each)]) if any(missing) else tensor


def _alike(found: Tensor, value: Tensor) -> bool:
    if not value.is_floating_point():
        return torch.equal(found.to(value), value)
    scale = float(value.float().abs().max())
    return float((found.float() - value.float()).abs().max()) <= ROUNDING * scale


def _plain(tree: Any) -> Any:
    if isinstance(tree, Leaf):
        return {"leaf": asdict(tree)}
    if isinstance(tree, Repeated):
        return {"repeated": _plain(tree.entry)}
    if isinstance(tree, dict):
        return {"dict": {key: _plain(each) for key, each in tree.items()}}
    return {type(tree).__name__: [_plain(each) for each in tree]}


def _unplain(plain: dict[str, Any]) -> Any:
    ((kind, value),) = plain.items()
    if kind == "leaf":
        return Leaf(**value)
    if kind == "repeated":
        return Repeated(_unplain(value))
    if kind == "dict":
        return {key: _unplain(each) for key, each in value.items()}
    return (tuple if kind == "tuple" else list)(map(_unplain, value))
