"""Finds parameters and buffers that a mode made from meta tensors and that nobody has filled since.

A tensor of the meta device has no values. The memory that a mode makes for it begins and ends with bytes that no value
of a model has. Whoever fills the tensor overwrites them, by whatever means: an initialisation, a state dict, `.data`,
NumPy, or another tensor in its place. Version counters would miss some of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn

from offload.torch_private.module_contexts import before_each_call
from offload.torch_private.tensor_parts import parts, wraps
from offload.torch_private.torch_internals import is_function_transform_tensor

# NaN in every floating-point dtype of two bytes or more (in those of two, every second element), and no value of bool.
# It is written as often as it fits into the first and the last END_BYTES.
MARK = (0xD7, 0xA5, 0xFF, 0x7F)
END_BYTES = 16
# Names in an error.
NAMED = 3


def mark(memory: torch.Tensor) -> None:
    """Writes the mark into `memory`, a new dense tensor without values."""
    for end in _ends(memory):
        end.copy_(torch.tensor(_marks(end), dtype=torch.uint8, device="cpu"))


def is_marked(tensor: torch.Tensor) -> bool:
    """Tells whether `tensor`, or one that it wraps, begins and ends with the mark.

    It does not where it is empty, or on the meta device.
    """
    if wraps(tensor):
        return any(map(is_marked, parts(tensor)))
    ends = _ends(tensor)
    return bool(ends) and all(end.tolist() == _marks(end) for end in ends)


def unfilled(model: nn.Module, but: Collection[torch.Tensor] = ()) -> list[str]:
    """Returns the names of the parameters and buffers of `model` that have no values, tied ones once; none of `but`."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, tensor in named if tensor not in but and is_marked(tensor)]


class UnfilledTensors:
    """Refuses steps and forwards of an attached model while a tensor of it has no values.

    After the first success, or where nothing was made from meta tensors, it is out of the way.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._fixed: Collection[torch.Tensor] = ()
        self._remove_hooks: Callable[[], None] = lambda: None

    def watch(self, model: nn.Module, fixed: Collection[torch.Tensor] = ()) -> None:
        """Begins to refuse, where something has no values. Call it when the tensors are where they belong.

        `fixed` have their values for good, and are not looked at.
        """
        if unfilled(model, fixed):
            self._model, self._fixed = model, fixed
            self._remove_hooks = before_each_call(model.modules(), self._check_call)

    def check_step(self) -> None:
        """Raises RuntimeError in one line, with names, if a tensor has no values."""
        self._check()
        self.close()

    def close(self) -> None:
        """Ends the watch."""
        self._remove_hooks()
        self._model = None

    def _check_call(self) -> None:
        self._check()
        # A step checks once more: this call may have had tensors of its caller's (`torch.func.functional_call`).
        self._remove_hooks()

    def _check(self) -> None:
        names = unfilled(self._model, self._fixed) if self._model is not None else []
        if names:
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise RuntimeError(
                f"without values: {', '.join(names[:NAMED])}{more}. The model was built on the meta device: after the"
                " mode is attached, load them or call the model's own initialisation (load_state_dict leaves out"
                " buffers that are not persistent), or build the model on the CPU"
            )


def _ends(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the first and the last bytes of a tensor as views, uint8; nothing for tensors that were never marked."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or is_function_transform_tensor(tensor):
        return []
    if tensor.is_meta or tensor.layout is not torch.strided:
        return []
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return []
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if not tensor.nbytes or end > tensor.untyped_storage().nbytes():
        return []
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return [flat] if flat.numel() <= 2 * END_BYTES else [flat[:END_BYTES], flat[-END_BYTES:]]


def _marks(end: torch.Tensor) -> list[int]:
    return [MARK[index % len(MARK)] for index in range(end.numel())]
