"""Counts where the routers of a mixture of experts send the tokens of a logged step.

Routers are found as transformers finds them to record `router_logits`. Sums stay on the device, for each router one of
each expert and two more, until the metrics of the step are read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from models.adapters import root_of
from training.batches import Batch, real_tokens

# Rows of probabilities sum to 1 as exactly as their dtype has it.
ROUNDING = 1e-2
AUXILIARY = -1
"""the place of the auxiliary loss among the sums"""


class Microbatch:
    """A microbatch whose loss is computed, and its part `weight` of the step's mean loss."""

    def __init__(self, index: int, batch: Batch, weight: float):
        self.index, self.weight, self._batch = index, weight, batch

    @cached_property
    def real(self) -> Tensor | None:
        """Tells tokens from padding, bool [inputs]; None if all are tokens."""
        real = None if isinstance(self._batch, Tensor) else real_tokens(self._batch)
        return None if real is None else real.flatten()


# None in a backward, which may recompute forwards, and between steps.
_CURRENT: ContextVar[Microbatch | None] = ContextVar("microbatch", default=None)


@contextmanager
def forward_of(index: int, batch: Batch, weight: float) -> Iterator[None]:
    """Surrounds the forward of a microbatch, in its own thread where several run side by side."""
    token = _CURRENT.set(Microbatch(index, batch, weight))
    try:
        yield
    finally:
        _CURRENT.reset(token)


class RouterMeter:
    """Counts the tokens of each expert, the entropy of each router and the auxiliary loss, in the steps that ask."""

    def __init__(self, model: nn.Module):
        root = root_of(model)
        self._routers = routers_of(root)
        # Of transformers' own forward, which returns that loss.
        self._balanced = root if self._routers and getattr(model, "balances_experts", False) else None
        self._sums: dict[int, Tensor] = {}
        self._seen: dict[int, dict[int, Microbatch]] = {}

    def __bool__(self) -> bool:
        return bool(self._routers)

    @contextmanager
    def counting(self, wanted: bool) -> Iterator[None]:
        """Counts the forwards inside `forward_of`, inside this block, if that is `wanted`; forgets those before."""
        self._sums, self._seen = {}, {}
        with ExitStack() as hooks:
            for place, (router, index) in enumerate(self._routers.items() if wanted else ()):
                hooks.enter_context(router.register_forward_hook(partial(self._count, place, index)))
            if wanted and self._balanced is not None:
                hooks.enter_context(self._balanced.register_forward_hook(self._count_auxiliary))
            yield

    def sums(self) -> dict[int, list[float]]:
        """Returns by router its experts' tokens, its entropies in nats and its tokens. Waits for the device."""
        if not self._sums:
            return {}
        values = torch.cat([*self._sums.values()]).cpu().split([len(each) for each in self._sums.values()])
        return {place: each.tolist() for place, each in zip(self._sums, values, strict=True)}

    @torch.no_grad()
    def _count(self, place: int, index: int, router: nn.Module, _: tuple, output: Any) -> None:
        microbatch = _CURRENT.get()
        found = None if microbatch is None else routing(router, index, output)
        if found is None:
            return
        logits, chosen = found
        weights = logits.new_ones(len(logits)) if microbatch.real is None else microbatch.real
        # Else nobody knows which row is whose.
        if len(weights) != len(logits):
            return
        weights, experts = weights.double(), logits.shape[-1]
        sums = weights.new_zeros(experts + 2)
        sums[:experts].scatter_add_(0, chosen.flatten(), weights[:, None].expand_as(chosen).flatten())
        sums[experts] = (torch.special.entr(_probabilities(logits)).sum(-1).double() * weights).sum()
        sums[experts + 1] = weights.sum()
        self._add(place, microbatch, sums)

    @torch.no_grad()
    def _count_auxiliary(self, _: nn.Module, __: tuple, output: Any) -> None:
        microbatch = _CURRENT.get()
        if microbatch is not None and output.get("aux_loss") is not None:
            self._add(AUXILIARY, microbatch, output["aux_loss"].double().reshape(1) * microbatch.weight)

    def _add(self, place: int, microbatch: Microbatch, sums: Tensor) -> None:
        seen = self._seen.setdefault(place, {})
        # A mode that tries its order first computes the loss of a microbatch anew.
        if seen.setdefault(microbatch.index, microbatch) is not microbatch:
            self._seen[place] = {microbatch.index: microbatch}
            del self._sums[place]
        self._sums[place] = self._sums[place] + sums if place in self._sums else sums


