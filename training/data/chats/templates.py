"""The template of chats: which one it is, and the text that it makes of messages.

transformers renders it, as `apply_chat_template` of its tokenizers does, which does not tell where in the text the
marks are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.data.byte_tokenizer import ByteTokenizer
from training.data.chats.conversations import Message
from training.data.tokenizer import Tokenizer
from training.errors import UserError, first_line
from training.runs.paths import home_expanded

PLAIN = Path(__file__).with_name("plain.jinja")
MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Span = tuple[int, int]
"""characters from, and up to but without"""


class Template:
    """The template of `file`, or that of the tokenizer; the tokenizer of bytes has PLAIN.

    Raises:
        UserError: there is no template, or the file cannot be read.
    """

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

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
        where: str,
        *,
        prompting: bool = False,
    ) -> tuple[str, list[Span] | None]:
        """Returns the text of messages, and the spans between marks; None for a template without marks.

        Args:
            values: more variables of the template.
            where: names the messages, for the message.
            prompting: adds the beginning of an assistant's turn.

        Raises UserError if the template refuses the messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            template = self.text(tools)
            marked = MARKS.search(template) is not None
            # As apply_chat_template does: templates take a missing key, not None.
            present = [{key: value for key, value in message.items() if value is not None} for message in messages]
            texts, spans = render_jinja_template(
                [present],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=prompting,
                **{**self._values, **values},
            )
        # Whatever a template does with values of other types than it expects, beside the errors of Jinja.
        except Exception as error:
            raise UserError(
                f"{where}: the template of chats refuses it ({first_line(error)}): mend or remove the row, or give"
                " another dataset.template"
            ) from error
        return texts[0], spans[0] if marked else None


def _read(file: str | Path) -> str:
    path = home_expanded("dataset.template", file)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"dataset.template={path}: cannot be read ({first_line(error)}): give a file with a template of Jinja"
        ) from error
