"""The fused linear cross-entropy, compared with torch's, and its memory."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from models.loss import (
    CHUNK_LOGITS_BYTES,
    MAX_CHUNKS,
    Head,
    linear_cross_entropy,
    token_cross_entropy,
    tokens_per_chunk,
)

TOKENS, HIDDEN, VOCAB = 37, 16, 29
WITHOUT_CUDA = {"condition": not torch.cuda.is_available(), "reason": "needs a CUDA device"}


def make_inputs(dtype=torch.float32, tokens=TOKENS, vocab=VOCAB, hidden_size=HIDDEN):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden_size, generator=generator) / 2).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[3] = labels[20] = -100
    return hidden, weight, labels


def plain_tokens(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="none")


def plain(hidden, weight, labels):
    return plain_tokens(hidden, weight, labels).sum() / (labels != -100).sum()


def loss_and_gradients(function, hidden, weight, labels, scale=1.0, **options):
    """With another gradient, some of them 0 or negative, for each token, if there is a loss for each."""
    loss = function(hidden, weight, labels, **options)
    if loss.ndim:
        scale = torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
    return loss.detach(), *torch.autograd.grad((loss * scale).sum(), (hidden, weight))


EACH = pytest.mark.parametrize(
    ("function", "plain"), [(linear_cross_entropy, plain), (token_cross_entropy, plain_tokens)], ids=["mean", "tokens"]
)


@pytest.mark.parametrize("chunk_tokens", [1, 12, 36, 37, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@EACH
def test_equals_plain_cross_entropy(function, plain, dtype, chunk_tokens):
    inputs = make_inputs(dtype)
    expected = loss_and_gradients(plain, *inputs, scale=0.3)
    actual = loss_and_gradients(function, *inputs, scale=0.3, chunk_tokens=chunk_tokens)
    tolerance = {"rtol": 3e-6, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-13, "atol": 1e-14}
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **tolerance)
    assert not actual[0].ndim or (actual[0][[3, 20]] == 0).all()


@EACH
def test_large_logits_do_not_overflow(function, plain):
    hidden, weight, labels = make_inputs()
    inputs = (hidden.detach() * 1e4).requires_grad_(), weight, labels
    expected = loss_and_gradients(plain, *inputs)
    for a, e in zip(loss_and_gradients(function, *inputs, chunk_tokens=7), expected, strict=True):
        assert torch.isfinite(a).all()
        # Logits of 40,000 have an absolute error of 0.004, in either order of summation.
        torch.testing.assert_close(a, e, rtol=1e-3, atol=2e-2 if function is token_cross_entropy else 1e-3)


@pytest.mark.parametrize("chunk_tokens", [64, 100, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(**WITHOUT_CUDA)])]
)
@EACH
def test_half_precision_is_at_least_as_accurate_as_plain(function, plain, device, dtype, chunk_tokens):
    inputs = [t.detach().to(device) for t in make_inputs(dtype, tokens=512, vocab=300, hidden_size=64)]
    inputs = [inputs[0].requires_grad_(), inputs[1].requires_grad_(), inputs[2]]
    exact = [t.detach().double().requires_grad_() for t in inputs[:2]]
    reference = loss_and_gradients(plain, *exact, inputs[2])
    by_plain = loss_and_gradients(plain, *inputs)
    by_chunks = loss_and_gradients(function, *inputs, chunk_tokens=chunk_tokens)
    for ours, plains, true in zip(by_chunks, by_plain, reference, strict=True):
        assert ours.dtype == plains.dtype
        our_error = (ours.double() - true).norm() / true.norm()
        plain_error = (plains.double() - true).norm() / true.norm()
        assert our_error <= 1.05 * plain_error + (1e-6 if device == "cuda" else 0)


@pytest.mark.parametrize(
    ("tokens", "vocab_size", "chunk_tokens"),
    [(100, 32000, 100), (10**6, 32000, 2097), (10**11, 256, 97_656_250), (1, 10**9, 1)],
)
def test_there_are_at_most_1024_chunks(tokens: int, vocab_size: int, chunk_tokens: int):
    """So the time of a plan does not grow with its tokens."""
    assert tokens_per_chunk(tokens, vocab_size) == chunk_tokens
    assert -(-tokens // chunk_tokens) <= MAX_CHUNKS


@EACH
def test_default_chunk_bounds_the_float32_logits(function, plain, monkeypatch):
    """The largest tensor of the forward is the logits of one chunk."""
    monkeypatch.setattr("models.loss.CHUNK_LOGITS_BYTES", 4 * VOCAB * 8)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    inputs = make_inputs(hidden_size=2)
    with Watch():
        function(*inputs).sum().backward()
    assert largest == 8 * VOCAB
    assert CHUNK_LOGITS_BYTES == 256 * 2**20


def test_only_ignored_labels_give_zero_loss_and_zero_gradients():
    hidden, weight, labels = make_inputs()
    loss, *gradients = loss_and_gradients(linear_cross_entropy, hidden, weight, torch.full_like(labels, -100))
    assert loss == 0
    assert all((g == 0).all() for g in gradients)


def products_of(function) -> int:
    """Returns the number of matrix products that `function` runs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        function()
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::mm", "aten::addmm"))


