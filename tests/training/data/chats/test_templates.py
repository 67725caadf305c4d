"""Which template renders chats, and the errors where there is none or it refuses messages."""

import json

import pytest

from tests.training.data.chats.chat_tokenizers import MARKED, QWEN2, chat_tokenizer
from training.data.chats.conversations import Conversation
from training.data.chats.templates import PLAIN, Template
from training.data.tokenizer import ByteTokenizer
from training.errors import UserError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
ROW = Conversation(CHAT, where="row 1")
CALL = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "tool_calls": [{"name": "f"}]}]


def test_the_tokenizers_template_renders_as_transformers_does() -> None:
    tokenizer = chat_tokenizer()

    for prompting in (False, True):
        text, spans = Template(tokenizer).render(ROW, prompting=prompting)
        assert spans is None
        assert text == tokenizer.pretrained.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompting)


def test_special_tokens_are_split_where_the_tokenizer_does() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.pretrained.split_special_tokens = True
    chat = [{"role": "user", "content": "Hello"}]
    expected = tokenizer.pretrained.apply_chat_template(chat, return_dict=True)["input_ids"]
    ((encoding, _),) = Template(tokenizer).encoded([("row", Template(tokenizer).render(Conversation(chat))[0], None)])
    assert encoding.ids == expected
    assert tokenizer.pretrained.convert_tokens_to_ids("<|im_start|>") not in expected


def test_a_file_replaces_it(write) -> None:
    text, spans = Template(chat_tokenizer(), write("marked.jinja", MARKED)).render(ROW)

    assert [text[start:end] for start, end in spans] == ["hello<|im_end|>\n"]


def test_bytes_have_a_plain_template() -> None:
    text, spans = Template(ByteTokenizer()).render(ROW)

    assert text == "user\nhi<|endoftext|>assistant\nhello<|endoftext|>"
    assert [text[start:end] for start, end in spans] == ["hello<|endoftext|>"]
    prompt, _ = Template(ByteTokenizer()).render(ROW, 1, prompting=True)
    assert text.startswith(prompt)


def test_without_a_template_the_plain_one_may_be_given() -> None:
    with pytest.raises(UserError, match=r"no template of chats: give dataset.template=FILE") as caught:
        Template(chat_tokenizer(None))

    assert str(caught.value).endswith(f"such as {PLAIN}")
    text, _ = Template(chat_tokenizer(None), PLAIN).render(ROW)
    assert text == "user\nhi<|im_end|>assistant\nhello<|im_end|>"


def test_values_and_tools_reach_the_template(write) -> None:
    template = Template(chat_tokenizer(), write("a.jinja", "{{ date }} {{ tools[0].name }} {{ eos_token }}"))

    row = Conversation(CHAT, [{"name": "add"}], template_values={"date": "today"})
    assert template.render(row)[0] == "today add <|im_end|>"


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        # As Llama 3: what Python writes of a list. As Qwen3: nothing. As Qwen2.5: an error.
        ("{{ message.content | trim }}", False),
        ("{% if message.content is string %}{{ message.content }}{% endif %}", False),
        ("{{ 'a' + message.content }}", False),
        # As Idefics3, which takes no text. As Qwen3.5.
        ("{{ message.content[0].text }}", True),
        ("{{ message.content if message.content is string else message.content[0].text }}", True),
    ],
)
def test_a_content_of_parts_is_for_templates_that_write_their_texts(write, written: str, taken: bool) -> None:
    template = Template(chat_tokenizer(), write("a.jinja", "{% for message in messages %}" + written + "{% endfor %}"))
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in CHAT]
    if taken:
        assert template.render(Conversation(parts, where="row 1"))[0] == "hihello"
    else:
        with pytest.raises(UserError, match=r"^row 1: message 1: its content is a list of parts, whose texts the temp"):
            template.render(Conversation(parts, where="row 1"))


def test_what_a_tool_returns_may_be_a_list(write) -> None:
    template = Template(chat_tokenizer(), write("a.jinja", "{{ messages[-1].content | tojson }}"))
    assert template.render(Conversation([*CHAT, {"role": "tool", "content": [1, 2]}]))[0] == "[1, 2]"


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_a_content_that_is_written_as_python_does_is_refused(write, role: str) -> None:
    row = Conversation([*CHAT, {"role": role, "content": {"temperature": 22.5, "dry": True}}], where="row 1")
    template = Template(ByteTokenizer(), write("json.jinja", "{{ messages[-1].content | tojson }}"))
    assert template.render(row)[0] == '{"temperature": 22.5, "dry": true}'
    with pytest.raises(
        UserError, match=r"^row 1: message 3: the template writes its content as Python does, .*: give it"
    ):
        Template(ByteTokenizer(), write("python.jinja", "{{ messages[-1].content }}")).render(row)


@pytest.mark.parametrize(
    ("template", "messages", "tools", "message"),
    [
        (None, CALL, None, "the plain template writes text alone, no tool calls and no reasoning: give dataset.templa"),
        (None, CHAT, [{"name": "f"}], "the plain template writes no tools"),
        ("{{ raise_exception('Roles must alternate') }}", CHAT, None, r"refuses it \(Roles must alternate\)"),
        ("{{ messages[0].content + 3 }}", CHAT, None, "refuses it"),
        ("{% if %}", CHAT, None, "refuses it"),
    ],
)
def test_refusals_name_the_row(write, template: str | None, messages: list, tools: list | None, message: str) -> None:
    made = Template(ByteTokenizer(), write("a.jinja", template) if template else None)
    with pytest.raises(UserError, match=message) as caught:
        made.render(Conversation(messages, tools, where="chats.jsonl line 7"))

    assert str(caught.value).startswith("chats.jsonl line 7: the template of chats refuses it (")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(UserError, match=r"cannot be read .*: give a file with a template of Jinja"):
        Template(chat_tokenizer(QWEN2), tmp_path / "none.jinja")


def test_a_file_that_holds_the_template_as_json(write) -> None:
    given = write("chat_template.json", json.dumps({"chat_template": MARKED}))
    with pytest.raises(UserError, match=r"chat_template.json: is JSON: give a file with the text alone of its key"):
        Template(chat_tokenizer(QWEN2), given)
