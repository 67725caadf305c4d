"""causal_lm: predicts each next token of a text."""

from collections.abc import Callable, Sequence

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from models.generation import can_generate, largest_forwards
from training.batches import Batch, real_tokens
from training.errors import UserError
from training.tasks.task import Sampler, Task

# The most tokens of a microbatch at microbatches=auto. On 16k tokens a block of 4096 already computes for longer than
# an H200 copies its weights in and its gradients out. But the update hides behind the first microbatch's forward alone.
TOKENS_OF_MICROBATCH = 32768
NO_SEGMENTS = "its forward has no argument that says which tokens belong together"


class CausalLM(Task):
    """Language modelling. A batch is int64 [sequences, seq_len + 1]: inputs `[:, :-1]`, labels `[:, 1:]`.

    Or, as of chats, a dictionary of `input_ids` and `labels`, int64 [rows, L]: a label is the token that follows its
    input, or -100 where nothing is trained. Packed rows have `segments` [rows, L] too: the number of each token's
    sample in its row, -1 for padding. `lengths` [rows] are the tokens of padded rows: a model that
    `balances_experts` leaves padding out of the auxiliary loss.

    The model returns its mean loss, in nats a token, from `model(input_ids, labels)`, of packed rows from
    `model(input_ids, labels, segments=segments)`.
    """

    unit = "tokens"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if isinstance(batch, Tensor):
            return model(batch[:, :-1], batch[:, 1:])
        given = {"segments": batch["segments"]} if "segments" in batch else {}
        if getattr(model, "balances_experts", False) and (real := real_tokens(batch)) is not None:
            given["real"] = real
        return model(batch["input_ids"], batch["labels"], **given)

    def units(self, config: DictConfig) -> int:
        return config.batch_size * config.seq_len

    def microbatches(self, config: DictConfig) -> int:
        return min(-(-self.units(config) // TOKENS_OF_MICROBATCH), config.batch_size)

    def flops(self, model: nn.Module, config: DictConfig) -> float | None:
        per_token = getattr(model, "flops_per_token", None)
        return None if per_token is None else self.units(config) * per_token(config.seq_len)

    def meta_batch(self, config: DictConfig, examples: int) -> Batch:
        dataset = get_class(config.dataset._target_)
        if not hasattr(dataset, "meta_tokens"):
            return torch.empty((examples, config.seq_len + 1), dtype=torch.int64, device="meta")
        keys = OmegaConf.to_container(config.dataset, resolve=True)
        given = {key: keys[key] for key in keys if not key.startswith("_")}
        return dataset.meta_tokens(examples, config.seq_len, **given)

    def check_model(self, config: DictConfig, model: nn.Module) -> None:
        # Not at the top: composing imports the tasks, and these import safetensors.
        from training.tasks.text_samples import refuse_positions

        if not hasattr(model, "vocab_size"):
            raise UserError(
                f"task=causal_lm: {type(model).__name__} has no vocabulary: choose a language model, or for images"
                " task=flow_matching or classification, and a dataset of images"
            )
        dataset = get_class(config.dataset._target_)
        if hasattr(dataset, "meta_batch"):
            # `check` would say so of a run, but a plan makes no dataset.
            raise _without_tokens()
        if getattr(dataset, "has_pairs", False):
            raise UserError("task=causal_lm: the dataset has pairs of answers: take task=dpo, or dataset=chat")
        if not config.dataset.get("packed"):
            refuse_positions(model, config.seq_len, f"seq_len={config.seq_len}")
        elif (why := getattr(model, "why_not_packed", NO_SEGMENTS)) is not None:
            raise UserError(
                f"dataset.packed=true: the model takes no packed rows, because {why}: take dataset.packed=false"
            )
        elif (most := getattr(model, "most_packed", None)) is not None and config.seq_len > most:
            raise UserError(
                f"dataset.packed=true: packed rows of this model have at most {most} tokens, because its attention"
                f" counts them: take seq_len={most} or less, or dataset.packed=false"
            )

    def check(self, config: DictConfig, dataset: object, model: nn.Module) -> None:
        from training.tasks.text_samples import check_vocabulary, refuse_positions

        if not hasattr(dataset, "vocab_size"):
            raise _without_tokens()
        check_vocabulary(config, model, dataset.vocab_size, getattr(dataset, "used_ids", None))
        if config.dataset.get("packed"):
            # The positions of packed samples begin anew, so a row may have more than the model can take.
            refuse_positions(model, dataset.longest, f"seq_len={config.seq_len}: a chat has {dataset.longest}")

    def sample_forwards(self, config: DictConfig, model: nn.Module) -> Sequence[Callable[[], object]]:
        if not can_generate(model):
            return ()
        # A plan reads no tokenizer. No token is less than a byte, and `sampler` refuses more than seq_len.
        longest = len(config.sample.prompt.encode()) + 1 + config.sample.tokens
        return largest_forwards(model, min(longest, config.seq_len))

    def sampler(self, config: DictConfig, model: nn.Module) -> Sampler:
        from training.tasks.text_samples import TextSampler

        return TextSampler.of(config, model)


def _without_tokens() -> UserError:
    return UserError("task=causal_lm: the dataset has no tokens: take dataset=stdlib, text, hub or chat")