@pytest.mark.parametrize(
    ("function", "products"), [(linear_cross_entropy, (3, 2, 2)), (token_cross_entropy, (4, 3, 3))]
)
def test_gradients_that_are_not_needed_are_not_computed(function, products):
    hidden, weight, labels = make_inputs()
    frozen_weight, frozen_hidden = weight.detach(), hidden.detach()
    given = [(hidden, weight), (hidden, frozen_weight), (frozen_hidden, weight)]
    for (one, other), count in zip(given, products, strict=True):
        assert products_of(lambda one=one, other=other: function(one, other, labels).sum().backward()) == count
    with torch.no_grad():
        assert products_of(lambda: function(hidden, weight, labels)) == 1
    assert not function(frozen_hidden, frozen_weight, labels).requires_grad


def test_torchs_counter_of_flops_knows_each_product():
    hidden, weight, labels = make_inputs()
    with FlopCounterMode(display=False) as counter:
        token_cross_entropy(hidden, weight, labels).sum().backward()
    assert counter.get_total_flops() == 4 * 2 * hidden.numel() * weight.shape[0]


@EACH
def test_second_derivatives_are_refused_rather_than_wrong(function, plain):
    hidden, weight, labels = make_inputs()
    loss = function(hidden, weight, labels)
    scale = torch.ones(loss.shape, requires_grad=True)
    (gradient,) = torch.autograd.grad(loss, hidden, grad_outputs=scale, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_saved_tensors_pass_through_hooks():
    hidden, weight, labels = make_inputs()
    saved_shapes = []

    def save(tensor):
        saved_shapes.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        loss = linear_cross_entropy(hidden, weight, labels)
    assert saved_shapes == [hidden.shape, weight.shape]
    expected = loss_and_gradients(linear_cross_entropy, hidden, weight, labels)
    loss.backward()
    assert torch.equal(weight.grad, expected[2])


@pytest.mark.parametrize("label", [VOCAB, -1, -101])
def test_labels_out_of_range_are_refused_in_one_line(label):
    hidden, weight, labels = make_inputs()
    labels[5] = label
    for function in (linear_cross_entropy, token_cross_entropy):
        with pytest.raises(ValueError, match=f"label {label} is outside the vocabulary of {VOCAB}") as refusal:
            function(hidden, weight, labels)
        assert "\n" not in str(refusal.value)


def test_head_returns_logits_or_the_loss_of_batched_hidden():
    head = Head(HIDDEN, VOCAB)
    hidden, _, labels = make_inputs(tokens=36)
    hidden, labels = hidden.detach().view(4, 9, HIDDEN), labels.view(4, 9)
    logits = head(hidden)
    assert logits.shape == (4, 9, VOCAB)
    torch.testing.assert_close(head(hidden, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    expected = plain_tokens(hidden.view(36, HIDDEN), head.weight, labels.flatten()).view(4, 9)
    torch.testing.assert_close(head(hidden, labels, "none"), expected)


def test_a_head_refuses_other_reductions():
    hidden, _, labels = make_inputs()
    with pytest.raises(ValueError, match="reduction='sum': must be mean or none"):
        Head(HIDDEN, VOCAB)(hidden, labels, "sum")


@pytest.mark.gpu
@pytest.mark.skipif(**WITHOUT_CUDA)
def test_cuda_peak_memory_is_that_of_a_chunk_not_of_the_batch():
    tokens, vocab, hidden_size = 16384, 32000, 256
    inputs = make_inputs(torch.bfloat16, tokens=tokens, vocab=vocab, hidden_size=hidden_size)
    hidden, weight, labels = (t.detach().cuda() for t in inputs)
    hidden.requires_grad_()
    weight.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels).backward()
    extra_bytes = torch.cuda.max_memory_allocated() - before_bytes
    assert extra_bytes < 2 * CHUNK_LOGITS_BYTES < 4 * tokens * vocab / 3
