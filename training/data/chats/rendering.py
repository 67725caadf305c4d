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
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.data.chats.conversations import Conversation, Message
from training.data.chats.templates import Span, Template
from training.data.tokenizer import Tokenizer
from training.errors import UserError, first_line

if TYPE_CHECKING:
    from tokenizers import Encoding

logger = logging.getLogger(__name__)

TRAIN_ON = ("assistant", "last", "all")
# Enough to keep a tokenizer's threads busy; few enough that what it returns stays small.
CONVERSATIONS_PER_CALL = 1000
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

    Raises:
        UserError: there is no template, or `train_on` is unknown. Later, a conversation cannot be rendered, or what is
            trained on cannot be found.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | Path | None = None, train_on: str = "assistant"):
        if train_on not in TRAIN_ON:
            raise UserError(f"dataset.train_on={train_on}: must be {', '.join(TRAIN_ON[:-1])} or {TRAIN_ON[-1]}")
        self.template = Template(tokenizer, template)
        self._tokenizer = tokenizer
        self._train_on = train_on
        self._warned = False
        # The roles of which one message was looked for in its text.
        self._roles: set[str] = set()

    def sample(self, conversation: Conversation) -> Sample:
        """Renders one conversation."""
        return next(self.samples([conversation]))

    def samples(self, conversations: Iterable[Conversation]) -> Iterator[Sample]:
        """Renders conversations in their order; it tokenises many at a time."""
        rest = iter(conversations)
        while group := list(islice(rest, CONVERSATIONS_PER_CALL)):
            texts, spans = zip(*map(self.text, group), strict=True)
            for encoding, trained in zip(self._encoded(texts, group), spans, strict=True):
                mask = np.zeros(len(encoding.ids), dtype=bool)
                for start, end in trained:
                    mask[slice(*_tokens_of(encoding, start, end))] = True
                yield Sample(np.array(encoding.ids, dtype=np.uint32), mask)

    def text(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Returns the text of a conversation, and which of its characters are trained on."""
        text, marked = self._rendered(conversation, len(conversation.messages))
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

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> np.ndarray:
        """Returns the ids of messages and of the beginning of the answer to them: uint32 [tokens]."""
        text, _ = self.template.render(messages, tools, {}, "the prompt", prompting=True)
        (encoding,) = self._encoded([text], [])
        return np.array(encoding.ids, dtype=np.uint32)

    def _turn(self, conversation: Conversation, place: int, text: str) -> Span:
        """Finds a turn in the text of its conversation, by rendering what is before it, and what is up to its end."""
        turn = f"{conversation.where}: message {place + 1}"
        start = self._start(conversation, place, text, turn)
        if place + 1 == len(conversation.messages):
            return start, len(text)
        through, _ = self._rendered(conversation, place + 1)
        if not text.startswith(through):
            # Some templates end the whole text with the token that ends a text.
            through = through.removesuffix(self._end_of_text)
        if not text.startswith(through) or len(through) <= start:
            raise self._lost(turn)
        return start, len(through)

    def _start(self, conversation: Conversation, place: int, text: str, turn: str) -> int:
        if place == 0:
            start = text.find(self._prompt_alone)
            if start < 0 or not self._prompt_alone:
                raise self._lost(turn)
            return start + len(self._prompt_alone)
        before, _ = self._rendered(conversation, place, prompting=True)
        if text.startswith(before):
            return len(before)
        # As TRL does: where the text of a turn differs from what prompts for it, the turn begins there.
        start = next((at for at, (one, other) in enumerate(zip(before, text, strict=False)) if one != other), len(text))
        without, _ = self._rendered(conversation, place)
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
                without, _ = self._rendered(replace(conversation, messages=others), len(others))
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

    def _rendered(
        self, conversation: Conversation, count: int, prompting: bool = False
    ) -> tuple[str, list[Span] | None]:
        return self.template.render(
            conversation.messages[:count],
            conversation.tools,
            conversation.template_values,
            conversation.where,
            prompting=prompting,
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
        user: list[Message] = [{"role": "user", "content": "a"}]
        without, prompted = (
            self.template.render(user, None, {}, "a message of a user", prompting=prompting)[0]
            for prompting in (False, True)
        )
        return prompted.removeprefix(without)

    @cached_property
    def _end_of_text(self) -> str:
        return self._tokenizer.pretrained.eos_token or ""

    @cached_property
    def _encoder(self) -> Any:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_str(self._tokenizer.pretrained.backend_tokenizer.to_str())
        # It adds no token here, but may cut spaces off the offsets of tokens.
        encoder.post_processor = None
        encoder.no_truncation()
        encoder.no_padding()
        return encoder

    def _encoded(self, texts: Sequence[str], conversations: Sequence[Conversation]) -> list[Encoding]:
        try:
            return self._encoder.encode_batch(list(texts), add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises Exception itself, and its panics are no Exception
            where = f"{conversations[0].where} and the rows after it" if conversations else "the prompt"
            raise UserError(
                f"{where}: the tokenizer cannot encode them ({first_line(error)}): mend the text"
            ) from error


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
