"""The Llama model: its numbers, its names, and what offload modes require of it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from models.initialise import initialise
from models.llama import Attention, KeyValueCache, LayerCache, Llama, Rotate, rotary_tables
from tests.models.helpers.hugging_face import HUGGING_FACE_SHAPES, SIZES
from tests.models.helpers.packed import SEGMENTS, counted, losses_alone, packed_batch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def make_model(dtype=torch.float32, **changes) -> Llama:
    model = Llama(**{**SIZES, **changes}).to(dtype)
    initialise(model, seed=0)
    # Larger values than a new model's, so that attention is far from uniform and norms are not all ones.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 + torch.rand(parameter.shape) if "norm" in name else 8)
    return model


def make_ids(batch=2, seq_len=12, seed=0):
    return torch.randint(0, 50, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


def test_parameters_have_hugging_faces_names_and_shapes():
    shapes = {name: tuple(p.shape) for name, p in Llama(**SIZES).named_parameters()}
    assert shapes == HUGGING_FACE_SHAPES
    assert list(Llama(**SIZES).state_dict()) == list(HUGGING_FACE_SHAPES)


def test_logits_equal_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's own Llama")
    config = transformers.LlamaConfig(
        **SIZES, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, attn_implementation="sdpa"
    )
    reference = transformers.LlamaForCausalLM(config)
    model = make_model()
    reference.load_state_dict(model.state_dict())
    ids = make_ids()
    torch.testing.assert_close(model(ids), reference(ids).logits, rtol=1e-5, atol=1e-5)


def test_tied_head_is_one_parameter():
    model = make_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [name for name, _ in model.named_parameters()] == list(HUGGING_FACE_SHAPES)[:-1]
    ids = make_ids()
    model(ids, ids).backward()

    untied = make_model()
    untied.load_state_dict(model.state_dict())
    untied(ids, ids).backward()
    both = untied.lm_head.weight.grad + untied.model.embed_tokens.weight.grad
    torch.testing.assert_close(model.lm_head.weight.grad, both)


def test_gradients_of_rotation():
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    tables = rotary_tables(5, 8, 10000.0, like=x)
    assert torch.autograd.gradcheck(Rotate.apply, (x, *tables))
    assert torch.autograd.gradgradcheck(Rotate.apply, (x, *tables))


def test_autocast_trains():
    model, ids = make_model(), make_ids()
    model(ids, ids).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, ids)
    loss.backward()
    assert loss.dtype == torch.float32
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad - gradient).norm() < 0.1 * gradient.norm()


def test_rotary_tables_distinguish_far_positions_in_bfloat16():
    cos, _ = rotary_tables(4096, 8, 10000.0, like=torch.empty(0, dtype=torch.bfloat16))
    reference, _ = rotary_tables(4096, 8, 10000.0, like=torch.empty(0, dtype=torch.float32))
    assert cos.dtype == torch.bfloat16
    torch.testing.assert_close(cos.float(), reference, rtol=0, atol=2**-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_follow_the_parameters_dtype_and_the_loss_is_float32(dtype):
    model, ids = make_model(dtype), make_ids()
    logits = model(ids)
    assert logits.dtype == dtype
    assert logits.shape == (2, 12, 50)
    loss = model(ids, ids)
    assert loss.dtype == torch.float32
    assert loss.shape == ()


def test_loss_is_the_cross_entropy_of_the_logits():
    model, ids, labels = make_model(), make_ids(), make_ids(seed=1)
    labels[0, :5] = -100
    model(ids, labels).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
    expected.backward()
    torch.testing.assert_close(model(ids, labels), expected)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def test_parameters_are_read_only_while_their_own_module_runs():
    """Weight streaming relies on it: outside its module's forward, a parameter has no defined value."""
    model, ids = make_model(tie_word_embeddings=True), make_ids()
    expected = model(ids, ids)
    owners = [module for module in model.modules() if list(module.parameters(recurse=False))]
    values = {module: {n: p.detach().clone() for n, p in module.named_parameters(recurse=False)} for module in owners}

    def write(module, value_of):
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.copy_(value_of(name))

    for module in owners:
        write(module, lambda name: torch.tensor(float("nan")))
        module.register_forward_pre_hook(lambda module, args: write(module, values[module].__getitem__))
        module.register_forward_hook(lambda module, args, out: write(module, lambda name: torch.tensor(float("nan"))))
    with torch.no_grad():
        assert torch.equal(model(ids, ids), expected)


