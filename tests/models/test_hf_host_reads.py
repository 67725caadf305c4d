from __future__ import annotations

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from models.hf_host_reads import one_sequence_a_row
from tests.models.helpers.hf_models import LANGUAGE, batch, tiny

PACKED = torch.tensor([[0, 1, 2, 0, 1]])
# torch multiplies the rows of experts on the meta device in bf16 alone; tests/models/test_hf_modes.py plans them.
WITH_EXPERTS = {"mixtral", "mixtral_balanced", "gpt_oss", "deepseek_v3", "qwen3_next"}


class Reads(TorchDispatchMode):
    """Counts the values that the host reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def search() -> torch.Tensor | None:
    return masking_utils.find_packed_sequence_indices(PACKED)


def test_the_search_is_left_out_in_the_block_alone():
    assert search().tolist() == [[0, 0, 0, 1, 1]]
    with one_sequence_a_row():
        assert search() is None
        with one_sequence_a_row():
            assert search() is None
        assert search() is None
    assert search() is not None


def test_the_search_is_left_out_in_one_thread_alone():
    found = []
    with one_sequence_a_row():
        thread = threading.Thread(target=lambda: found.append(search()))
        thread.start()
        thread.join()
    assert found[0] is not None


def test_an_error_ends_the_block():
    with pytest.raises(KeyError), one_sequence_a_row():
        raise KeyError
    assert search() is not None


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_transformers_itself_reads_the_positions(name: str):
    with Reads() as reads:
        tiny(name).hf(input_ids=batch(name)[0])
    assert reads.count


@pytest.mark.parametrize("name", ["bart", *sorted(LANGUAGE.keys() - WITH_EXPERTS)])
def test_a_step_reads_nothing_back(name: str):
    model = tiny(name, "meta").train()
    with Reads() as reads:
        model(*(argument.to("meta") for argument in batch(name))).backward()
    assert reads.count == 0
