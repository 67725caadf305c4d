"""Computes the cross-entropy of a linear head without storing the logits of the whole batch.

For 16k tokens and a vocabulary of 128k the float32 logits are 8 GiB, and their gradient another 8 GiB. Here forward
computes the head's product, the softmax and both gradients for one chunk of tokens after another, so that only one
chunk's logits exist at a time. Backward only scales these gradients. The method is Liger-Kernel's fused linear
cross-entropy (Hsu et al. 2024).
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED_LABEL = -100
CHUNK_LOGITS_BYTES = 256 * 2**20
# Chunks are larger where there would be more of them: otherwise the time of a plan would grow with its tokens.
MAX_CHUNKS = 1024
# Device types on which one product of narrow factors has a wide result. Meta tensors stand for those of a GPU.
WIDE_PRODUCT_DEVICES = ("cuda", "meta")


class Head(nn.Linear):
    """Projects onto the vocabulary, and also computes the loss if it is given labels.

    So even in training, the weight is read only in the forward of the module that owns it.
    """

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Returns logits [..., vocab_size] for hidden [..., hidden_size], or the loss for int64 labels [...].

        That is the mean, or with `reduction="none"` each token's [...]. For it, hidden states of another dtype are
        converted to that of the weight.
        """
        if labels is None:
            return super().forward(hidden)
        # Models that add up float32 residuals beside bf16 weights (Mamba's) have hidden states of float32.
        losses = linear_cross_entropy if averages(reduction) else token_cross_entropy
        return losses(hidden.to(self.weight.dtype), self.weight, labels)


def averages(reduction: str) -> bool:
    """Returns True for "mean" and False for "none"; raises ValueError for any other name."""
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction={reduction!r}: must be mean or none")
    return reduction == "mean"


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """Returns the mean cross-entropy of `hidden @ weight.T` over the labels that are not -100.

    It equals `F.cross_entropy((hidden @ weight.T).float(), labels)`, with one exception: if all labels are -100, the
    loss and its gradients are 0, not NaN, so that such a microbatch adds nothing to an accumulated gradient.

    Args:
        hidden: [..., hidden_size], float32, bfloat16, float16 or float64.
        weight: [vocab_size, hidden_size], of the dtype of `hidden`.
        labels: int64 [...], in [0, vocab_size) or -100.
        chunk_tokens: the tokens of a chunk; by default `tokens_per_chunk`.

    Returns:
        A scalar: float32, or float64 for float64 inputs.

    Raises ValueError if a label on the CPU is out of range. On CUDA the check would wait for the device; there such a
    label fails with a device-side assertion.
    """
    hidden, labels, chunk_tokens = _flat(hidden, weight, labels, chunk_tokens)
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, torch.is_grad_enabled())


def token_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """Returns the cross-entropy of each label, 0 where it is -100; otherwise as `linear_cross_entropy`.

    Backward computes the logits of each chunk again, which takes the time of one more product of the head.

    Returns:
        [...], the shape of `labels`: float32, or float64 for float64 inputs.
    """
    shape = labels.shape
    hidden, labels, chunk_tokens = _flat(hidden, weight, labels, chunk_tokens)
    return _TokenCrossEntropy.apply(hidden, weight, labels, chunk_tokens).view(shape)


def _flat(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None) -> tuple[Tensor, Tensor, int]:
    """Returns hidden [tokens, hidden_size] and labels [tokens], which it checks, and the tokens of a chunk."""
    labels = labels.reshape(-1)
    if labels.device.type == "cpu":
        _check_labels(labels, weight.shape[0])
    if chunk_tokens is None:
        chunk_tokens = tokens_per_chunk(len(labels), weight.shape[0])
    return hidden.reshape(-1, hidden.shape[-1]), labels, chunk_tokens


