"""Conversations of rows in every layout, and the errors for rows that are none."""

import json

import pytest

from training.data.chats.conversations import Columns, conversation_of
from training.errors import UserError

USER = {"role": "user", "content": "2 + 2?"}
ASSISTANT = {"role": "assistant", "content": "4"}


def of(row: dict, **columns: str | None):
    return conversation_of(row, Columns(columns), "chats.jsonl line 7")


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"messages": [USER, ASSISTANT]}, 0),
        ({"conversations": [USER, ASSISTANT]}, 0),
        ({"messages": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}, 0),
        ({"messages": [USER, ASSISTANT], "prompt": "another", "instruction": None}, 0),
        ({"messages": json.dumps([USER, ASSISTANT])}, 0),
        ({"prompt": "2 + 2?", "completion": "4"}, 1),
        ({"prompt": [USER], "completion": [ASSISTANT]}, 1),
        ({"prompt": [USER], "completion": "4"}, 1),
        ({"instruction": "2 + 2?", "output": "4"}, 1),
        ({"instruction": "2 + 2?", "input": "", "output": "4"}, 1),
    ],
)
def test_layouts(row: dict, prompt: int) -> None:
    conversation = of(row)

    assert conversation.messages == [USER, ASSISTANT]
    assert conversation.prompt == prompt
    assert conversation.where == "chats.jsonl line 7"


def test_an_input_follows_its_instruction() -> None:
    conversation = of({"instruction": "Add.", "input": "2 and 2", "output": "4"})

    assert conversation.messages[0]["content"] == "Add.\n\n2 and 2"


def test_columns_are_mapped() -> None:
    assert of({"turns": [USER, ASSISTANT]}, messages="turns").messages == [USER, ASSISTANT]
    assert of({"question": "2 + 2?", "answer": "4"}, prompt="question", completion="answer").prompt == 1
    assert of({"messages": [USER, ASSISTANT], "system": "Be short."}, system=None).messages == [USER, ASSISTANT]


def test_other_keys_of_messages_stay() -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}]
    messages = [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": None, "tool_calls": calls},
        {"role": "tool", "name": "add", "content": "4", "tool_call_id": "1"},
        ASSISTANT,
    ]

    assert of({"messages": messages}).messages == messages


def test_system_tools_and_values_of_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    row = {"prompt": "2 + 2?", "completion": "4", "system": "Be short.", "tools": tools}

    conversation = of(row | {"chat_template_kwargs": {"enable_thinking": False}})

    assert conversation.messages == [{"role": "system", "content": "Be short."}, USER, ASSISTANT]
    assert conversation.prompt == 2
    assert conversation.tools == tools
    assert conversation.template_values == {"enable_thinking": False}
    assert of(row | {"tools": '[{"type": "function", "function": {"name": "add"}}]'}).tools == tools
    assert of(row | {"tools": []}).tools is of(row | {"tools": ""}).tools is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hello", "id": 3}, r"has the columns text, id; chats need messages, or prompt and completion, or"),
        ({"text": "hello"}, r"map yours, as in dataset.columns=\{messages: text\}"),
        ({"prompt": "2 + 2?"}, "has the columns prompt;"),
        ({}, r"has the columns \(none\);"),
        ({"messages": [USER]}, r"no assistant's turn to train on \(it has user\): remove the row"),
        ({"messages": []}, r"no assistant's turn to train on \(it has no messages\)"),
        ({"prompt": [USER, ASSISTANT], "completion": [USER]}, "no assistant's turn"),
        ({"prompt": "2 + 2?", "completion": "5", "label": False}, "its label is false, as of a completion that is not"),
        ({"messages": [USER, ASSISTANT], "label": False}, "its label is false, as of a completion that is not"),
        ({"messages": [USER, ASSISTANT | {"loss": False}]}, "an assistant's turn whose loss says not to train on it"),
        ({"messages": [USER, ASSISTANT], "images": ["a.png"]}, "has images, which is not read: take rows of text"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "has a history, which is not read: write its"),
        (
            {"messages": [USER, ASSISTANT | {"weight": 0}]},
            "has an assistant's turn whose weight says not to train on it",
        ),
        ({"messages": [USER, ASSISTANT | {"weight": 0.5}]}, "turn whose weight says not to train on it in full, which"),
        ({"messages": [USER, ASSISTANT | {"train_detail": [{"train": False}]}]}, "turn whose train_detail says not to"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]},
                    ASSISTANT,
                ]
            },
            "message 1 has a part of type image_url, which is not read: take rows of text alone",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "tool_use"}]},
                ]
            },
            "message 2 has a part of type tool_use, which is not read",
        ),
        ({"messages": [USER, ASSISTANT], "audio": "a.wav"}, "has audio, which is not read: take rows of text alone"),
        ({"messages": [USER, "4"]}, "message 2 is str, not an object with role and content"),
        ({"messages": [{"content": "4"}]}, r"message 1 has no role \(its keys: content\)"),
        ({"messages": [USER, {"role": "assistant"}]}, r"message 2 \(assistant\) has no content"),
        ({"conversations": [USER, {"from": "function_call", "value": "{}"}]}, r"message 2 is a function_call: give it"),
        ({"messages": "2 + 2?"}, "its messages are text that is not JSON"),
        (
            {"prompt": '[{"role": "user", "content": "2 + 2?"}]', "completion": "4"},
            r"a text that writes a list of messages, '\[\{.*': give it as a list, or as the content of a message$",
        ),
        (
            {"prompt": "2 + 2?", "completion": "[{'value': '4', 'from': 'gpt'}]"},
            "a text that writes a list of messages",
        ),
        ({"messages": {"role": "user"}}, "dict in place of a list of messages or a text"),
        ({"messages": [USER, ASSISTANT], "tools": "{"}, "its tools are text that is not JSON"),
        ({"messages": [USER, ASSISTANT], "tools": ["add"]}, "its tools are not a list of JSON schemas"),
        ({"messages": [USER, ASSISTANT], "system": 3}, "its system is int, not text"),
        ({"messages": [USER, ASSISTANT], "chat_template_kwargs": "x"}, "its chat_template_kwargs are str"),
    ],
)
def test_other_rows_are_refused(row: dict, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        of(row)

    assert str(caught.value).startswith("chats.jsonl line 7: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['[{"name": "A", "role": "user"}]', '[{"value": 3, "to": "user"}]', "[{'role'"])
def test_other_lists_in_a_text_are_text(text: str) -> None:
    assert of({"prompt": "which?", "completion": text}).messages[-1]["content"] == text


def test_two_system_messages_are_refused_and_the_advice_works() -> None:
    row = {"messages": [{"role": "system", "content": "a"}, USER, ASSISTANT], "system": "b"}
    with pytest.raises(UserError, match=r"dataset.columns=\{system: null\}"):
        of(row)

    assert of(row, system=None).messages[0]["content"] == "a"


def test_an_unknown_name_in_columns_is_refused() -> None:
    with pytest.raises(UserError, match=r"dataset.columns.question=prompt: unknown: it may map messages, prompt, "):
        Columns({"question": "prompt"})
