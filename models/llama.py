"""The Llama decoder (Touvron et al. 2023), with the parameter names of Hugging Face's LlamaForCausalLM.

Two properties make the model usable with every offload mode:

* It has no buffers: each forward computes the rotary tables. So a model built under `torch.device("meta")` needs
  only values for its parameters.
* Every parameter is read only in the forward of the module that owns it. Only then does a mode guarantee its value.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.divided_sequence import DividedSequence
from models.loss import Head
from models.packed_attention import Packed, bounds_of, packed_attention, positions_in


def rotary_tables(seq_len: int, head_dim: int, theta: float, like: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
    """Computes the cosines and sines of rotary position embedding (Su et al. 2021), one angle for each pair of a head.

    Angles are computed in float32, because bfloat16 cannot distinguish neighbouring positions beyond 256. The tables
    have the dtype and the device of `like`. `start` is the first position.

    Returns:
        cos, sin: both [seq_len, head_dim / 2].
    """
    positions = torch.arange(start, start + seq_len, device=like.device)
    return rotary_tables_at(positions, head_dim, theta, like)


def rotary_tables_at(positions: Tensor, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `rotary_tables` for positions, int64 [...]: cos, sin: both [..., head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float32) / head_dim
    angles = positions.float()[..., None] * theta**-exponents
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


class Rotate(torch.autograd.Function):
    """Rotates each pair (x[j], x[j + head_dim / 2]) by the angle of its position.

    x: [..., seq_len, head_dim]; cos, sin: [..., seq_len, head_dim / 2]. The gradient of a rotation is the reverse
    rotation. As one function that works in place it takes half as long as the same arithmetic under autograd. That is
    about 5% of a 7B model's step on an H200.
    """

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = x.chunk(2, dim=-1)
        rotated = torch.empty_like(x)
        rotated_first, rotated_second = rotated.chunk(2, dim=-1)
        torch.mul(first, cos, out=rotated_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=rotated_second).addcmul_(first, sin)
        return rotated

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return Rotate.apply(grad, cos, -sin), None, None


class LayerCache:
    """Keys and values of one attention layer, in two buffers for `capacity` positions.

    The first `append` makes the buffers, with the dtype and on the device of its keys.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self.length = 0
        """positions that are stored"""

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key and value, [batch, heads, new positions, head_dim] each, behind the earlier ones.

        Returns views of all that is stored: [batch, heads, length, head_dim] each. Raises ValueError if the positions
        are more than the capacity.
        """
        start, end = self.length, self.length + key.shape[2]
        if end > self._capacity:
            raise ValueError(f"{end} positions are more than the {self._capacity} of the key/value cache")
        if self._keys is None:
            batch, heads, _, head_dim = key.shape
            self._keys = key.new_empty(batch, heads, self._capacity, head_dim)
            self._values = torch.empty_like(self._keys)
        self._keys[:, :, start:end] = key
        self._values[:, :, start:end] = value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class KeyValueCache:
    """The caches of all layers of a model, in order. One forward stores the same positions in each.

    Args:
        num_layers: attention layers of the model.
        capacity: the most positions that can be stored.
    """

    def __init__(self, num_layers: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """The positions that are stored; those of the first layer while a forward runs."""
        return self.layers[0].length


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head (Ainslie et al. 2023)."""

    divided: DividedSequence | None = None

    def __init__(self, hidden_size: int, num_heads: int, num_key_value_heads: int):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.group_size = num_heads // num_key_value_heads
        key_value_size = num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, key_value_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, key_value_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        packed: Packed | None = None,
    ) -> Tensor:
        query = Rotate.apply(self._split_heads(self.q_proj(hidden)), cos, sin)
        key = Rotate.apply(self._split_heads(self.k_proj(hidden)), cos, sin)
        value = self._split_heads(self.v_proj(hidden))
        if packed is not None:
            context = packed_attention(query, key, value, packed.bounds)
            return self.o_proj(context.transpose(1, 2).flatten(2))
        if cache is not None:
            key, value = cache.append(key, value)
        if self.divided is not None:
            return self.o_proj(self.divided.attention(query, key, value, self._attend).flatten(2))
        return self.o_proj(self._attend(query, key, value).transpose(1, 2).flatten(2))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = self.group_size > 1
        if grouped and query.is_cuda and query.dtype not in (torch.bfloat16, torch.float16):
            # CUDA's only fused kernel for this dtype requires as many key heads as query heads. With `enable_gqa` the
            # call would use the kernel that stores the whole [seq_len, seq_len] matrix.
            key = key.repeat_interleave(self.group_size, dim=1)
            value = value.repeat_interleave(self.group_size, dim=1)
            grouped = False
        # The newest position sees all others: one token after a prompt needs no mask.
        causal = query.shape[2] == key.shape[2]
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshapes [batch, seq_len, heads * head_dim] to [batch, heads, seq_len, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_key_value_heads: int,
        rms_norm_eps: float,
    ):
        super().__init__()
        self.self_attn = Attention(hidden_size, num_heads, num_key_value_heads)
        self.mlp = MLP(hidden_size, intermediate_size)
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        packed: Packed | None = None,
    ) -> Tensor:
        """Returns hidden [batch, seq_len, hidden_size] in the same shape.

        cos, sin: [seq_len, head_dim / 2], or for `packed` rows [batch, 1, seq_len, head_dim / 2].
        """
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, cache, packed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Decoder(nn.Module):
    """Embedding, blocks and final norm: ids [batch, seq_len] -> hidden [batch, seq_len, hidden_size]."""

    divided: DividedSequence | None = None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        head_dim: int,
        blocks: Iterable[Block],
        rope_theta: float,
        rms_norm_eps: float,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(hidden_size, eps=rms_norm_eps)

    def forward(self, input_ids: Tensor, cache: KeyValueCache | None = None, segments: Tensor | None = None) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        if segments is not None:
            # Tables and bounds are arguments of the blocks, so that one computed again in backward has them too.
            positions = positions_in(segments)[:, None]
            cos, sin = rotary_tables_at(positions, self.head_dim, self.rope_theta, like=hidden)
            packed = Packed(bounds_of(segments, hidden))
            for layer in self.layers:
                hidden = layer(hidden, cos, sin, packed=packed)
            return self.norm(hidden)
        start = 0 if cache is None else cache.length
        if self.divided is not None:
            start = self.divided.start(input_ids.shape[1])
        cos, sin = rotary_tables(input_ids.shape[1], self.head_dim, self.rope_theta, like=hidden, start=start)
        for index, layer in enumerate(self.layers):
            of_cache = () if cache is None else (cache.layers[index],)
            hidden = layer(hidden, cos, sin, *of_cache)
        return self.norm(hidden)