def tokens_per_chunk(tokens: int, vocab_size: int) -> int:
    """Returns the number of tokens whose logits take 256 MiB, or more if there would be more than 1024 chunks."""
    return min(tokens, max(CHUNK_LOGITS_BYTES // (4 * vocab_size), -(-tokens // MAX_CHUNKS), 1))


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    wrong = labels[(labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocab_size))]
    if wrong.numel():
        raise ValueError(
            f"label {wrong[0].item()} is outside the vocabulary of {vocab_size}: "
            f"use token ids below vocab_size, or {IGNORED_LABEL} to leave a position out"
        )


class _Gradients:
    """The gradients of `hidden` and `weight`, added up chunk by chunk; None for one that is not needed."""

    def __init__(self, hidden: Tensor, weight: Tensor, wide: torch.dtype, hidden_needed: bool, weight_needed: bool):
        self._hidden, self._weight = hidden, weight
        self.needed = hidden_needed or weight_needed
        self._of_hidden = torch.empty_like(hidden) if hidden_needed else None
        self._of_weight = torch.zeros_like(weight, dtype=wide) if weight_needed else None

    def add(self, chunk: slice, probabilities: Tensor, label: Tensor, scale: Tensor) -> None:
        """Adds those of a chunk, given its softmax times `scale` [tokens, 1], which is overwritten."""
        probabilities.scatter_(1, label, probabilities.gather(1, label) - scale)
        logits_grad = probabilities.to(self._hidden.dtype)
        if self._of_hidden is not None:
            self._of_hidden[chunk] = logits_grad @ self._weight
        if self._of_weight is not None:
            _add_product(self._of_weight, logits_grad.t(), self._hidden[chunk])

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns both in the dtype of their tensors."""
        of_weight = self._of_weight
        return self._of_hidden, None if of_weight is None else of_weight.to(self._weight.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, grad_enabled: bool):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        counted = labels != IGNORED_LABEL
        labels = labels.where(counted, 0)
        # On the device: reading the count on the host would make the host wait.
        label_share = counted.to(wide) / counted.sum().clamp(min=1)

        loss = torch.zeros((), dtype=wide, device=hidden.device)
        # needs_input_grad is True even under no_grad.
        gradients = _Gradients(hidden, weight, wide, *(grad_enabled and needed for needed in ctx.needs_input_grad[:2]))
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            label, share = labels[chunk, None], label_share[chunk, None]
            # One buffer, overwritten in place: logits, then their exponentials, then the gradient of the logits.
            buffer = _product(hidden[chunk], weight.t(), wide)
            buffer.sub_(buffer.amax(dim=-1, keepdim=True))
            label_logit = buffer.gather(1, label)
            normaliser = buffer.exp_().sum(dim=-1, keepdim=True)
            loss += ((normaliser.log() - label_logit) * share).sum()
            if gradients.needed:
                gradients.add(chunk, buffer.mul_(share / normaliser), label, share)
            # Freed before the next chunk's logits are made.
            del buffer
        ctx.save_for_backward(*gradients.results())
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_grad: Tensor):
        found = (None if gradient is None else gradient * loss_grad for gradient in ctx.saved_tensors)
        return *found, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        counted = labels != IGNORED_LABEL
        known = labels.where(counted, 0)
        losses = torch.empty(len(labels), dtype=wide, device=hidden.device)
        normalisers = torch.empty_like(losses)
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = _product(hidden[chunk], weight.t(), wide)
            label_logits = logits.gather(1, known[chunk, None]).squeeze(1)
            largest = logits.amax(dim=-1, keepdim=True)
            # One buffer, overwritten in place.
            sums = logits.sub_(largest).exp_().sum(dim=-1)
            normalisers[chunk] = sums.log_().add_(largest.squeeze(1))
            losses[chunk] = normalisers[chunk] - label_logits
            # Freed before the next chunk's logits are made.
            del logits
        ctx.chunk_tokens = chunk_tokens
        ctx.save_for_backward(hidden, weight, labels, normalisers)
        return losses.masked_fill_(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, losses_grad: Tensor):
        hidden, weight, labels, normalisers = ctx.saved_tensors
        counted = labels != IGNORED_LABEL
        known = labels.where(counted, 0)
        losses_grad = losses_grad.masked_fill(~counted, 0)
        gradients = _Gradients(hidden, weight, normalisers.dtype, *ctx.needs_input_grad[:2])
        for start in range(0, len(labels), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            grad = losses_grad[chunk, None]
            buffer = _product(hidden[chunk], weight.t(), normalisers.dtype)
            gradients.add(chunk, buffer.sub_(normalisers[chunk, None]).exp_().mul_(grad), known[chunk, None], grad)
            del buffer
        return *gradients.results(), None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a @ b as `dtype`; on CUDA without rounding the hardware's float32 sums to a narrower dtype first."""
    if a.dtype != dtype and a.device.type in WIDE_PRODUCT_DEVICES:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to `total`, whose dtype may be wider; the product is not rounded to the dtype of the factors."""
    if a.dtype != total.dtype and a.device.type in WIDE_PRODUCT_DEVICES:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)
