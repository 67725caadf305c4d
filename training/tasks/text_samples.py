"""Text that a language model writes: the samples of a run, and what `scripts/generate.py` needs for its own."""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from models.generation import can_generate, generate
from training.data.chats.rendering import Renderer
from training.data.tokenizer import Tokenizer, load_tokenizer
from training.errors import UserError
from training.tasks.sample import TextSample
from training.tasks.task import Sampler
from training.weights.architecture import as_override
from training.weights.files import GENERATION_FILE
from training.weights.model_tokenizer import brought_tokenizer, origin_of, own_tokenizer, stops_of, values_in

logger = logging.getLogger(__name__)

# What a generation_config.json changes in a text and is not done here, each with the value that changes nothing.
NOT_DONE = {
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "num_beams": 1,
    "min_length": 0, "min_new_tokens": 0, "suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": [],
    "sequence_bias": {}, "forced_bos_token_id": None, "forced_eos_token_id": None, "stop_strings": [],
}  # fmt: skip
# Stands for bytes that are no character, or not all of one yet.
REPLACED = "\ufffd"


@dataclass(frozen=True)
class TextSampler(Sampler):
    """Continues `sample.prompt`, whose ids are `prompt`, until one of `stops`; of chats, answers it."""

    config: DictConfig
    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    stops: frozenset[int]

    @classmethod
    def of(cls, config: DictConfig, model: nn.Module) -> Self:
        """Returns the sampler of a run. Raises UserError if its samples cannot be made."""
        given = f"sample.every={config.sample.every}"
        refuse_model(model, given)
        if config.sample.prompts:
            raise UserError(f"{given}: sample.prompts is for pictures of model=pipeline: give sample.prompt=TEXT")
        tokenizer = tokenizer_of(config, given)
        prompt = _prompt_of(config, tokenizer)
        if len(prompt) + config.sample.tokens > config.seq_len:
            raise UserError(
                f"sample.tokens={config.sample.tokens}: with a prompt of {len(prompt)} tokens that is more than"
                f" seq_len={config.seq_len}: take fewer tokens, a shorter sample.prompt or a larger seq_len"
            )
        warn_of_not_done(config)
        return cls(config, tokenizer, prompt, stops_of(config, tokenizer))

    def sample(self, model: nn.Module, device: torch.device, stopped: Callable[[], bool]) -> TextSample | None:
        sample = self.config.sample
        drawing = {key: sample[key] for key in ("tokens", "temperature", "top_p")} | {"seed": self.config.seed}
        text = continued(
            model, self.tokenizer, self.prompt, stops=self.stops, stopped=stopped, device=device, **drawing
        )
        return None if text is None else TextSample(sample.prompt, text)


def warn_of_not_done(config: DictConfig) -> None:
    """Warns of what the model's generation_config.json asks for beside a temperature and top_p, which are given."""
    values = values_in(origin_of(config), GENERATION_FILE)
    if found := {key: values[key] for key, none in NOT_DONE.items() if values.get(key) not in (None, none)}:
        listed = ", ".join(f"{key}={value}" for key, value in found.items())
        logger.warning("texts are drawn without %s, which the model's %s has", listed, GENERATION_FILE)


def check_vocabulary(config: DictConfig, model: nn.Module, vocab_size: int, used: int | None = None) -> None:
    """Raises UserError if the model has fewer ids than a tokenizer with `vocab_size`.

    The model's own tokenizer may have more, as that of Gemma 3 has for pictures, which the model of 1B lacks: of these
    `used`, one more than the largest id that is to be computed with, is compared.
    """
    if used is not None and config.model.weights is not None and brought_tokenizer(config):
        vocab_size = used
    if vocab_size <= model.vocab_size:
        return
    if config.model.weights is not None:
        # More rows than the weights have are none that were trained.
        if brought_tokenizer(config):
            advice = f"leave out the texts with the ids from {model.vocab_size} on"
        else:
            own = own_tokenizer(config.model) is not None
            advice = "take dataset.tokenizer=auto" if own else "give a dataset.tokenizer that has no more"
    elif hasattr(model, "hf"):
        advice = f"take model.overrides={as_override(_with_vocabulary(config, model, vocab_size))}"
    else:
        advice = f"take model.vocab_size={vocab_size}"
    raise UserError(
        f"dataset.tokenizer={config.dataset.get('tokenizer') or 'null'}: has {vocab_size} ids, and the model"
        f" {model.vocab_size}: {advice}"
    )


