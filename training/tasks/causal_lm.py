"""causal_lm: predicts each next token of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hydra.utils import get_class
from omegaconf import DictConfig
from torch import Tensor, nn

from models.generation import can_generate, generate, largest_forwards
from training.batches import Batch
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.errors import UserError
from training.tasks.sample import TextSample
from training.tasks.task import Sampler, Task

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
        given = f"sample.every={config.sample.every}"
        refuse_model(model, given)
        tokenizer = tokenizer_of(config, given)
        prompt = prompt_ids(tokenizer, config.sample.prompt)
        if len(prompt) + config.sample.tokens > config.seq_len:
            raise UserError(
                f"sample.tokens={config.sample.tokens}: with a prompt of {len(prompt)} tokens that is more than"
                f" seq_len={config.seq_len}: take fewer tokens, a shorter sample.prompt or a larger seq_len"
            )
        return TextSampler(config, tokenizer, prompt)


@dataclass(frozen=True)
class TextSampler(Sampler):
    """Continues `sample.prompt`, whose ids are `prompt`."""

    config: DictConfig
    tokenizer: Tokenizer
    prompt: tuple[int, ...]

    def sample(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> TextSample | None:
        sample = self.config.sample
        text = continued(
            model,
            self.tokenizer,
            self.prompt,
            tokens=sample.tokens,
            temperature=sample.temperature,
            top_p=sample.top_p,
            seed=self.config.seed,
            device=device,
            stopped=stopped,
        )
        return None if text is None else TextSample(sample.prompt, text)


def _without_tokens() -> UserError:
    return UserError("task=causal_lm: the dataset has no tokens: take dataset=stdlib, text or hub")


def check_vocabulary(model: nn.Module, vocab_size: int) -> None:
    """Raises UserError if the model has fewer ids than a tokenizer with `vocab_size`."""
    if vocab_size > model.vocab_size:
        raise UserError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's {vocab_size}:"
            " take a larger model.vocab_size or another dataset.tokenizer"
        )


def refuse_positions(model: nn.Module, positions: int, given: str) -> None:
    """Raises UserError, which begins with `given`, if `positions` tokens are more than the model can take."""
    longest = getattr(model, "most_positions", None)
    if longest is not None and positions > longest:
        raise UserError(f"{given}: the model has embeddings for {longest} positions: take no more")


def refuse_model(model: nn.Module, given: str) -> None:
    """Raises UserError, which begins with `given`, if the model cannot generate text."""
    if not can_generate(model):
        if hasattr(model, "hf"):
            raise UserError(
                f"{given}: {model.hf.config.model_type} cannot generate text here, because transformers keeps no keys"
                " and values of it: take another model.source, or no samples (sample.every=null)"
            )
        raise UserError(
            f"{given}: {type(model).__name__} cannot generate text: give it a method key_value_cache, as"
            " CONTRIBUTING.md describes it"
        )


def tokenizer_of(config: DictConfig, given: str) -> Tokenizer:
    """Returns the tokenizer of the configuration's dataset.

    Raises UserError, which begins with `given`, if the dataset is not made of text.
    """
    if "tokenizer" not in config.dataset:
        name = config.dataset._target_.rpartition(".")[2]
        raise UserError(f"{given}: {name} has no key dataset.tokenizer, so its tokens stand for no text")
    return load_tokenizer(config.dataset.tokenizer)


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    """Encodes a prompt; an empty one is the end of another document, after which one starts in training."""
    (ids,) = tokenizer.encode_batch([prompt])
    return tuple(map(int, ids)) or (tokenizer.end_of_text_id,)


def continued(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: tuple[int, ...],
    *,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    device: torch.device,
    stopped: Callable[[], bool] = lambda: False,
) -> str | None:
    """Returns the text of `prompt` and of up to `tokens` tokens that follow it; the document may end before.

    The model is in eval() and without gradients. The text may have any characters: make it visible before it is
    printed. Returns None once `stopped` returns True. Raises ValueError if the model's logits are not finite.
    """
    ids = list(prompt)
    drawn = generate(
        model,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        device=device,
        vocab_size=tokenizer.vocab_size,
    )
    for token in drawn:
        if stopped():
            return None
        if token == tokenizer.end_of_text_id:
            break
        ids.append(token)
    return tokenizer.decode(ids)