def test_flops_per_token_counts_what_torch_counts():
    model, ids = make_model(), make_ids()
    with FlopCounterMode(display=False) as counter, nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    # The math kernel computes the masked half of attention too: 12 * layers * hidden_size * seq_len / 2 more.
    masked = 12 * 2 * 32 * 12 / 2
    whole = model.flops_per_token(seq_len=12)
    assert counter.get_total_flops() / ids.numel() == whole + masked
    # A frozen matrix needs no gradient of its own.
    model.lm_head.requires_grad_(False)
    assert model.flops_per_token(seq_len=12) == whole - 2 * model.lm_head.weight.numel()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, r"hidden_size=30: .* num_attention_heads=4"),
        ({"hidden_size": 20}, r"hidden_size=20: .* num_attention_heads=4"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3: must divide num_attention_heads=4"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads=0: must be at least 1"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers=0: must be at least 1"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as refusal:
        Llama(**{**SIZES, **changes})
    assert "\n" not in str(refusal.value)


def test_labels_of_another_shape_are_refused():
    model, ids = make_model(), make_ids()
    with pytest.raises(ValueError, match=r"labels \(2, 11\)"):
        model(ids, ids[:, 1:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_attention_never_stores_the_score_matrix_on_cuda(dtype, heads):
    seq_len = 8192
    attention = Attention(64, *heads).to("cuda", dtype)
    hidden = torch.randn(1, seq_len, 64, device="cuda", dtype=dtype, requires_grad=True)
    tables = rotary_tables(seq_len, 16, 10000.0, like=hidden)
    torch.cuda.reset_peak_memory_stats()
    attention(hidden, *tables).sum().backward()
    assert torch.cuda.max_memory_allocated() < 4 * seq_len**2 * dtype.itemsize / 2


@torch.no_grad()
def test_logits_with_a_cache_are_those_of_the_whole_sequence():
    model, ids = make_model(), make_ids()
    cache, whole = model.key_value_cache(12), model(ids)
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 12)):
        logits = model(ids[:, start:end], cache=cache)
        assert logits.shape == (2, 1, whole.shape[2])
        torch.testing.assert_close(logits[:, 0], whole[:, end - 1], rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="give them one by one"):
        model(ids[:, :2], cache=cache)
    with pytest.raises(ValueError, match="a loss is computed without a cache"):
        model(ids, ids, cache=model.key_value_cache(12))


class TestPackedRows:
    def test_samples_in_a_row_are_as_if_alone(self):
        model = make_model()
        assert model.why_not_packed is None
        ids, labels = packed_batch()
        found, alone = model(ids, labels, segments=SEGMENTS, reduction="none"), losses_alone(model)
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
        together = model(ids, labels, reduction="none")
        assert (together - alone)[:, 6:].abs().max() > 1e-3
        mean = model(ids, labels, segments=SEGMENTS)
        torch.testing.assert_close(mean, alone.sum() / (labels != -100).sum())

    def test_a_sample_has_the_gradients_of_the_sample_alone(self):
        model = make_model()
        ids, labels = packed_batch()
        model(ids, labels, segments=SEGMENTS, reduction="none").sum().backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        losses_alone(model).sum().backward()
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-4)

    def test_segments_and_a_cache_are_refused(self):
        model, ids = make_model(), make_ids()
        with pytest.raises(ValueError, match="segments and a cache were given"):
            model(ids, cache=model.key_value_cache(12), segments=torch.zeros_like(ids))

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    def test_the_kernel_is_as_near_to_exact_numbers_as_masks(self):
        exact = make_model()
        with torch.no_grad():
            expected = losses_alone(exact)
            model = exact.to("cuda", torch.bfloat16)
            ids, labels = (tensor.cuda() for tensor in packed_batch())
            by_masks = model(ids, labels, segments=SEGMENTS.cuda(), reduction="none").cpu()
            by_kernel = model(ids, labels, segments=counted(SEGMENTS, "cuda"), reduction="none").cpu()
        assert (by_kernel - expected).norm() < 1.2 * (by_masks - expected).norm() + 0.01 * expected.norm()


def test_a_padded_row_is_the_sample_alone():
    """No position sees a later one, so padding at the end needs no mask."""
    model, (ids, labels) = make_model(), packed_batch()
    padded = model(ids, labels.masked_fill(torch.arange(12) >= 7, -100), reduction="none")
    torch.testing.assert_close(padded[:, :7], model(ids[:, :7], labels[:, :7], reduction="none"), rtol=1e-5, atol=1e-5)
    assert not padded[:, 7:].any()


def test_positions_are_stored_behind_each_other():
    cache, key = LayerCache(4), torch.rand(2, 3, 4, 5)
    cache.append(key[:, :, :3], -key[:, :, :3])
    keys, values = cache.append(key[:, :, 3:], -key[:, :, 3:])
    assert torch.equal(keys, key)
    assert torch.equal(values, -key)
    with pytest.raises(ValueError, match="5 positions are more than the 4 of the key/value cache"):
        cache.append(key[:, :, :1], key[:, :, :1])
    assert cache.length == 4


def test_each_layer_has_its_own():
    cache = KeyValueCache(2, 3)
    cache.layers[0].append(torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 2))
    assert (cache.length, cache.layers[1].length) == (2, 0)