def _with_vocabulary(config: DictConfig, model: nn.Module, vocab_size: int) -> dict[str, Any]:
    """Returns the overrides of a model of transformers with so many ids; some have a part for text."""
    overrides = OmegaConf.to_container(config.model.overrides) if config.model.overrides else {}
    of_text = model.hf.config.get_text_config()
    parts = model.hf.config.sub_configs
    part = next((name for name in parts if getattr(model.hf.config, name, None) is of_text), None)
    if part is None:
        return overrides | {"vocab_size": vocab_size}
    return overrides | {part: overrides.get(part, {}) | {"vocab_size": vocab_size}}


def refuse_positions(model: nn.Module, positions: int, given: str) -> None:
    """Raises UserError, which begins with `given`, if `positions` tokens are more than the model can take."""
    longest = getattr(model, "most_positions", None)
    if longest is not None and positions > longest:
        raise UserError(f"{given}: the model has embeddings for {longest} positions: take at most {longest}")


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
    """Returns the tokenizer of the dataset. Raises UserError, beginning with `given`, for a dataset without text."""
    if "tokenizer" not in config.dataset:
        name = config.dataset._target_.rpartition(".")[2]
        raise UserError(f"{given}: {name} has no key dataset.tokenizer, so its tokens stand for no text")
    around = {key: config.dataset[key] for key in ("begin", "end") if key in config.dataset}
    return load_tokenizer(config.dataset.tokenizer, **around)


def has_template(config: DictConfig, tokenizer: Tokenizer) -> bool:
    """Tells whether a run's model chats: it was trained on chats, or its tokenizer has a template of them."""
    return "template" in config.dataset or tokenizer.pretrained.chat_template is not None


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> tuple[int, ...]:
    """Returns the ids of `prompt` as the beginning of a document.

    For an empty prompt, if the tokenizer has no token that begins a document, they are those that end the one before.
    """
    ids = tuple(map(int, tokenizer.encode_batch([prompt])[0]))
    # As in training, a text that writes its beginning itself has it once.
    begin = () if ids[: len(tokenizer.begin)] == tokenizer.begin else tokenizer.begin
    return (*begin, *ids) or tokenizer.end or (tokenizer.end_of_text_id,)


def continued(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: tuple[int, ...],
    *,
    stops: frozenset[int],
    stopped: Callable[[], bool] = lambda: False,
    **drawing: Any,
) -> str | None:
    """Returns the text of the ids `prompt` and of the tokens that the model draws after them, up to one of `stops`.

    `drawing` are arguments of `models.generation.generate`, such as the number of tokens. The model must be in eval(),
    gradients off. The text may have any characters: make it visible before it is printed. Returns None once `stopped`
    returns True. Raises ValueError if the model's logits are not finite.
    """
    ids = list(prompt)
    for token in generate(model, prompt, vocab_size=tokenizer.vocab_size, **drawing):
        if stopped():
            return None
        if token in stops:
            break
        ids.append(token)
    return tokenizer.decode(ids)


def pieces(tokenizer: Tokenizer, drawn: Iterable[int], stops: frozenset[int]) -> Iterator[str]:
    """Yields the decoded text of tokens as they are drawn, in pieces of whole characters, until one of `stops`."""
    ids: list[int] = []
    shown = ""
    for token in drawn:
        if token in stops:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        if text.startswith(shown) and len(text) > len(shown) and not text.endswith(REPLACED):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(ids)[len(shown) :]


def _prompt_of(config: DictConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids of `sample.prompt`: where the run trains on chats, as what a user says."""
    if "template" not in config.dataset:
        return prompt_ids(tokenizer, config.sample.prompt)
    messages = [{"role": "user", "content": config.sample.prompt}]
    return tuple(map(int, Renderer(tokenizer, config.dataset.template).prompt(messages)))