def routers_of(root: nn.Module) -> dict[nn.Module, int]:
    """Returns the modules of transformers that declare their `router_logits`, with the place in what they return."""
    found = {}
    for part in root.modules():
        declared = getattr(part, "_can_record_outputs", None)
        declared = declared.get("router_logits", ()) if isinstance(declared, dict) else ()
        for each in declared if isinstance(declared, list | tuple) else (declared,):
            kind, layer = getattr(each, "target_class", None), getattr(each, "layer_name", None)
            for name, module in part.named_modules() if isinstance(kind, type) else ():
                if isinstance(module, kind) and (layer is None or f".{layer.strip('.')}." in f".{name}."):
                    found[module] = each.index
    return found


def routing(router: nn.Module, index: int, output: Any) -> tuple[Tensor, Tensor] | None:
    """Returns logits [tokens, experts] and the chosen experts, int64 [tokens, k]; None where these are not known.

    A router returns both, or its logits, whose largest are chosen (Llama 4). Some have a class for no expert (Zaya).
    """
    if not isinstance(output, tuple) or not isinstance(output[index], Tensor):
        return None
    logits, experts, k = output[index], getattr(router, "num_experts", None), getattr(router, "top_k", None)
    integers = (each for each in output if isinstance(each, Tensor) and not each.is_floating_point())
    chosen = next((each for each in integers if each.shape[:-1] == logits.shape[:-1]), None)
    if logits.shape[-1] < 2 or experts not in (None, logits.shape[-1]):
        return None
    if chosen is None:
        if experts is None or k is None:
            return None
        chosen = logits.topk(k, dim=-1).indices
    return logits.detach().flatten(0, -2), chosen.long().flatten(0, -2)


def _probabilities(logits: Tensor) -> Tensor:
    """Returns the softmax of logits [tokens, experts] in float32; what are probabilities already (Gemma 4), as such."""
    logits = logits.float()
    are_given = (logits.amin() >= 0) & ((logits.sum(-1) - 1).abs().amax() < ROUNDING)
    return torch.where(are_given, logits, logits.softmax(-1))


def router_metrics(of_ranks: Sequence[Mapping[int, list[float]]]) -> dict[str, float]:
    """Returns the metrics of a step from the `sums` of all ranks: means over routers, and those of the worst."""
    places = {place for sums in of_ranks for place in sums}
    totals = {at: [sum(parts) for parts in zip(*(s[at] for s in of_ranks if at in s), strict=True)] for at in places}
    found = {"train/aux_loss": totals.pop(AUXILIARY)[0]} if AUXILIARY in totals else {}
    loads, dead, entropies = [], [], []
    for *counts, entropy, tokens in (totals[place] for place in sorted(totals)):
        if tokens:
            loads.append(max(counts) * len(counts) / sum(counts))
            dead.append(counts.count(0) / len(counts))
            entropies.append(entropy / tokens / math.log(len(counts)))
    if loads:
        found |= {"moe/load_imbalance": sum(loads) / len(loads), "moe/load_imbalance_max": max(loads)}
        found |= {"moe/dead_experts": sum(dead) / len(dead), "moe/dead_experts_max": max(dead)}
        found |= {"moe/router_entropy": sum(entropies) / len(entropies), "moe/router_entropy_min": min(entropies)}
    return found
