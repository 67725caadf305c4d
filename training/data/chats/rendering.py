"""Renders conversations to tokens, and tells which of them are trained on.

The ids and masks are those of TRL's SFTTrainer (1.16) with the same template: `assistant_only_loss` for messages,
`completion_only_loss` for a prompt and its completion. Where prompt and completion are texts TRL applies no template;
here they are turns, because the model chats. Of a completion of several messages TRL trains on all; here on the
assistant's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from training.data.chats.conversations import Conversation, Message
from training.data.chats.templates import Span, Template
from training.data.tokenizer import Tokenizer
from training.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding

logger = logging.getLogger(__name__)

TRAIN_ON = ("assistant", "last", "all")
WITH_MARKS = "a dataset.template=FILE with {% generation %} marks around what the assistant says"


@dataclass(frozen=True)
class Sample:
    """The tokens of a conversation: `ids` uint32 [tokens], and `trained` bool [tokens], which are to be predicted."""

    ids: np.ndarray
    trained: np.ndarray


class Renderer:
    """Makes samples of conversations.

    What is trained on are whole turns of the assistant, with the tokens that end them:

    * `assistant`: every turn, as the template marks them with {% generation %}. Without marks, and of a completion that
      belongs to a prompt, a turn is what follows the text that would prompt for it.
    * `last`: the last turn of the assistant, found in that second way.
    * `all`: every token.

    Args:
        template: a file with a template of Jinja; None for the tokenizer's own.

    Raises UserError if there is no template, or `train_on` is unknown; later if a conversation cannot be rendered, or
    what is trained on cannot be found.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | Path | None = None, train_on: str = "assistant"):
        if train_on not in TRAIN_ON:
            raise UserError(f"dataset.train_on={train_on}: must be {', '.join(TRAIN_ON[:-1])} or {TRAIN_ON[-1]}")
        self.template = Template(tokenizer, template)
        self._train_on = train_on
        self._warned = False
        # The roles of which one message was looked for in its text.
        self._roles: set[str] = set()

    def samples(self, conversations: Iterable[Conversation]) -> Iterator[Sample]:
        """Renders conversations in their order."""
        for encoding, spans in self.template.encoded((each.where, *self.text(each)) for each in conversations):
            trained = np.zeros(len(encoding.ids), dtype=bool)
            for start, end in spans:
                trained[slice(*_tokens_of(encoding, start, end))] = True
            yield Sample(np.array(encoding.ids, dtype=np.uint32), trained)

    def text(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Returns the text of a conversation, and which of its characters are trained on."""
        text, marked = self.template.render(conversation)
        self._warn_of_unwritten(conversation, text)
        if self._train_on == "all":
            return text, [(0, len(text))]
        if self._train_on == "assistant" and marked is not None and not conversation.prompt:
            return text, marked
        turns = [
            place
            for place, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and place >= conversation.prompt
        ]
        if self._train_on == "last":
            turns = turns[-1:]
        return text, [self._turn(conversation, place, text) for place in turns]

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Returns the ids of messages and of the beginning of the answer to them: uint32 [tokens]."""
        where = "the prompt"
        text, _ = self.template.render(Conversation(list(messages), where=where), prompting=True)
        ((encoding, _),) = self.template.encoded([(where, text, None)])
        return np.array(encoding.ids, dtype=np.uint32)

    def _turn(self, conversation: Conversation, place: int, text: str) -> Span:
        """Finds a turn in the text of its conversation, by rendering what is before it, and what is up to its end."""
        turn = f"{conversation.where}: message {place + 1}"
        start = self._start(conversation, place, text, turn)
        if place + 1 == len(conversation.messages):
            return start, len(text)
        through, _ = self.template.render(conversation, place + 1)
        if not text.startswith(through):
            # Some templates end the whole text with the token that ends a text.
            through = through.removesuffix(self.template.end_of_text)
        if not text.startswith(through) or len(through) <= start:
            raise self._lost(turn)
        return start, len(through)

    def _start(self, conversation: Conversation, place: int, text: str, turn: str) -> int:
        if place == 0:
            start = text.find(self._prompt_alone)
            if start < 0 or not self._prompt_alone:
                raise self._lost(turn)
            return start + len(self._prompt_alone)
        before, _ = self.template.render(conversation, place, prompting=True)
        if text.startswith(before):
            return len(before)
        # As TRL does: where the text of a turn differs from what prompts for it, the turn begins there.
        start = next((at for at, (one, other) in enumerate(zip(before, text, strict=False)) if one != other), len(text))
        without, _ = self.template.render(conversation, place)
        if start < len(without) or not text.startswith(without):
            raise self._lost(turn)
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: the template prompts for a turn with %r, but writes %r there; training begins where they differ",
                turn,
                before[len(without) :],
                text[len(without) :][: len(before) - len(without)],
            )
        return start

    def _warn_of_unwritten(self, conversation: Conversation, text: str) -> None:
        """Warns, once for each role, where the text is the same without the message: many templates skip others."""
        for place, message in enumerate(conversation.messages):
            role = message["role"]
            if role in self._roles or not message.get("content"):
                continue
            self._roles.add(role)
            others = [*conversation.messages[:place], *conversation.messages[place + 1 :]]
            try:
                without, _ = self.template.render(replace(conversation, messages=others))
            except UserError:
                # It minds that the message is missing.
                continue
            if without == text:
                logger.warning(
                    "%s: message %d: the template writes nothing of a message of the role %r: give the messages roles"
                    " that it knows, or another dataset.template",
                    conversation.where,
                    place + 1,
                    role,
                )

    def _lost(self, turn: str) -> UserError:
        other = "" if self._train_on == "last" else "dataset.train_on=last, or "
        return UserError(
            f"{turn}: the template writes it differently once others follow, so that comparing does not find what to"
            f" train on: take {other}{WITH_MARKS}"
        )

    @cached_property
    def _prompt_alone(self) -> str:
        """The text that begins a turn of the assistant."""
        user = Conversation([{"role": "user", "content": "a"}], where="a message of a user")
        without, prompted = (self.template.render(user, prompting=prompting)[0] for prompting in (False, True))
        return prompted.removeprefix(without)


def _tokens_of(encoding: Encoding, start: int, end: int) -> Span:
    """Returns the tokens that have any of the characters from `start` up to `end`."""
    first = _token_at(encoding, start, end)
    if first is None:
        return 0, 0
    last = max(token for token in (first, _token_at(encoding, end - 1, end)) if token is not None)
    following = encoding.char_to_token(end)
    if following is None:
        following = _token_at(encoding, end, encoding.offsets[-1][1])
    # Of several tokens that make up a character, this is the first; a token may also reach beyond the end.
    return first, len(encoding.ids) if following is None else max(following, last + 1)


def _token_at(encoding: Encoding, start: int, end: int) -> int | None:
    """Returns the first token that has one of these characters: a tokenizer may drop some."""
    return next((token for at in range(start, end) if (token := encoding.char_to_token(at)) is not None), None)
