"""The chain of stages computes the loss of the model, with its parameters, bit for bit."""

import pytest
import torch
from torch import nn

from models.llama import Llama
from peers.peer import PeerError
from peers.stages import ChainPeer, stages

SIZES = {
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_the_chain_computes_loss_and_gradients_of_the_model():
    torch.manual_seed(0)
    model = Llama(**SIZES)
    ids, labels = torch.randint(0, 11, (2, 3, 5))
    expected = model(ids, labels)
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    chain = stages(model)
    state = chain[0](ids, labels)
    for stage in chain[1:]:
        # As one tuple, and as two arguments.
        state = stage(state) if stage is chain[1] else stage(*state)
    state.backward()
    assert torch.equal(state, expected)
    assert all(map(torch.equal, (parameter.grad for parameter in model.parameters()), gradients))
    assert {id(p) for stage in chain for p in stage.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("model", [nn.Linear(1, 1), Llama(**SIZES, tie_word_embeddings=True)], ids=["other", "tied"])
def test_what_is_no_chain_is_refused(model: nn.Module):
    mode = ChainPeer()
    mode.option = "x"
    with pytest.raises(PeerError, match=r"^offload=x: "):
        mode.footprint(model)
    assert mode.footprint(Llama(**SIZES)).resident_bytes > 0
