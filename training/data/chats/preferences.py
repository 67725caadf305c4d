"""The dataset of preferences: pairs of answers as rows of tokens, the chosen one first, as TRL's DPOTrainer (1.16) has
them.

* `prompt`, `chosen` and `rejected`: each a text or a list of messages; a text is a turn, as in chats
* `chosen` and `rejected` as whole conversations, whose shared beginning is the prompt

Beside these a row may have `system`, `tools` and `chat_template_kwargs`, as chats have them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from training.data.chats.chat import OfMessages
from training.data.chats.conversations import Columns, Conversation, Message, conversation_with, messages_of
from training.data.chats.reading import Rows
from training.data.chats.rendering import Renderer, Sample
from training.data.chats.rows import PairRows, meta_batch
from training.errors import UserError

COLUMNS = ("chosen", "rejected")


class Preferences(OfMessages):
    """Pairs of answers.

    A batch has `input_ids` and `labels`, int64 [pairs, 2, L], the chosen answer first; `lengths`, int64 [pairs, 2]; and
    `index`, int64 [pairs], the numbers of the pairs. Labels of the prompt, and of the padding at the end, are -100.
    """

    has_pairs: ClassVar[bool] = True
    noun = "pair"
    more_columns = COLUMNS
    parts = COLUMNS

    @property
    def num_samples(self) -> int:
        """The pairs that are trained on and those that are held out."""
        return len(self._tokens)

    def every_sample(self, rows: int) -> Iterator[dict[str, Tensor]]:
        """Yields all pairs, also those held out, in batches of `rows` of like length."""
        everything = self._rows_of(np.arange(self.num_samples))
        numbers = everything.spread(self.num_samples)
        for start in range(0, len(numbers), rows):
            yield everything.made(numbers[start : start + rows])

    @staticmethod
    def meta_tokens(rows: int, seq_len: int, **keys: Any) -> dict[str, Tensor]:
        """Returns a batch as `batch` does, on the meta device and of the longest pairs."""
        shape = (rows, 2, seq_len)
        return meta_batch(input_ids=shape, labels=shape, lengths=(rows, 2), index=(rows,))

    def _rendered(self, rows: Rows) -> Iterator[tuple[Sample, Sample]]:
        pairs = (pair_of(row, self._columns, place) for place, row in rows)
        return pair_samples(pairs, Renderer(self._tokenizer, self._template, "all"))

    def _rows_of(self, numbers: np.ndarray) -> PairRows:
        return PairRows(self._tokens, numbers, **self._sizes)


class Pair(NamedTuple):
    """Two conversations that begin with the same `prompt` messages."""

    chosen: Conversation
    rejected: Conversation


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
    elif prompt in (None, []):
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


def pair_samples(pairs: Iterable[Pair], renderer: Renderer) -> Iterator[tuple[Sample, Sample]]:
    """Yields for each pair two samples: its prompt with the chosen answer, and with the rejected answer.

    The answers are trained on. Both begin at the same token, the first that differs between the prompt and either
    sample: a template may write a prompt differently before an answer, and a token may join the prompt's end and the
    answer.
    """
    texts = ((pair.chosen.where, text, None) for pair in pairs for text in _texts(pair, renderer))
    encodings = renderer.template.encoded(texts)
    ids = (np.array(encoding.ids, dtype=np.uint32) for encoding, _ in encodings)
    for prompt, chosen, rejected in zip(ids, ids, ids, strict=True):
        start = min(_common(prompt, chosen), _common(prompt, rejected))
        yield tuple(Sample(answer, np.arange(len(answer)) >= start) for answer in (chosen, rejected))


def _texts(pair: Pair, renderer: Renderer) -> Iterator[str]:
    """Yields the texts of the prompt with what begins an answer, and of the two conversations."""
    yield renderer.template.render(pair.chosen, pair.chosen.prompt, prompting=True)[0]
    yield renderer.text(pair.chosen)[0]
    yield renderer.text(pair.rejected)[0]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many tokens both begin with."""
    count = min(len(one), len(other))
    differ = np.flatnonzero(one[:count] != other[:count])
    return int(differ[0]) if len(differ) else count
