"""Batches: a tensor, or a dictionary of tensors, whose first dimension counts the examples."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from models.loss import IGNORED_LABEL
from models.packed_attention import starts_in
from offload import upload
from training.errors import as_user_error

Batch = Tensor | dict[str, Tensor]
"""the first dimension of each tensor counts the examples"""


def examples_in(batch: Batch) -> int:
    """Returns the number of examples. Raises ValueError if the tensors of a dictionary do not have the same number."""
    if isinstance(batch, Tensor):
        return len(batch)
    counts = {name: len(tensor) for name, tensor in batch.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the tensors of a batch must have the same first dimension, the examples: {counts}")
    return next(iter(counts.values()))


def trained_tokens_in(labels: Tensor) -> int:
    """Returns the number of labels, on the CPU, that are trained on."""
    return int((labels != IGNORED_LABEL).sum())


def tokens_in(batch: Batch) -> int:
    """Returns the number of tokens in a batch of text on the CPU, without padding.

    Raises ValueError for a dictionary without `lengths`, `segments` and `input_ids`.
    """
    if isinstance(batch, Tensor):
        return batch.numel() - len(batch)
    if "lengths" in batch:
        return int(batch["lengths"].sum())
    if "segments" in batch:
        return int((batch["segments"] >= 0).sum())
    if "input_ids" in batch:
        return batch["input_ids"].numel()
    raise ValueError(f"no lengths, segments or input_ids tell the tokens of a batch: it has {', '.join(batch)}")


def real_tokens(batch: dict[str, Tensor]) -> Tensor | None:
    """Tells tokens from padding, bool in the shape of a text's `input_ids`; None if all are tokens."""
    if "segments" in batch:
        return batch["segments"] >= 0
    if {"lengths", "input_ids"} <= batch.keys():
        ids = batch["input_ids"]
        return torch.arange(ids.shape[-1], device=ids.device) < batch["lengths"][..., None]
    return None


def nonfinite_in(batch: Batch) -> tuple[str, int] | None:
    """Returns the name of the first tensor that is not finite, and its first such example; None if all are finite."""
    for name, tensor in batch.items() if isinstance(batch, dict) else ():
        finite = tensor.isfinite().flatten(1).all(1) if tensor.ndim > 1 else tensor.isfinite()
        if not finite.all():
            return name, int(finite.logical_not().nonzero()[0])
    return None


def refuse_padding(model: nn.Module, batch: Batch, where: str) -> None:
    """Raises UserError, beginning with `where`, for a batch that the `refuse_padding` of a diffusion model refuses."""
    if refuse := getattr(model, "refuse_padding", None):
        with as_user_error(f"{where}: "):
            refuse(batch)


def split_into(batch: Batch, parts: int) -> list[Batch]:
    """Splits a batch into `parts` of nearly the same number of examples: the first may have one more."""
    return _split(batch, lambda tensor: tensor.tensor_split(parts))


def split_by(batch: Batch, examples: int) -> list[Batch]:
    """Splits a batch into parts of `examples` examples; the last may have fewer."""
    return _split(batch, lambda tensor: tensor.split(examples))


def uploaded(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch on `device`. The host does not wait for the device's queue."""
    if isinstance(batch, Tensor):
        return upload(batch, device)
    moved = {name: upload(tensor, device) for name, tensor in batch.items()}
    if "segments" in batch:
        # Counted here, where the host need not wait for the device to know how many samples there are.
        moved["segments"].starts = upload(starts_in(batch["segments"]), device)
    return moved


def add_to_digest(digest: "hashlib._Hash", batch: Batch) -> None:
    """Adds the bytes of a batch (on any device, any dtype) to `digest`, and the names of a dictionary's tensors."""
    for name, tensor in [("", batch)] if isinstance(batch, Tensor) else sorted(batch.items()):
        digest.update(name.encode())
        # As bytes, because numpy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def sha256_of(batch: Batch) -> str:
    """Computes the SHA-256 of a batch."""
    digest = hashlib.sha256()
    add_to_digest(digest, batch)
    return digest.hexdigest()


def _split(batch: Batch, pieces: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Batch]:
    if isinstance(batch, Tensor):
        return list(pieces(batch))
    split = {name: pieces(tensor) for name, tensor in batch.items()}
    return [dict(zip(split, parts, strict=True)) for parts in zip(*split.values(), strict=True)]
