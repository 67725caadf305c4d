"""The template of chats: which one it is, the text that it makes of messages, and the tokens of that text.

transformers renders it, as `apply_chat_template` of its tokenizers does, which does not tell where in the text the
marks are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from training.data.chats.conversations import Conversation
from training.data.library_tokenizer import refusing
from training.data.tokenizer import ByteTokenizer, Tokenizer
from training.errors import UserError, first_line
from training.runs.files import home_expanded

if TYPE_CHECKING:
    from tokenizers import Encoding

PLAIN = Path(__file__).with_name("plain.jinja")
MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Enough to keep a tokenizer's threads busy; few enough that what it returns stays small.
TEXTS_PER_CALL = 1000

Span = tuple[int, int]
"""characters from, and up to but without"""
Beside = TypeVar("Beside")


class Template:
    """The template of `file` or the tokenizer's; bytes have PLAIN. Raises UserError if none can be read."""

    def __init__(self, tokenizer: Tokenizer, file: str | Path | None = None):
        self._pretrained = tokenizer.pretrained
        self._values = dict(self._pretrained.special_tokens_map)
        if file is not None:
            self._given = _read(file)
        elif isinstance(tokenizer, ByteTokenizer):
            self._given = PLAIN.read_text(encoding="utf-8")
        elif self._pretrained.chat_template:
            self._given = None
        else:
            raise UserError(
                "dataset.template=null: the tokenizer has no template of chats: give dataset.template=FILE, a template"
                f" of Jinja, such as {PLAIN}"
            )

    def text(self, tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns the template itself; some tokenizers have another for tools."""
        return self._pretrained.get_chat_template(self._given, tools)

    @cached_property
    def _takes_parts(self) -> bool:
        """Tells if contents may be lists of parts: others write them as Python does, or nothing of them."""
        word, texts = "0a1b2c3d", []
        for content in (word, [{"type": "text", "text": word}]):
            try:
                chat = [{"role": "user", "content": content}]
                texts.append(self._pretrained.apply_chat_template(chat, chat_template=self.text(), tokenize=False))
            # As in `render`.
            except Exception:
                texts.append("")
        return word in texts[1] and (texts[0] == texts[1] or word not in texts[0])

    @property
    def end_of_text(self) -> str:
        """The text of the token that ends a text; empty if there is none."""
        return self._pretrained.eos_token or ""

    @cached_property
    def added_tokens(self) -> list[str]:
        """The texts of the tokens that were added to the tokenizer's vocabulary, which mark turns, say."""
        return list(self._pretrained.get_added_vocab())

    def render(
        self, conversation: Conversation, count: int | None = None, *, prompting: bool = False
    ) -> tuple[str, list[Span] | None]:
        """Returns the text of the first `count` messages, and the spans between marks; None for a template without.

        With `prompting` an assistant's turn begins behind it. Raises UserError if the template refuses them.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        # As apply_chat_template does: templates take a missing key, not None.
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in conversation.messages[:count]
        ]
        for number, message in enumerate(messages, start=1):
            # Templates may write what tools return as JSON.
            if isinstance(message.get("content"), list) and message["role"] != "tool" and not self._takes_parts:
                raise UserError(
                    f"{conversation.where}: message {number}: its content is a list of parts, whose texts the template"
                    " does not write: make it a text, or give another dataset.template"
                )
        try:
            template = self.text(conversation.tools)
            marked = MARKS.search(template) is not None
            texts, spans = render_jinja_template(
                [messages],
                tools=conversation.tools,
                chat_template=template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompting,
                **{**self._values, **conversation.template_values},
            )
        # Whatever a template does with values of other types than it expects, beside the errors of Jinja.
        except Exception as error:
            raise UserError(
                f"{conversation.where}: the template of chats refuses it ({first_line(error)}): mend or remove the row,"
                " or give another dataset.template"
            ) from error
        for number, message in enumerate(messages, start=1):
            content, written = message.get("content"), str(message.get("content"))
            if not isinstance(content, dict | list) or written not in texts[0]:
                continue
            if written != json.dumps(content, ensure_ascii=False, default=str):
                raise UserError(
                    f"{conversation.where}: message {number}: the template writes its content as Python does,"
                    f" {written[:40]!r}: give it as a text"
                )
        return texts[0], spans[0] if marked else None

    def encoded(self, texts: Iterable[tuple[str, str, Beside]]) -> Iterator[tuple[Encoding, Beside]]:
        """Yields tokens, many at a time, of triples (where it is, the text, what is yielded beside its tokens)."""
        rest = iter(texts)
        while group := list(islice(rest, TEXTS_PER_CALL)):
            where = group[0][0] if len(group) == 1 else f"{group[0][0]} and the rows after it"
            with refusing(f"{where}: the tokenizer cannot encode it", "mend the text"):
                encodings = self._encoder.encode_batch([text for _, text, _ in group], add_special_tokens=False)
            yield from zip(encodings, (beside for _, _, beside in group), strict=True)

    @cached_property
    def _encoder(self) -> Any:
        from tokenizers import Tokenizer

        encoder = Tokenizer.from_str(self._pretrained.backend_tokenizer.to_str())
        # The text of a tokenizer does not have it.
        encoder.encode_special_tokens = self._pretrained.split_special_tokens
        # It adds no token here, but may cut spaces off the offsets of tokens.
        encoder.post_processor = None
        encoder.no_truncation()
        encoder.no_padding()
        return encoder


def _read(file: str | Path) -> str:
    path = home_expanded("dataset.template", file)
    if path.suffix == ".json":
        raise UserError(f"dataset.template={path}: is JSON: give a file with the text alone of its key chat_template")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"dataset.template={path}: cannot be read ({first_line(error)}): give a file with a template of Jinja"
        ) from error
