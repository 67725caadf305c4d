"""causal_lm: predicts each next token of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hydra.utils import get_class
from omegaconf import DictConfig
from torch import Tensor, nn

from models.generation import can_generate, largest_forwards
from training.batches import Batch
from training.errors import UserError
from training.tasks.task import Sampler, Task
from training.tasks.text_samples import TextSampler, check_vocabulary, refuse_positions

# The most tokens of a microbatch at microbatches=auto. On 16k tokens a block of 4096 already computes for longer than
# an H200 copies its weights in and its gradients out. But the update hides behind the first microbatch's forward alone.
TOKENS_OF_MICROBATCH = 32768


class CausalLM(Task):
    """Language modelling. A batch is int64 [sequences, seq_len + 1]: inputs `[:, :-1]`, labels `[:, 1:]`.

    The model returns its mean loss, in nats a token, from `model(input_ids, labels)`.
    """

    unit = "tokens"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[:, :-1], batch[:, 1:])

    def units(self, config: DictConfig) -> int:
        return config.batch_size * config.seq_len

    def microbatches(self, config: DictConfig) -> int:
        return min(-(-self.units(config) // TOKENS_OF_MICROBATCH), config.batch_size)

    def flops(self, model: nn.Module, config: DictConfig) -> float | None:
        per_token = getattr(model, "flops_per_token", None)
        return None if per_token is None else self.units(config) * per_token(config.seq_len)

    def meta_batch(self, config: DictConfig, examples: int) -> Batch:
        return torch.empty((examples, config.seq_len + 1), dtype=torch.int64, device="meta")

    def check_model(self, config: DictConfig, model: nn.Module) -> None:
        if not hasattr(model, "vocab_size"):
            raise UserError(
                f"task=causal_lm: {type(model).__name__} has no vocabulary: choose a language model, or for images"
                " task=flow_matching or classification, and a dataset of images"
            )
        dataset = get_class(config.dataset._target_)
        if hasattr(dataset, "meta_batch"):
            # `check` would say so of a run, but a plan makes no dataset.
            raise _without_tokens()
        refuse_positions(model, config.seq_len, f"seq_len={config.seq_len}")

    def check(self, config: DictConfig, dataset: object, model: nn.Module) -> None:
        if not hasattr(dataset, "vocab_size"):
            raise _without_tokens()
        check_vocabulary(model, dataset.vocab_size)

    def sample_forwards(self, config: DictConfig, model: nn.Module) -> Sequence[Callable[[], object]]:
        if not can_generate(model):
            return ()
        # A plan reads no tokenizer. No token is less than a byte, and `sampler` refuses more than seq_len.
        longest = len(config.sample.prompt.encode()) + 1 + config.sample.tokens
        return largest_forwards(model, min(longest, config.seq_len))

    def sampler(self, config: DictConfig, model: nn.Module) -> Sampler:
        return TextSampler.of(config, model)


def _without_tokens() -> UserError:
    return UserError("task=causal_lm: the dataset has no tokens: take dataset=stdlib, text or hub")
