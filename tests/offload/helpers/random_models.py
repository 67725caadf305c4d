"""Random small models, modes and knobs, as hypothesis strategies."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap

VOCABULARY = 11
LONGEST = 9


class Dense(nn.Module):
    """One layer, with or without a bias."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(hidden))


class Perceptron(nn.Module):
    """Norm, two layers, dropout, a residual and a bare parameter."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.scale * self.dropout(self.down(F.gelu(self.up(self.norm(hidden)))))


class Convolved(nn.Module):
    """A convolution along the sequence, or over sequence and width, with running statistics."""

    def __init__(self, width: int, dimensions: int):
        super().__init__()
        self.flat = dimensions == 1
        self.layer = nn.Conv1d(width, width, 3, padding=1) if self.flat else nn.Conv2d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(width) if self.flat else nn.BatchNorm2d(2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.flat:
            return hidden + self.norm(self.layer(hidden.transpose(1, 2))).transpose(1, 2)
        return hidden + self.norm(self.layer(hidden[:, None])).relu().mean(1)


class Attention(nn.Module):
    """Two heads, one projection for all three inputs."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.dropout = dropout

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.inputs(hidden).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return hidden + self.output(mixed.transpose(1, 2).flatten(2))


class Detached(nn.Module):
    """A weight that is used twice, detached the first time: backward needs it after its gradient."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.linear(torch.tanh(F.linear(hidden, self.weight.detach())), self.weight)


class Positions(nn.Module):
    """An embedding inside a block, of indices that are a buffer."""

    def __init__(self, width: int):
        super().__init__()
        self.table = nn.Embedding(4, width)
        self.register_buffer("indices", torch.arange(LONGEST) % 4, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.table(self.indices[: hidden.shape[1]])


KINDS: dict[str, Callable[[int, float], nn.Module]] = {
    "dense": lambda width, dropout: Dense(width, bias=True),
    "dense without bias": lambda width, dropout: Dense(width, bias=False),
    "perceptron": Perceptron,
    "convolution 1d": lambda width, dropout: Convolved(width, 1),
    "convolution 2d": lambda width, dropout: Convolved(width, 2),
    "attention": Attention,
    "detached": lambda width, dropout: Detached(width),
    "positions": lambda width, dropout: Positions(width),
}
FROZEN = ("blocks.0.", "bias", "norm", "embed", ".weight", "down")


@dataclass(frozen=True)
class Spec:
    """The parts of a random model.

    Blocks are called in `order`, under torch's checkpoint if `checkpointing` is "reentrant" or "non-reentrant". `tied`
    is a pair of blocks of one kind that share a parameter.
    """

    kinds: tuple[str, ...]
    order: tuple[int, ...]
    width: int
    dropout: float
    tied: tuple[int, int] | None
    tied_head: bool
    frozen: str | None
    checkpointing: str | None
    batch: int
    sequence: int

    @property
    def has_statistics(self) -> bool:
        """True if forward updates buffers."""
        return any("convolution" in kind for kind in self.kinds)


class Assembled(nn.Module):
    """The model of a spec: int64 tokens [batch, sequence] in, logits [batch, sequence, VOCABULARY] out."""

    def __init__(self, spec: Spec):
        super().__init__()
        torch.manual_seed(0)
        self.spec = spec
        self.embed = nn.Embedding(VOCABULARY, spec.width)
        self.blocks = nn.ModuleList(KINDS[kind](spec.width, spec.dropout) for kind in spec.kinds)
        self.head = nn.Linear(spec.width, VOCABULARY, bias=False)
        if spec.tied is not None:
            _tie(*(self.blocks[index] for index in spec.tied))
        if spec.tied_head:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if spec.frozen is not None and spec.frozen in name:
                parameter.requires_grad_(False)
        # At least one parameter has to train.
        self.head.weight.requires_grad_(True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for index in self.spec.order:
            if self.spec.checkpointing is None:
                hidden = self.blocks[index](hidden)
            else:
                hidden = checkpoint(self.blocks[index], hidden, use_reentrant=self.spec.checkpointing == "reentrant")
        return self.head(hidden)

    def inputs(self, step: int, microbatch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        return torch.randint(VOCABULARY, (self.spec.batch, self.spec.sequence), generator=generator)


def _tie(one: nn.Module, other: nn.Module) -> None:
    """Makes two modules of one kind share their first matrix."""
    name = next(name for name, parameter in one.named_parameters() if parameter.ndim > 1)
    owner, _, attribute = name.rpartition(".")
    setattr(other.get_submodule(owner), attribute, getattr(one.get_submodule(owner), attribute))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    kinds = tuple(draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5)))
    everyone = list(range(len(kinds)))
    order = everyone + draw(st.lists(st.sampled_from(everyone), max_size=2))
    pairs = [(one, other) for other in everyone for one in range(other) if kinds[one] == kinds[other]]
    return Spec(
        kinds=kinds,
        order=tuple(draw(st.permutations(order)) if draw(st.booleans()) else order),
        width=draw(st.sampled_from([4, 6, 16])),
        dropout=draw(st.sampled_from([0.0, 0.4])),
        tied=draw(st.sampled_from([None, *pairs])),
        tied_head=draw(st.booleans()),
        frozen=draw(st.sampled_from([None, *FROZEN])),
        checkpointing=draw(st.sampled_from([None, None, None, "reentrant", "non-reentrant"])),
        batch=draw(st.integers(2, 3)),
        sequence=draw(st.integers(2, LONGEST)),
    )


@st.composite
def _common(draw: st.DrawFn) -> dict:
    slots = draw(st.integers(1, 5))
    return {
        "slots": slots,
        "prefetch": draw(st.none() | st.integers(0, slots - 1)),
        "resident": draw(st.sampled_from([0, 1, "40%", "100%", "1KiB", "0.5MiB"])),
        "include": draw(st.sampled_from([[], ["*"], ["blocks.[12]*"], ["*.layer", "*.up"], ["nothing"]])),
        "exclude": draw(st.sampled_from([[], [], ["blocks.0*"], ["*.down", "blocks.1"]])),
    }


@st.composite
def weight_modes(draw: st.DrawFn) -> tuple[str, dict]:
    """Draws the name of a mode for weights, and its knobs."""
    name = draw(st.sampled_from(["none", "bounce_linear", "layer_stream", "shard_offload"]))
    if name == "none":
        return name, {}
    knobs = draw(_common())
    if name == "bounce_linear":
        knobs["outside"] = draw(st.sampled_from(["resident", "stream"]))
        return name, knobs
    knobs["layers"] = draw(st.sampled_from([None, "blocks"]))
    knobs["outside"] = draw(st.sampled_from(["resident", "stream"]))
    if name == "layer_stream":
        return name, knobs
    knobs["shards"] = draw(st.none() | st.integers(1, 3))
    if knobs["shards"] is None:
        knobs["shard_bytes"] = draw(st.sampled_from([0, 1, 3000, "8KiB", "512MiB"]))
    knobs["checkpoint"] = draw(st.booleans())
    knobs["boundary"] = draw(st.sampled_from(["host", "device"]))
    return name, knobs


@st.composite
def activation_modes(draw: st.DrawFn) -> tuple[str, dict]:
    """Draws the name of a mode for activations, and its knobs. `weights` is a pair of name and knobs, too."""
    weights = draw(weight_modes())
    if draw(st.integers(0, 4)) == 0:
        return "save_on_cpu", {"weights": weights}
    return "tensor_swap", {"weights": weights, "budget": draw(st.sampled_from([0, 1, 2000, "1MiB", "auto"]))}


MODES = {
    "none": Resident,
    "bounce_linear": BounceLinear,
    "layer_stream": LayerStream,
    "shard_offload": ShardOffload,
    "tensor_swap": TensorSwap,
    "save_on_cpu": SaveOnCpu,
}


def built(mode: tuple[str, dict]):
    """Makes the mode of a name and its knobs."""
    name, knobs = mode
    if "weights" in knobs:
        knobs = knobs | {"weights": built(knobs["weights"])}
    return MODES[name](**knobs)


def shards(mode: tuple[str, dict]) -> bool:
    """Returns whether the mode runs microbatches layer-major."""
    name, knobs = mode
    return name == "shard_offload" or ("weights" in knobs and shards(knobs["weights"]))
