"""Text that a language model writes: the samples of a run, and what `scripts/generate.py` needs for its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import nn

from models.generation import can_generate, generate
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.errors import UserError
from training.tasks.sample import TextSample
from training.tasks.task import Sampler


@dataclass(frozen=True)
class TextSampler(Sampler):
    """Continues `sample.prompt`, whose ids are `prompt`."""

    config: DictConfig
    tokenizer: Tokenizer
    prompt: tuple[int, ...]

    @classmethod
    def of(cls, config: DictConfig, model: nn.Module) -> TextSampler:
        """Returns the sampler of a run. Raises UserError if its samples cannot be made."""
        given = f"sample.every={config.sample.every}"
        refuse_model(model, given)
        tokenizer = tokenizer_of(config, given)
        prompt = prompt_ids(tokenizer, config.sample.prompt)
        if len(prompt) + config.sample.tokens > config.seq_len:
            raise UserError(
                f"sample.tokens={config.sample.tokens}: with a prompt of {len(prompt)} tokens that is more than"
                f" seq_len={config.seq_len}: take fewer tokens, a shorter sample.prompt or a larger seq_len"
            )
        return cls(config, tokenizer, prompt)

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
