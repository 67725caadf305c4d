"""Text that the model generates between steps: under the run's offload mode, and without a trace in its training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from omegaconf import DictConfig
from torch import nn

from models.generation import can_generate, generate
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.errors import UserError
from training.evaluation import observed
from training.step_intervals import due

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Samples:
    """When a run generates a sample, and of what: the same prompt and random numbers at each time, in every mode.

    Attributes:
        tokenizer: None if the run does not sample.
        prompt: the ids of `sample.prompt`.
    """

    config: DictConfig
    tokenizer: Tokenizer | None
    prompt: tuple[int, ...]

    @classmethod
    def of(cls, config: DictConfig, model: nn.Module) -> Samples:
        """Encodes the prompt.

        Raises UserError if the run is to sample, and the dataset has no text, the model cannot generate, or the sample
        is longer than the sequences of training.
        """
        every = config.sample.every
        if every is None:
            return cls(config, None, ())
        given = f"sample.every={every}"
        refuse_model(model, given)
        tokenizer = tokenizer_of(config, given)
        prompt = prompt_ids(tokenizer, config.sample.prompt)
        if len(prompt) + config.sample.tokens > config.seq_len:
            raise UserError(
                f"sample.tokens={config.sample.tokens}: with a prompt of {len(prompt)} tokens that is more than"
                f" seq_len={config.seq_len}: take fewer tokens, a shorter sample.prompt or a larger seq_len"
            )
        return cls(config, tokenizer, prompt)

    def due(self, step: int) -> bool:
        """Tells whether to sample after `step` steps: every `sample.every`, from 0, and after the last."""
        return due(self.config.sample.every, step, self.config.steps)

    def text(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> str | None:
        """Generates a sample: returns prompt and continuation.

        Returns None once `stopped` returns True, and, with a warning, if the model's logits are not finite.
        """
        sample = self.config.sample
        try:
            return continued(
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
        except ValueError as error:
            logger.warning("no sample: %s", error)
            return None


def refuse_model(model: nn.Module, given: str) -> None:
    """Raises UserError, which begins with `given`, if the model cannot generate text."""
    if not can_generate(model):
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

    It may have any characters: make it visible before it is printed. Returns None once `stopped` returns True. Raises
    ValueError if the model's logits are not finite.
    """
    ids = list(prompt)
    with observed(model, seed, device):
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