class Llama(nn.Module):
    """Llama with a language-model head; parameters are named as in Hugging Face's LlamaForCausalLM.

    It takes packed rows (`why_not_packed` is None).

    Args:
        num_key_value_heads: key and value heads; fewer than `num_attention_heads` is grouped-query attention.
        rope_theta: base of the rotary wavelengths.
        tie_word_embeddings: `lm_head.weight` and `model.embed_tokens.weight` are one Parameter.

    Raises ValueError if a size is not positive, or a head count is not a divisor.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        rope_theta: float = 10000.0,
        rms_norm_eps: float = 1e-5,
        tie_word_embeddings: bool = False,
    ):
        sizes = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size}: must be at least 1")
        if hidden_size % (2 * num_attention_heads):
            raise ValueError(
                f"hidden_size={hidden_size}: must be a multiple of 2 x num_attention_heads={num_attention_heads}, "
                "because rotary embedding rotates pairs within a head"
            )
        if num_attention_heads % num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={num_key_value_heads}: must divide num_attention_heads={num_attention_heads}"
            )
        super().__init__()
        self.why_not_packed: str | None = None
        blocks = (
            Block(hidden_size, intermediate_size, num_attention_heads, num_key_value_heads, rms_norm_eps)
            for _ in range(num_hidden_layers)
        )
        head_dim = hidden_size // num_attention_heads
        self.vocab_size = vocab_size
        self._num_key_value_heads = num_key_value_heads
        self.model = Decoder(vocab_size, hidden_size, head_dim, blocks, rope_theta, rms_norm_eps)
        self.lm_head = Head(hidden_size, vocab_size)
        if tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        cache: KeyValueCache | None = None,
        *,
        segments: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Returns the logits, or the loss if `labels` are given.

        Args:
            input_ids: int64 [batch, seq_len].
            labels: int64 [batch, seq_len]: the token that should follow each position, so the caller shifts them.
                Positions with -100 are left out of the mean.
            cache: for inference, from `key_value_cache`: the positions of earlier calls, which those of `input_ids`
                follow. They are stored there too. Where it is not empty, `input_ids` has one position.
            segments: int64 [batch, seq_len], for packed rows: the number of the sample within its row, -1 for padding
                at the end. Positions begin at 0 in each sample, and none sees another.
            reduction: of the loss: "mean", or "none" for that of each position.

        Returns:
            Logits [batch, seq_len, vocab_size] in the parameters' dtype, or the mean loss, a float32 scalar, or each
            position's, float32 [batch, seq_len], 0 where the label is -100. With `cache` the logits of the last
            position alone: [batch, 1, vocab_size].
        """
        if labels is not None and labels.shape != input_ids.shape:
            raise ValueError(f"labels {tuple(labels.shape)} must have the shape of input_ids {tuple(input_ids.shape)}")
        if cache is None:
            return self.lm_head(self.model(input_ids, segments=segments), labels, reduction)
        if segments is not None:
            raise ValueError("segments and a cache were given: a text that is generated has a row of its own")
        if labels is not None:
            raise ValueError("labels and a cache were given: a loss is computed without a cache")
        if cache.length and input_ids.shape[1] > 1:
            raise ValueError(f"{input_ids.shape[1]} positions follow those in the cache: give them one by one")
        return self.lm_head(self.model(input_ids, cache)[:, -1:])

    @property
    def divided(self) -> DividedSequence | None:
        """The division of rows of which this rank gets its positions; None for whole rows."""
        return self.model.divided

    @divided.setter
    def divided(self, divided: DividedSequence | None) -> None:
        self.model.divided = divided
        for layer in self.model.layers:
            layer.self_attn.divided = divided

    def why_not_divided(self, count: int) -> str | None:
        """Returns None if `count` ranks can divide rows; else a clause that says why not."""
        heads = self._num_key_value_heads
        return f"{heads} heads of keys and values do not divide by {count}" if heads % count else None

    def key_value_cache(self, capacity: int) -> KeyValueCache:
        """Returns an empty cache for `capacity` positions; its memory is allocated in the next forward."""
        return KeyValueCache(len(self.model.layers), capacity)

    def flops_per_token(self, seq_len: int) -> float:
        """Returns the floating-point operations for one token, forward and backward, without recomputation.

        As in appendix B of PaLM (Chowdhery et al. 2022): 6 for every parameter of a matrix product (the head is one,
        tied or not; the embedding is a look-up), and 12 * layers * hidden_size * seq_len for the two products of
        attention. The latter are halved here, because the causal mask makes half of them unnecessary. A matrix that is
        frozen has 4, because it needs no gradient of its own.
        """
        linears = [module for module in self.modules() if isinstance(module, nn.Linear)]
        products = sum((6 if one.weight.requires_grad else 4) * one.in_features * one.out_features for one in linears)
        hidden_size = self.model.embed_tokens.embedding_dim
        return float(products + 12 * len(self.model.layers) * hidden_size * seq_len / 2)
