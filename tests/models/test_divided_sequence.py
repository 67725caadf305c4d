"""Ranks that divide rows compute what one device does: attention, its gradients, and a whole Llama."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.divided_sequence import DividedSequence
from models.llama import Llama
from tests.models.helpers.divided import Threads, check_in_parts
from tests.models.helpers.hugging_face import SIZES
from tests.models.helpers.packed import far_from_uniform


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_attention_and_its_gradients_are_those_of_whole_rows(count: int):
    """Rows are in the order of memory in which projections make them; values have fewer numbers than keys."""
    torch.manual_seed(0)
    heads = {"query": (8, 6), "key": (4, 6), "value": (4, 3)}
    whole = [torch.randn(3, 8, *sizes).transpose(1, 2).requires_grad_() for sizes in heads.values()]
    expected = attend(*whole).transpose(1, 2)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()

    def on_rank(sequence: DividedSequence) -> tuple[Tensor, list[Tensor]]:
        own = [x.detach().chunk(count, dim=2)[sequence.rank].requires_grad_() for x in whole]
        found = sequence.attention(*own, attend)
        (found * weights.chunk(count, dim=1)[sequence.rank]).sum().backward()
        return found.detach(), [x.grad for x in own]

    with ThreadPoolExecutor(count) as pool:
        found, gradients = zip(*pool.map(on_rank, Threads(count).sequences), strict=True)
    assert torch.equal(torch.cat(found, dim=1), expected)
    for x, parts in zip(whole, zip(*gradients, strict=True), strict=True):
        assert torch.equal(torch.cat(parts, dim=2), x.grad)


def test_a_plan_exchanges_nothing_and_has_the_shapes_of_one_rank():
    seen = []

    def watched(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.extend((query.shape, key.shape))
        return attend(query, key, value)

    query, key = (torch.empty(2, heads, 5, 4, device="meta") for heads in (6, 3))
    assert DividedSequence(3).attention(query, key, key, watched).shape == (2, 5, 6, 4)
    assert seen == [(2, 2, 15, 4), (2, 1, 15, 4)]


@pytest.mark.parametrize(("heads", "wrong"), [((6, 4), "6 attention heads"), ((8, 2), "2 heads of keys and values")])
def test_heads_that_do_not_divide_are_refused(heads: tuple[int, int], wrong: str):
    query, key = (torch.empty(1, number, 5, 4, device="meta") for number in heads)
    with pytest.raises(ValueError, match=f"^{wrong} do not divide by 4$"):
        DividedSequence(4).attention(query, key, key, attend)


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_compute_the_losses_and_gradients_of_a_llama(count: int):
    torch.manual_seed(0)
    model = far_from_uniform(Llama(**SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32}))
    ids, labels = torch.randint(0, 50, (2, 2, 16))
    labels[:, 3:9] = -100
    check_in_parts(model, ids, labels, count)


def test_a_llama_tells_whether_its_rows_can_be_divided():
    with torch.device("meta"):
        model = Llama(**SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 32})
    assert model.why_not_divided(4) is None
    assert model.why_not_divided(8) == "4 heads of keys and values do not divide by 8"
