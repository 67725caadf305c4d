"""Cuts a Llama into the chain of modules that systems for sequential models take; the base of their adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from models.llama import Decoder, Llama, rotary_tables
from offload import NO_OPTIONS, AttachOptions, Footprint
from peers.peer import Peer, PeerError


class Stage(nn.Module):
    """A part of the chain. Takes and returns (hidden, labels), as two arguments or as one tuple."""

    def forward(self, *state: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | Tensor:
        hidden, labels = state if len(state) == 2 else state[0]
        return self.run(hidden, labels)


class FirstStage(Stage):
    """Looks up the embedding: ids [batch, seq_len] -> hidden [batch, seq_len, hidden_size]."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.embed_tokens = decoder.embed_tokens

    def run(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed_tokens(ids), labels


class BlockStage(Stage):
    """Runs a block. Each computes the rotary tables again, because a chain passes on activations alone."""

    def __init__(self, decoder: Decoder, block: nn.Module):
        super().__init__()
        self.block = block
        self.head_dim, self.rope_theta = decoder.head_dim, decoder.rope_theta

    def run(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.block_output(hidden), labels

    def block_output(self, hidden: Tensor) -> Tensor:
        """Returns the hidden state after the block, in the same shape."""
        cos, sin = rotary_tables(hidden.shape[1], self.head_dim, self.rope_theta, like=hidden)
        return self.block(hidden, cos, sin)


class LastStage(Stage):
    """Computes the mean loss, a float32 scalar."""

    def __init__(self, model: Llama):
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def run(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden), labels)


@dataclass(kw_only=True, eq=False)
class ChainPeer(Peer):
    """The base of systems that take a chain of modules, and train it alone: they have no forward to evaluate with."""

    lacks: ClassVar[frozenset[str]] = frozenset({"checkpoints", "evaluation"})

    def footprint(self, model: nn.Module, recompute: bool = False, options: AttachOptions = NO_OPTIONS) -> Footprint:
        """Raises PeerError for a model that is not cut into stages here."""
        if not isinstance(model, Llama):
            problem = f"takes a chain of modules, and {type(model).__name__} is not cut into one here: take a Llama"
            raise PeerError("offload", self.option, f"{problem}, as model=llama1b")
        if model.lm_head.weight is model.model.embed_tokens.weight:
            problem = "ties no weights across stages: take model.tie_word_embeddings=false"
            raise PeerError("offload", self.option, problem)
        return super().footprint(model, recompute, options)


def stages(model: Llama) -> list[Stage]:
    """Returns the chain: embedding, blocks, and norm with head and loss. Its modules are those of the model."""
    decoder = model.model
    return [FirstStage(decoder), *(BlockStage(decoder, block) for block in decoder.layers), LastStage(model)]
