"""Writes transformers models as transformers does: config.json, and weights under the names of published checkpoints.

`models.hf_files` loads such files, and so does `from_pretrained`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from models.hf_source import CONFIG_FILE, one_line, sub_configs
from models.safetensors_files import split_into_files, write_tensors
from models.weights import INDEX_FILE, MAX_SHARD_BYTES, distinct_tensors, first_and_count, index_of, named_tensors
from models.whole_folder import Fill, bytes_of

Read = Callable[[str], Tensor]


def hf_files(
    model: nn.Module,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    read: Read | None = None,
    values: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Fill]:
    """Returns the files of a saved model: what fills each, by name. One layer is converted at a time.

    Args:
        read: returns the values of a tensor, given one of its names in `model.hf`; by default they are the model's own.
        values: keys of config.json with other values than the model's own, such as the tokens that end a text.

    Raises ValueError if a tensor is on the meta device, and there is no `read`; or it cannot be converted back.
    """
    hf = model.hf
    if read is None:
        own = {name: tensor.detach() for tensor, names in distinct_tensors(hf) for name in names}
        read = own.__getitem__
    config = copy.deepcopy(hf.config)
    config.architectures = [type(hf).__name__]
    config.dtype = hf.dtype
    for part in sub_configs(config):
        if hasattr(part, "use_cache"):
            part.use_cache = True
    for key, value in values.items():
        setattr(config, key, value)
    files = {CONFIG_FILE: bytes_of(config.to_json_string(use_diff=True).encode())}
    shards = split_into_files(
        "model", _layers(hf), max_shard_bytes, lambda layer: sum(t.nbytes for t in layer.values())
    )
    stored = {}
    for name, layers in shards.items():
        shard = _Shard(hf, layers.values(), read)
        stored[name] = shard.tensors
        files[name] = partial(write_tensors, tensors=shard.tensors, read=shard.read)
    if len(shards) > 1:
        files[INDEX_FILE] = bytes_of(index_of(stored))
    return files


def stored_form(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of a model, all those of some layers, under the names and in the shapes of files.

    Raises ValueError if one cannot be converted back.
    """
    try:
        return revert_weight_conversion(model, dict(tensors))
    except Exception as error:
        names = first_and_count(list(tensors))
        raise ValueError(f"{names} cannot be converted to the form of files: {one_line(error)}") from error


class _Shard:
    """The tensors of some layers in the form of files; `tensors` has them without values, by their name there."""

    def __init__(self, model: PreTrainedModel, layers: Iterable[dict[str, Tensor]], read: Read):
        self._model, self._read = model, read
        self.tensors: dict[str, Tensor] = {}
        self._layer_of: dict[str, dict[str, Tensor]] = {}
        for layer in layers:
            empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in layer.items()}
            made = stored_form(model, empty)
            self.tensors |= made
            self._layer_of |= dict.fromkeys(made, layer)
        # Those of the layer that was converted last: the next tensor is of the same one, as a rule.
        self._converted: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """Returns a tensor with its values."""
        layer = self._layer_of[name]
        if self._converted[0] is not layer:
            self._converted = {}, {}
            self._converted = layer, stored_form(self._model, {own: self._read(own) for own in layer})
        return self._converted[1][name]


def _layers(model: PreTrainedModel) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of the state dict by layer, each tied one once: all that a conversion joins is in a layer."""
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in _saved(model):
        layer = re.match(r".*?\.\d+\.", name)  # model.layers.3.
        layers.setdefault(layer[0] if layer else "", {})[name] = tensor
    return layers


def _saved(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    derived, left_out = model.all_tied_weights_keys, model._keys_to_ignore_on_save or ()
    for tensor, names in named_tensors(model):
        # transformers reads a tied weight under the name that the others are tied to.
        name = next((name for name in names if name not in derived), names[0])
        if name not in left_out:
            yield name, tensor
