"""Frozen weights that stay in their files (`source=mapped`): where they are, for the mode of a run."""

from pathlib import Path

from omegaconf import DictConfig
from torch import Tensor, nn

from models.adapters import without_adapters
from models.places import Places, find_places
from offload import FileSpan, Footprint
from offload.knobs import format_bytes
from training.config.modes import weights_node
from training.errors import UserError, as_user_error
from training.weights.files import ModelWeights
from training.weights.quantising import cache_of

MAPPED = "mapped"
# Reasons that a note has, those of the most bytes first.
NAMED = 3


def is_mapped(config: DictConfig) -> bool:
    """Tells whether the run asks for weights that stay in their files."""
    return weights_node(config)[1].get("source") == MAPPED


def mapped_spans(config: DictConfig, model: nn.Module) -> dict[Tensor, list[FileSpan]] | None:
    """Returns the places in files of the weights of `model` that stay there; None unless offload.source=mapped.

    Raises UserError if no frozen weight can be read from a file.
    """
    if not is_mapped(config):
        return None
    places = _places(config, model)
    found = places.found
    if not any(tensor in found and not tensor.requires_grad for tensor in model.parameters()):
        reason = max(places.reasons.values(), key=list(places.reasons.values()).count)
        raise UserError(
            f"{weights_node(config)[0]}.source={MAPPED}: no frozen weight can be read from"
            f" model.weights={config.model.weights}: they {reason}; take {weights_node(config)[0]}.source=memory"
        )
    return {t: [FileSpan(place.file, place.offset, place.nbytes) for place in found[t]] for t in found}


def mapped_note(config: DictConfig, model: nn.Module, footprint: Footprint) -> str | None:
    """Returns a line: how many of the bytes that stream are read from files, and why others are not."""
    if not is_mapped(config):
        return None
    key = weights_node(config)[0]
    read, streams = format_bytes(footprint.file_bytes), format_bytes(footprint.host_weight_bytes)
    line = f"{key}.source=mapped: {read} of the {streams} that stream are read from files"
    if not footprint.host_home_bytes:
        return line
    resident = {id(tensor) for tensor in footprint.resident}
    nbytes: dict[str, int] = {}
    for tensor, reason in _places(config, model).reasons.items():
        if id(tensor) not in resident and not tensor.requires_grad:
            nbytes[reason] = nbytes.get(reason, 0) + tensor.nbytes
    trains = sum(tensor.nbytes for unit in footprint.trained for tensor in unit)
    if trains:
        nbytes["train"] = trains
    most = sorted(nbytes.items(), key=lambda entry: -entry[1])[:NAMED]
    why = [f"{format_bytes(size)} {reason}" for reason, size in most]
    return (
        f"{line}; in memory are units with weights that {', '.join(why)}"
        if why
        else f"{line}; the others have buffers, as single layers under bounce_linear have not"
    )


def largest_file(config: DictConfig, model: nn.Module) -> Path:
    """Returns the largest of the files from which the run reads weights."""
    files = {place.file for places in _places(config, model).found.values() for place in places}
    return max(files, key=lambda file: file.stat().st_size)


def _places(config: DictConfig, model: nn.Module) -> Places:
    source = f"{weights_node(config)[0]}.source"
    key = f"{source}={MAPPED}"
    if config.model.weights is None:
        raise UserError(
            f"{key}: reads weights from files in every step, and model.weights=null has none: give model.weights=PATH,"
            f" or take {source}=memory"
        )
    if config.devices > 1:
        raise UserError(
            f"{key}: is for one device so far: take devices=1 instead of {config.devices}, or {source}=memory"
        )
    if all(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"{key}: reads frozen weights from files, and here all train: train an adapter (adapter=lora), quantize the"
            f" weights, or take {source}=memory"
        )
    path = ModelWeights.find(config.model.weights, ask=False).local_path()
    refused = as_user_error(f"model.weights={config.model.weights}: ", (ValueError, FileNotFoundError))
    with refused, without_adapters(model):
        return find_places(model, path, cache_of(model, config, path))
