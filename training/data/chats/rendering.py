"""Renders conversations to tokens, and tells which of them are trained on.

The ids and masks are those of TRL's SFTTrainer (1.16) with the same template: `assistant_only_loss` for messages,
`completion_only_loss` for a prompt and its completion. Where prompt and completion are texts TRL applies no template;
here they are turns, because the model chats. Of a completion of several messages TRL trains on all; here on the
assistant's.
"""

from __future__ import annotations

import json
import logging
import re
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
# The keys of a message that have text, by the names that templates know.
WRITTEN = ("content", "reasoning_content", "reasoning", "thinking")
# The keys that have what the assistant calls; the second is OpenAI's older one.
CALLS = ("tool_calls", "function_call")
QUOTED = "arguments in quotes"
# The function by which templates write the date of today: Llama 3.2's and gpt-oss' do.
CLOCK = "strftime_now"
TAGS = re.compile(r"<[^<>]*>|\s")
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
        # The kinds of messages and calls of which one was looked for in its text, and the keys for the template; CLOCK
        # and QUOTED once they are found.
        self._looked_for: set[str] = set()
        # The keys of messages that a template was seen to leave out.
        self._left_out: set[str] = set()

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
        turns = [
            place
            for place, message in enumerate(conversation.messages)
            if message["role"] == "assistant" and place >= conversation.prompt
        ]
        if self._train_on == "last":
            turns = turns[-1:]
        if CLOCK not in self._looked_for and CLOCK in self.template.text(conversation.tools):
            self._looked_for.add(CLOCK)
            logger.warning(
                "the template of chats writes today's date (%s), so that a run cannot be resumed on another day: give a"
                " dataset.template with a fixed one",
                CLOCK,
            )
        for key in conversation.template_values.keys() - self._looked_for:
            self._looked_for.add(key)
            if not re.search(rf"\b{re.escape(key)}\b", self.template.text(conversation.tools)):
                logger.warning(
                    "%s: the template of chats does not read %s of chat_template_kwargs: leave it out, or give the name"
                    " that it reads",
                    conversation.where,
                    key,
                )
        self._warn_of_unwritten(conversation, text)
        self._warn_of_left_out(conversation, text, turns)
        self._warn_of_quoted(conversation, text)
        if self._train_on == "all":
            return text, [(0, len(text))]
        if self._train_on == "assistant" and marked is not None and not conversation.prompt:
            return text, marked
        return text, [self._turn(conversation, place, text) for place in turns]

    def prompt(self, messages: Sequence[Message]) -> np.ndarray:
        """Returns the ids of messages and of the beginning of the answer to them: uint32 [tokens]."""
        where = "the prompt"
        text, _ = self.template.render(Conversation(list(messages), where=where), prompting=True)
        ((encoding, _),) = self.template.encoded([(where, text, None)])
        return np.array(encoding.ids, dtype=np.uint32)

    def _turn(self, conversation: Conversation, place: int, text: str) -> Span:
        """Finds a turn in the text of its conversation, by rendering what is before it, and what is up to its end."""
        start = self._start(conversation, place, text)
        if place + 1 == len(conversation.messages):
            return start, len(text)
        through, _ = self.template.render(conversation, place + 1)
        if not through.startswith(text[:start]):
            raise self._lost(conversation, place)
        end = self._end(through[start:], text, start)
        if end is None:
            raise self._lost(conversation, place)
        return start, end

    def _end(self, alone: str, text: str, start: int) -> int | None:
        """Returns where a turn ends that begins at `start` and is written as `alone` if nothing follows; None: unknown.

        Once others follow, a template may leave out empty reasoning (Qwen3), the token that ends a text (Phi-3), or
        write what ends other messages in its place (gpt-oss).
        """
        end = _end_without_tags(alone, text, start)
        if end is None:
            end = _end_without_tags(alone.removesuffix(self.template.end_of_text), text, start)
            before = text[:start].removesuffix(self.begins_turn)
            if end is not None:
                ends = (token for token in self.template.added_tokens if before.endswith(token))
                end += len(next((token for token in ends if text.startswith(token, end)), ""))
        return end

    def _start(self, conversation: Conversation, place: int, text: str) -> int:
        if place == 0:
            start = text.find(self.begins_turn)
            if start < 0 or not self.begins_turn:
                raise self._lost(conversation, place)
            return start + len(self.begins_turn)
        before, _ = self.template.render(conversation, place, prompting=True)
        if text.startswith(before):
            return len(before)
        # As TRL does: where the text of a turn differs from what prompts for it, the turn begins there.
        start = _alike(before, text)
        without, _ = self.template.render(conversation, place)
        # Not within a tag: "<think>" and "<tool_call>" begin alike.
        tags = TAGS.finditer(before, len(without))
        start = next((tag.start() for tag in tags if tag.start() < start < tag.end()), start)
        if start < len(without) or not text.startswith(without):
            raise self._lost(conversation, place)
        if not self._warned:
            self._warned = True
            prompted, written = before[len(without) :], text[len(without) :][: len(before) - len(without)]
            problem = "the template prompts for a turn with %r, but writes %r there; training begins where they differ"
            _warn_of_message(conversation, place, problem, prompted, written)
        return start

    def _warn_of_unwritten(self, conversation: Conversation, text: str) -> None:
        """Warns, once for each kind, where the text is the same without a message, its calls or the row's tools."""
        for place, message in enumerate(conversation.messages):
            kinds, content = [], message.get("content")
            if place == 0 and conversation.tools:
                kinds.append(("the row's tools", None, "give"))
            if content:
                role = f"a message of the role {message['role']!r}"
                kinds.append((role, [], "give the messages roles that it knows, or"))
            for key in filter(message.get, CALLS):
                kind = f"the {key} of a message {'with' if content else 'without'} content"
                kinds.append((kind, [{**message, key: None}], "give"))
            for kind, rest, advice in kinds:
                if kind in self._looked_for:
                    continue
                self._looked_for.add(kind)
                others = [*conversation.messages[:place], *(rest or ()), *conversation.messages[place + 1 :]]
                change = {"tools": None} if rest is None else {"messages": others}
                try:
                    without, _ = self.template.render(replace(conversation, **change))
                except UserError:
                    # It minds that this is missing.
                    continue
                if without == text:
                    problem = "the template writes nothing of %s: %s another dataset.template"
                    _warn_of_message(conversation, place, problem, kind, advice)

    def _warn_of_left_out(self, conversation: Conversation, text: str, turns: Sequence[int]) -> None:
        """Warns, once for each key, where a turn that is trained on is not wholly in the text: its reasoning, say."""
        written = ""
        for place, key in ((place, key) for place in turns for key in WRITTEN if key not in self._left_out):
            value = conversation.messages[place].get(key)
            # Templates change spaces and line ends.
            written = written or "".join(text.split())
            # Of a list of parts each has its text under the name of its type.
            parts = value if isinstance(value, list) else [{"type": "text", "text": value}]
            said = (part.get(part.get("type", "text")) for part in parts if isinstance(part, dict))
            if any("".join(words.split()) not in written for words in said if isinstance(words, str)):
                self._left_out.add(key)
                problem = "the template leaves out all or part of its %s, which is not trained on then: give a"
                _warn_of_message(conversation, place, f"{problem} dataset.template that writes it", key)

    def _warn_of_quoted(self, conversation: Conversation, text: str) -> None:
        """Warns once where a template writes arguments of calls that are text, as OpenAI's are, as JSON of a text."""
        if QUOTED in self._looked_for:
            return
        for place, message in enumerate(conversation.messages):
            calls = message["tool_calls"] if isinstance(message.get("tool_calls"), list) else ()
            functions = [call.get("function") for call in calls if isinstance(call, dict)]
            given = [function.get("arguments") for function in functions if isinstance(function, dict)]
            quoted = [json.dumps(each, ensure_ascii=False)[1:-1] for each in given if isinstance(each, str)]
            if any(each in text and each not in given for each in quoted):
                self._looked_for.add(QUOTED)
                problem = "the template writes the arguments of its tool_calls with their quotes escaped, because they"
                _warn_of_message(conversation, place, f"{problem} are text: give them as objects, which it expects")
                return

    def _lost(self, conversation: Conversation, place: int) -> UserError:
        later = any(message["role"] == "assistant" for message in conversation.messages[place + 1 :])
        other = "dataset.train_on=last, or " if later else ""
        return UserError(
            f"{conversation.where}: message {place + 1}: the template writes it differently once others follow, so that"
            f" comparing does not find what to train on: take {other}{WITH_MARKS}"
        )

    @cached_property
    def begins_turn(self) -> str:
        """The text that begins a turn of the assistant."""
        user = Conversation([{"role": "user", "content": "a"}], where="a message of a user")
        without, prompted = (self.template.render(user, prompting=prompting)[0] for prompting in (False, True))
        if not prompted.startswith(without):
            without = without.removesuffix(self.template.end_of_text)
        return prompted.removeprefix(without)


def _warn_of_message(conversation: Conversation, place: int, problem: str, *values: object) -> None:
    """Warns about message `place`, from 0; the text `problem` has a place for each of `values`, as logging takes it."""
    logger.warning(f"%s: message %d: {problem}", conversation.where, place + 1, *values)


def _end_without_tags(turn: str, text: str, start: int) -> int | None:
    """Returns where `turn` ends in `text`, in which it begins at `start` and may lack one run of empty tags.

    None if it is not there, or if more than tags and spaces is missing.
    """
    if turn and text.startswith(turn, start):
        # Nearly every turn; the rest goes through it in Python.
        return start + len(turn)
    same = _alike(turn, text[start:])
    for behind in range(same, len(turn)):
        if text.startswith(turn[behind:], start + same):
            missing = behind - same
            # The first of several ways to cut it out: "<a></a>" and not "a></a><".
            while same and turn[same - 1] == turn[same + missing - 1]:
                same -= 1
            if TAGS.sub("", turn[same : same + missing]):
                return None
            return start + len(turn) - missing
    return None


def _alike(one: str, other: str) -> int:
    """Returns how many first characters two texts share."""
    differ = (at for at, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its)
    return next(differ, min(len(one), len(other)))


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
