"""Loads weights of transformers models from safetensors files; `models.hf_saving` writes such files.

The names and shapes in files are not always the model's. transformers has rules for that: renamings, and conversions
such as the weights of all experts in one tensor. The rules, and the functions that apply them, are used here; but the
values go into the parameters that are there, in place, and what does not fit is an error.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from models.hf_source import one_line
from models.quantise import values_of
from models.safetensors_files import DTYPES, StoredTensor, open_file, read_into
from models.weights import (
    FLOAT_DTYPES,
    IGNORED_SUFFIXES,
    check_fits,
    check_tied,
    distinct_tensors,
    first_and_count,
    named_tensors,
    read_checkpoint_headers,
)

logger = logging.getLogger(__name__)

# Buffers that old checkpoints have among the weights; models compute them.
IGNORED = r"(\.rotary_emb\.inv_freq|(^|\.)position_ids)$"
# Masks of GPT-2 and its kin, which transformers leaves out too.
MASKS = re.compile(rf"{IGNORED}|(attn|attention)\.(masked_)?bias$")
# What Llama 4 and Mllama have beside the text model, which does not tell it as Qwen 3.5's does.
TOWERS = r"^(vision_model|multi_modal_projector)\."
WHOLE_MODEL = "choose the model that it was saved from"


@dataclass
class Conversion:
    """Stored tensors that together make one or more tensors of the model.

    Attributes:
        converter: transformers' rule.
        target: the first tensor that it makes.
        sources: the stored names, each with the pattern of the rule that it fits, in their natural order.
    """

    converter: WeightConverter
    target: str
    sources: list[tuple[str, str]] = field(default_factory=list)

    def made(self, model: PreTrainedModel, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Returns the tensors that it makes, by their name in the model; `read` returns a stored one.

        Raises ValueError if the rule cannot be applied to them.
        """
        converter = copy.deepcopy(self.converter)
        for pattern, source in self.sources:
            converter.add_tensor(self.target, source, pattern, read(source))
        try:
            made = converter.convert(self.target, model=model, config=model.config)
        # On tensors that it was not written for, each rule raises errors of its own type.
        except Exception as error:
            names = first_and_count([source for _, source in self.sources])
            raise ValueError(f"{names} cannot be converted to {self.target}: {one_line(error)}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@torch.no_grad()
def load_hf(model: nn.Module, folder: str | Path) -> None:
    """Copies weights into the parameters and persistent buffers of a model, converting to their dtype and device.

    Tensors are copied one by one; those of a conversion, together.

    Args:
        folder: a folder with `model.safetensors` or shards, or such a file or index.

    Raises:
        FileNotFoundError: `folder` does not exist.
        ValueError: a file cannot be read; a tensor is missing, unknown or quantised, or has another shape; tied
            weights have different values; or a conversion is not possible. The model is unchanged then.

    Warns of tensors that transformers leaves out of such a model.
    """
    distinct_tensors(model.hf)
    matched, conversions, stored, by_name = _checked(model, Path(folder))
    taken = {*matched, *(source for conversion in conversions for _, source in conversion.sources)}
    if left_out := [name for name in stored if name not in taken and not MASKS.search(name)]:
        # A tower for images, or layers that predict several tokens.
        kind = type(model.hf).__name__
        logger.warning("%s has %s, which %s lacks: not trained, not exported", folder, first_and_count(left_out), kind)
    read_into(matched, stored)
    for conversion in conversions:
        for name, value in conversion.made(model.hf, lambda source: _read(stored[source].file, source)).items():
            with values_of(by_name[name]) as values:
                values.copy_(value)


def matched_hf(model: nn.Module, folder: str | Path) -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
    """Returns which tensor of the model each stored one is that is copied as it is, and the entries of all files.

    It reads little more than headers, so the model may be on the meta device. Raises as `load_hf` does.
    """
    matched, _, stored, _ = _checked(model, Path(folder))
    return matched, stored


def _checked(
    model: nn.Module, path: Path
) -> tuple[dict[str, Tensor], list[Conversion], dict[str, StoredTensor], dict[str, Tensor]]:
    """Returns the tensors that are copied by stored name, the conversions, all entries, and the model's tensors."""
    stored = read_checkpoint_headers(path)
    tensors = named_tensors(model.hf)
    by_name = {name: tensor for tensor, names in tensors for name in names}
    plain, conversions = _matched(model.hf, stored, by_name, path)
    filled = set(plain)
    for target, source in plain.items():
        check_fits(source, by_name[target], stored[source])
    for conversion in conversions:
        filled |= _check_conversion(conversion, model.hf, stored, by_name)
    missing = [names[0] for _, names in tensors if not filled.intersection(names)]
    if missing:
        raise ValueError(f"{path} lacks tensor {first_and_count(missing)}: {WHOLE_MODEL}")
    for _, names in tensors:
        sources = [plain[name] for name in names if name in plain]
        for other in sources[1:]:
            check_tied(stored, sources[0], other)
    return {source: by_name[target] for target, source in plain.items()}, conversions, stored, by_name


def _matched(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor], path: Path
) -> tuple[dict[str, str], list[Conversion]]:
    """Returns the stored name of each tensor that is copied as it is, and the conversions of the others."""
    transforms = get_model_conversion_mapping(model)
    renamings = [rule for rule in transforms if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in transforms if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = model.base_model_prefix
    plain: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    unknown = []
    ignored = (*(model._keys_to_ignore_on_load_unexpected or ()), IGNORED, TOWERS)
    # transformers' order: that of the experts in a conversion.
    for source in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(source, renamings, converters, prefix, tensors)
        if target not in tensors and source in tensors:
            # A rule for older names took a name of today for one of them.
            target, pattern = rename_source_key(source, [], [], prefix, tensors)
        if target not in tensors:
            if not any(re.search(rule, target) for rule in ignored) and not source.endswith(IGNORED_SUFFIXES):
                unknown.append(source)
        elif pattern is not None:
            conversion = conversions.setdefault(target, Conversion(by_pattern[pattern], target))
            conversion.sources.append((pattern, source))
        elif target in plain:
            raise ValueError(f"{path}: {plain[target]} and {source} are both {target} of the model: remove one")
        else:
            plain[target] = source
    if unknown:
        names = first_and_count(unknown)
        raise ValueError(f"{stored[unknown[0]].file} has tensor {names}, which the model lacks: {WHOLE_MODEL}")
    return plain, list(conversions.values())


def _check_conversion(
    conversion: Conversion, model: PreTrainedModel, stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]
) -> set[str]:
    """Converts tensors without values; returns the names that are made. Raises ValueError if they do not fit."""
    sources = [source for _, source in conversion.sources]
    for source in sources:
        if stored[source].dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"{stored[source].file}: tensor {source} has dtype {stored[source].dtype}: "
                "use a checkpoint that is not quantised"
            )

    def empty(source: str) -> Tensor:
        return torch.empty(stored[source].shape, dtype=DTYPES[stored[source].dtype], device="meta")

    made = conversion.made(model, empty)
    for name, value in made.items():
        if name not in tensors:
            raise ValueError(f"{first_and_count(sources)} become {name}, which the model lacks: {WHOLE_MODEL}")
        if value.shape != tensors[name].shape:
            raise ValueError(
                f"{first_and_count(sources)} become {name} with shape {tuple(value.shape)}, but the model's has "
                f"{tuple(tensors[name].shape)}: {WHOLE_MODEL}"
            )
    return set(made)


def _read(file: Path, name: str) -> Tensor:
    with open_file(file) as handle:
        return handle.get_tensor(name)
