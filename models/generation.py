"""Generates tokens one after another: from the prompt at once, then from each new token with a key/value cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn


def can_generate(model: nn.Module) -> bool:
    """Tells whether `generate` can use the model: whether it has a key/value cache (see `models.llama.Llama`)."""
    return hasattr(model, "key_value_cache")


def largest_forwards(model: nn.Module, positions: int) -> list[Callable[[], Tensor]]:
    """Returns two forwards that hold what `generate` holds at most for a text of `positions` tokens, for a plan.

    The first stores all positions but one in a cache, where `generate` stores the prompt alone, so its activations are
    those of a whole text; the second adds the last. The model and its ids are on the meta device.
    """
    cache = model.key_value_cache(positions)

    def forward(count: int) -> Tensor:
        return model(torch.empty((1, count), dtype=torch.int64, device="meta"), cache=cache)

    return [partial(forward, count) for count in (positions - 1, 1) if count]


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: torch.device,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Yields `tokens` ids that continue `prompt`, each as soon as it is drawn.

    The caller has the model in eval() and gradients off. Tokens are drawn on the CPU with a generator of their own:
    the same logits and the same seed give the same tokens, and no other random number changes.

    Args:
        prompt: at least one id.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_p: draws from the fewest likeliest tokens whose probabilities add up to this, in (0, 1].
        device: where the model computes.
        vocab_size: only ids below this are drawn; None for all that the model has.

    Raises ValueError if the model's logits are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = model.key_value_cache(len(prompt) + tokens)
    text, ids = list(prompt), list(prompt)
    for _ in range(tokens):
        if len(text) - 1 == getattr(model, "short_positions", None) and len(ids) < len(text):
            # What is in the cache has the angles of a shorter text.
            cache, ids = model.key_value_cache(len(prompt) + tokens), text
        logits = model(torch.tensor([ids], device=device), cache=cache)
        ids = [draw(logits[0, -1, :vocab_size].cpu(), temperature, top_p, generator)]
        text += ids
        yield ids[0]


def draw(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Draws one id by its logits [vocab_size], a tensor on the CPU; see `generate`.

    Nucleus sampling (Holtzman et al. 2020): less likely ids than those that make up `top_p` are never drawn.
    """
    if not logits.max().isfinite():
        raise ValueError("the model's logits are not finite, so no token can be drawn")
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.double()
    # Subtracted first, so that no temperature makes the largest infinite.
    probabilities = ((logits - logits.max()) / temperature).softmax(0)
    likeliest, ids = probabilities.sort(descending=True, stable=True)
    kept = likeliest.cumsum(0) - likeliest < top_p
    # The likeliest is kept at any top_p, also at one that rounds to 0.
    kept[0] = True
    return int(ids[torch.multinomial(likeliest * kept, 1, generator=generator)])
