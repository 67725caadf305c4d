"""Makes conversations of the rows of chats, in any of the layouts that are common.

* `messages` (or `conversations`): a list of messages with `role` and `content`, or with `from` and `value`, also as
  JSON text
* `prompt` and `completion`: each a text or a list of messages
* `instruction`, `output`, and `input`, which may be empty (Taori et al. 2023, Alpaca)

Beside these a row may have `system` (a text), `tools` (a list of JSON schemas, also as JSON text) and
`chat_template_kwargs` (values for the template). Further keys of messages, as `tool_calls` or `reasoning_content`, go
to the template as they are.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.errors import UserError

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "observation": "tool"}
# The columns that `dataset.columns` may map.
COLUMNS = (
    "messages", "prompt", "completion", "instruction", "input", "output", "system", "tools", "chat_template_kwargs",
)  # fmt: skip
# Keys with which others leave a turn or a part of it out of the loss: OpenAI's, four of Axolotl's, ms-swift's.
UNTRAINED = ("weight", "train", "training", "train_detail", "training_detail", "loss")
# Columns of what a turn is about, in the formats of LLaMA-Factory and of datasets for models of pictures.
UNREAD = ("image", "images", "video", "videos", "audio", "audios")
# The parts of a content that are text. Templates write nothing of others, or tokens that stand for a picture.
PARTS = ("text", "thinking")
# A text that begins as a list of messages does, in JSON or as Python writes it.
LISTED = re.compile(
    r"""\s*\[\s*\{\s*(?=["'](role|from|content|value)["']\s*:).*?"""
    r"""["'](role|from)["']\s*:\s*["'](system|user|human|assistant|gpt)["']""",
    re.DOTALL,
)
LAYOUTS = "messages, or prompt and completion, or instruction and output"

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages with `role` and other keys, and what the template gets beside them.

    Attributes:
        prompt: this many messages are given: none of them is trained on.
        where: names file and row, for messages to the user.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    prompt: int = 0
    template_values: dict[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)


class Columns:
    """Finds the columns of a row that stand for the names in COLUMNS and `more`.

    A column has that name itself, or the one to which `given` maps it (None: the row has no such column). Raises
    UserError for an unknown name in `given`; afterwards `unseen` are its columns that no row has had so far, and
    `unread` those of rows that nothing was made of.
    """

    def __init__(self, given: Mapping[str, str | None] | None = None, more: tuple[str, ...] = ()):
        known = (*COLUMNS, *more)
        self._given = dict(given or {})
        for name, column in self._given.items():
            if name not in known:
                raise UserError(f"dataset.columns.{name}={column}: unknown: it may map {', '.join(known)}")
        self.unseen = {column: name for name, column in self._given.items() if column is not None}
        # In their order.
        self._seen: dict[str, None] = {}
        self._read = {"label", "history", *UNREAD}

    @property
    def unread(self) -> list[str]:
        return [column for column in self._seen if column not in self._read]

    def value(self, row: Mapping[str, Any], name: str) -> Any:
        """Returns the value of the column that stands for `name`; None where the row has none."""
        for column in self.unseen.keys() & row.keys():
            del self.unseen[column]
        self._seen.update(dict.fromkeys(row))
        column = self._given.get(name, name)
        if column is not None and name == "messages" and name not in self._given and name not in row:
            column = "conversations"
        self._read.add(column)
        return None if column is None else row.get(column)


def conversation_of(row: Mapping[str, Any], columns: Columns, where: str) -> Conversation:
    """Makes a conversation of a row, by the first of LAYOUTS that fits. Raises UserError, beginning with `where`."""
    messages, prompt, completion, instruction, output = (
        columns.value(row, name) for name in ("messages", "prompt", "completion", "instruction", "output")
    )
    if row.get("label") is False:
        raise UserError(
            f"{where}: its label is false, as of a completion that is not wanted (KTO): remove such rows, or the column"
        )
    given: list[Message] = []
    if messages is not None:
        rest = messages_of(_parsed(messages, "messages", where), "user", where)
    elif prompt is not None and completion is not None:
        given, rest = messages_of(prompt, "user", where), messages_of(completion, "assistant", where)
    elif instruction is not None and output is not None:
        if row.get("history"):
            raise UserError(f"{where}: has a history, which is not read: write its turns and these as messages")
        more = columns.value(row, "input")
        given = messages_of(f"{instruction}\n\n{more}" if more else instruction, "user", where)
        rest = messages_of(output, "assistant", where)
    else:
        there = [name for name, value in row.items() if value is not None]
        example = there[0] if there else "COLUMN"
        raise UserError(
            f"{where}: has the columns {', '.join(there) or '(none)'}; chats need {LAYOUTS}: map yours, as in"
            f" dataset.columns={{messages: {example}}}"
        )
    return conversation_with(row, columns, where, given, rest)


def conversation_with(
    row: Mapping[str, Any], columns: Columns, where: str, prompt: list[Message], completion: list[Message]
) -> Conversation:
    """Makes a conversation of `prompt`, `completion` and the row's columns system, tools and chat_template_kwargs.

    Raises UserError, beginning with `where`, for a completion without an assistant's turn, or with one that is not to
    be trained on, for a column of another type, and for one of UNREAD.
    """
    if not any(message["role"] == "assistant" for message in completion):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in completion)) or "no messages"
        raise UserError(f"{where}: no assistant's turn to train on (it has {roles}): remove the row")
    messages = [*prompt, *completion]
    for name in UNREAD:
        if row.get(name):
            raise UserError(f"{where}: has {name}, which is not read: take rows of text alone, or remove the column")
    for key in UNTRAINED:
        if any(message["role"] == "assistant" and message.get(key) not in (None, 1) for message in completion):
            raise UserError(
                f"{where}: has an assistant's turn whose {key} says not to train on it in full, which is not followed:"
                " remove the key, or give the turns up to that one as prompt and the others as completion"
            )
    system = columns.value(row, "system")
    if system:
        if not isinstance(system, str):
            raise UserError(f"{where}: its system is {type(system).__name__}, not text")
        if messages[0]["role"] == "system":
            raise UserError(
                f"{where}: has a system message and a column for it: remove one, or leave the column alone with"
                " dataset.columns={system: null}"
            )
        messages.insert(0, {"role": "system", "content": system})
    return Conversation(
        messages=messages,
        tools=_tools(columns.value(row, "tools"), where),
        prompt=len(messages) - len(completion) if prompt else 0,
        template_values=_template_values(columns.value(row, "chat_template_kwargs"), where),
        where=where,
    )


def messages_of(value: Any, role: str, where: str) -> list[Message]:
    """Returns the messages in `value`: a list of them, or a text, which is one message of `role`.

    Raises UserError, beginning with `where`, for a value of another type, a text that writes messages, and a message
    without a role or content.
    """
    if isinstance(value, str):
        if LISTED.match(value):
            raise UserError(
                f"{where}: a text that writes a list of messages, {value[:40]!r}: give it as a list, or as the content"
                " of a message"
            )
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise UserError(f"{where}: {type(value).__name__} in place of a list of messages or a text")
    return [_message(message, f"{where}: message {number}") for number, message in enumerate(value, start=1)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{where} is {type(value).__name__}, not an object with role and content")
    # The keys stay in their order: a template may write them all.
    names = {"from": "role", "value": "content"}
    message = {names.get(key, key) if names.get(key) not in value else key: item for key, item in value.items()}
    role = message.get("role")
    if not isinstance(role, str):
        keys = ", ".join(map(str, value)) or "none"
        raise UserError(f"{where} has no role (its keys: {keys}): it needs role and content, or from and value")
    if role == "function_call":
        # LLaMA-Factory's, which trains on it; a template would write another role, or nothing.
        raise UserError(f"{where} is a function_call: give it the role assistant, and its call as tool_calls")
    message["role"] = ROLES.get(role, role)
    # What a tool returned is any JSON.
    parts = message.get("content") if isinstance(message.get("content"), list) and message["role"] != "tool" else ()
    if others := [part["type"] for part in parts if isinstance(part, dict) and part.get("type", "text") not in PARTS]:
        raise UserError(f"{where} has a part of type {others[0]}, which is not read: take rows of text alone")
    if message.get("content") is None and len({key for key, item in message.items() if item is not None}) == 1:
        raise UserError(f"{where} ({role}) has no content: give it one, or remove the row")
    return message


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    value = _parsed(value, "tools", where)
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f"{where}: its tools are not a list of JSON schemas")
    return value


def _parsed(value: Any, name: str, where: str) -> Any:
    """Returns a column's value, of text the JSON in it. Raises UserError for other text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise UserError(f"{where}: its {name} are text that is not JSON") from None


def _template_values(value: Any, where: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{where}: its chat_template_kwargs are {type(value).__name__}, not an object")
    return dict(value or {})
