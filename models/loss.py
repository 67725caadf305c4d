"""Cross-entropy of a linear head, without the logits of the whole batch.

For 16k tokens and a vocabulary of 128k the float32 logits alone are 8 GiB, and their gradient as much
again. Here the head's product, the softmax and both gradients are computed for a few tokens at a time,
during forward, so that one chunk's logits exist at once; backward only scales what forward found. The
method is Liger-Kernel's fused linear cross-entropy (Hsu et al. 2024).
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORED_LABEL = -100
CHUNK_LOGITS_BYTES = 256 * 2**20
# Of so many tokens that there would be more, chunks are larger: else a plan of any size would take any time.
MOST_CHUNKS = 1024
# Devices whose products take narrow factors to a wide result; meta tensors stand for a GPU's.
FUSED_TYPES = ("cuda", "meta")


class Head(nn.Linear):
    """Projection onto the vocabulary, which goes on to the loss where it is given labels.

    So the weight is read in its own module's forward only, in training as well.
    """

    def __init__(self, hidden_size: int, vocab_size: int):
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [..., vocab_size] of hidden [..., hidden_size], or the mean loss of int64 labels [...]."""
        if labels is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden, self.weight, labels)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T` over the labels that are not -100.

    Equals `F.cross_entropy((hidden @ weight.T).float(), labels)`, except that where every label is ignored
    the loss and its gradients are 0 instead of NaN: such a microbatch adds nothing to an accumulated
    gradient.

    Args:
        hidden: [..., hidden_size], float32, bfloat16, float16 or float64.
        weight: [vocab_size, hidden_size], of the dtype of `hidden`.
        labels: int64 [...], in [0, vocab_size) or -100.
        chunk_tokens: tokens whose logits exist at once; by default `tokens_at_once`.

    Returns:
        Scalar; float32, or float64 for float64 inputs.

    Raises:
        ValueError: a label out of range, on the CPU; on CUDA, where looking would wait for the device, the
            look-up of the label's logit fails with a device-side assertion.
    """
    vocab_size = weight.shape[0]
    hidden = hidden.reshape(-1, hidden.shape[-1])
    labels = labels.reshape(-1)
    if labels.device.type == "cpu":
        _check_labels(labels, vocab_size)
    if chunk_tokens is None:
        chunk_tokens = tokens_at_once(len(labels), vocab_size)
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunk_tokens, torch.is_grad_enabled())


def tokens_at_once(tokens: int, vocab_size: int) -> int:
    """Of `tokens`, those whose logits exist at once: as many as make 256 MiB, or more, for at most 1024 chunks."""
    return min(tokens, max(CHUNK_LOGITS_BYTES // (4 * vocab_size), -(-tokens // MOST_CHUNKS), 1))


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    wrong = labels[(labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocab_size))]
    if wrong.numel():
        raise ValueError(
            f"label {wrong[0].item()} is outside the vocabulary of {vocab_size}: "
            f"use token ids below vocab_size, or {IGNORED_LABEL} to leave a position out"
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int, grad_enabled: bool):
        # needs_input_grad alone is True under no_grad as well.
        hidden_needs_grad = grad_enabled and ctx.needs_input_grad[0]
        weight_needs_grad = grad_enabled and ctx.needs_input_grad[1]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        counted = labels != IGNORED_LABEL
        labels = labels.where(counted, 0)
        # Stays on the device: reading the count on the host would make the step wait.
        label_share = counted.to(wide) / counted.sum().clamp(min=1)

        loss = torch.zeros((), dtype=wide, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if hidden_needs_grad else None
        weight_grad = torch.zeros_like(weight, dtype=wide) if weight_needs_grad else None
        for start in range(0, len(labels), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            label, share = labels[chunk, None], label_share[chunk, None]

            # One buffer, rewritten in place: logits, their exponentials, the gradient of the logits.
            buffer = _product(hidden[chunk], weight.t(), wide)
            buffer.sub_(buffer.amax(dim=-1, keepdim=True))
            label_logit = buffer.gather(1, label)
            normaliser = buffer.exp_().sum(dim=-1, keepdim=True)
            loss += ((normaliser.log() - label_logit) * share).sum()
            if not (hidden_needs_grad or weight_needs_grad):
                continue
            buffer.mul_(share / normaliser)
            buffer.scatter_(1, label, buffer.gather(1, label) - share)
            logits_grad = buffer.to(hidden.dtype)
            if hidden_needs_grad:
                hidden_grad[chunk] = logits_grad @ weight
            if weight_needs_grad:
                _add_product(weight_grad, logits_grad.t(), hidden[chunk])
            # Or they would still be held while the next chunk's logits are made.
            del buffer, logits_grad

        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_grad: Tensor):
        hidden_grad, weight_grad = ctx.saved_tensors
        return (
            None if hidden_grad is None else hidden_grad * loss_grad,
            None if weight_grad is None else weight_grad * loss_grad,
            None,
            None,
            None,
        )


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b as `dtype`; on CUDA a bfloat16 product keeps the float32 sums that the hardware makes anyway."""
    if a.dtype != dtype and a.device.type in FUSED_TYPES:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where `total` may be wider than the factors, and nothing is rounded to theirs."""
    if a.dtype != total.dtype and a.device.type in FUSED_TYPES:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
