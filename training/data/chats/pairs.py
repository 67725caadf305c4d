"""Makes pairs of answers of the rows of preferences, and renders them as TRL's DPOTrainer (1.16) does.

* `prompt`, `chosen` and `rejected`: each a text or a list of messages; a text is a turn, as in chats
* `chosen` and `rejected` as whole conversations, whose shared beginning is the prompt

Beside these a row may have `system`, `tools` and `chat_template_kwargs`, as chats have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from training.data.chats.conversations import Columns, Conversation, Message, conversation_with, messages_of
from training.data.chats.templates import Template
from training.data.tokenizer import Tokenizer
from training.errors import UserError, first_line

COLUMNS = ("chosen", "rejected")
PAIRS_PER_CALL = 500


@dataclass(frozen=True)
class Pair:
    """Two conversations that begin with the same `prompt` messages."""

    chosen: Conversation
    rejected: Conversation

    @property
    def where(self) -> str:
        return self.chosen.where


@dataclass(frozen=True)
class PairSample:
    """The tokens of the two conversations, uint32; those of the answers begin at `start` in both."""

    chosen: np.ndarray
    rejected: np.ndarray
    start: int


def pair_of(row: Mapping[str, Any], columns: Columns, where: str) -> Pair:
    """Makes a pair of a row, which `where` names in messages. Raises UserError for one that has none."""
    prompt, *answers = (columns.value(row, name) for name in ("prompt", *COLUMNS))
    if None in answers:
        there = ", ".join(name for name, value in row.items() if value is not None) or "(none)"
        raise UserError(
            f"{where}: has the columns {there}; preferences need chosen and rejected, and prompt where these have no"
            " shared beginning: map yours, as in dataset.columns={chosen: COLUMN, rejected: COLUMN}"
        )
    chosen, rejected = (messages_of(answer, "assistant", where) for answer in answers)
    if not chosen or not rejected:
        raise UserError(f"{where}: an answer without a message: remove the row")
    if chosen[0]["role"] != "assistant" or rejected[0]["role"] != "assistant":
        given = _shared(chosen, rejected)
        _check_prompt(prompt, given, where)
        chosen, rejected = chosen[len(given) :], rejected[len(given) :]
    elif prompt is None:
        raise UserError(
            f"{where}: its answers have no shared beginning, and there is no prompt: map dataset.columns.prompt"
        )
    else:
        given = messages_of(prompt, "user", where)
    return Pair(*(conversation_with(row, columns, where, given, answer) for answer in (chosen, rejected)))


def _shared(one: Sequence[Message], other: Sequence[Message]) -> list[Message]:
    """Returns the messages with which both begin; of two that are equal, all but the last."""
    count = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return list(one[: min(count, len(one) - 1, len(other) - 1)])


def _check_prompt(prompt: Any, shared: Sequence[Message], where: str) -> None:
    """Raises UserError for conversations that share no beginning, or another than the row's `prompt`, if it has one."""
    if not shared:
        raise UserError(
            f"{where}: its answers are whole conversations and begin with different messages: remove the row"
        )
    if prompt is None:
        return
    contents = [message.get("content") for message in shared]
    if not (prompt in contents if isinstance(prompt, str) else messages_of(prompt, "user", where) == shared):
        raise UserError(
            f"{where}: its answers are whole conversations that begin otherwise than its prompt: leave that out with"
            " dataset.columns={prompt: null}"
        )


class PairRenderer:
    """Makes samples of pairs with the template of `file`, or that of the tokenizer. Raises UserError as `Template`."""

    def __init__(self, tokenizer: Tokenizer, file: str | Path | None = None):
        self._template = Template(tokenizer, file)
        self._tokenizer = tokenizer

    def samples(self, pairs: Iterable[Pair]) -> Iterator[PairSample]:
        """Renders pairs in their order; it tokenises many at a time."""
        rest = iter(pairs)
        while group := list(islice(rest, PAIRS_PER_CALL)):
            texts = [text for pair in group for text in self._texts(pair)]
            ids = self._encoded(texts, group[0].where)
            for prompt, chosen, rejected in zip(ids[::3], ids[1::3], ids[2::3], strict=True):
                # A template may write a prompt otherwise once an answer follows, and tokens may join across its end.
                yield PairSample(chosen, rejected, min(_common(prompt, chosen), _common(prompt, rejected)))

    def _texts(self, pair: Pair) -> Iterator[str]:
        """Yields the texts of the prompt with what begins an answer, and of the two conversations."""
        yield self._rendered(pair.chosen, pair.chosen.messages[: pair.chosen.prompt], prompting=True)
        yield self._rendered(pair.chosen, pair.chosen.messages)
        yield self._rendered(pair.rejected, pair.rejected.messages)

    def _rendered(self, conversation: Conversation, messages: Sequence[Message], prompting: bool = False) -> str:
        values, where = conversation.template_values, conversation.where
        return self._template.render(messages, conversation.tools, values, where, prompting=prompting)[0]

    def _encoded(self, texts: list[str], where: str) -> list[np.ndarray]:
        try:
            found = self._tokenizer.pretrained(texts, add_special_tokens=False, return_attention_mask=False).input_ids
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library's panics are no Exception
            raise UserError(
                f"{where} and the rows after it: the tokenizer fails ({first_line(error)}): mend the text"
            ) from error
        return [np.array(ids, dtype=np.uint32) for ids in found]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many tokens both begin with."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
