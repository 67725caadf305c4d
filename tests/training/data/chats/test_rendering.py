"""Tokens of conversations and what is trained on of them: as TRL has it, and where that cannot be found, refused."""

import importlib.util
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.training.data.chats.chat_tokenizers import MARKED, PHI3, QWEN2, QWEN3, R1, chat_tokenizer
from training.data.chats.conversations import Conversation
from training.data.chats.rendering import TAGS, Renderer, Sample
from training.data.tokenizer import ByteTokenizer
from training.errors import UserError

# TRL has the templates of models twice: as they are, and with marks, before which turns may have begun.
TRL = importlib.util.find_spec("trl")
MARKED_BY_TRL = sorted(Path(TRL.origin).parent.glob("chat_templates/*_training.jinja")) if TRL else []
USER = {"role": "user", "content": "Hello there, how are you?"}
FIRST = {"role": "assistant", "content": "I am well.\n\nAnd you? é🙂"}
SECOND = {"role": "assistant", "content": "Good bye"}
ONE_TURN = Conversation([USER, FIRST], where="row 1")
TWO_TURNS = Conversation([USER, FIRST, USER, SECOND], where="row 1")
ANSWER = Conversation([USER, FIRST], prompt=1, where="row 1")


def sample_of(renderer: Renderer, conversation: Conversation) -> Sample:
    return next(renderer.samples([conversation]))


def trained_texts(renderer: Renderer, tokenizer, conversation: Conversation) -> list[str]:
    """Returns the text of each run of tokens that are trained on."""
    sample = sample_of(renderer, conversation)
    assert len(sample.ids) == len(sample.trained)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.trained, [0]])))
    runs = edges.reshape(-1, 2)
    return [tokenizer.pretrained.decode(sample.ids[start:end]) for start, end in runs]


@pytest.mark.parametrize("conversation", [ONE_TURN, TWO_TURNS])
def test_marks_give_what_transformers_and_trl_train_on(conversation: Conversation) -> None:
    tokenizer = chat_tokenizer(MARKED)
    expected = tokenizer.pretrained.apply_chat_template(
        conversation.messages, return_dict=True, return_assistant_tokens_mask=True
    )

    sample = sample_of(Renderer(tokenizer), conversation)

    assert sample.ids.dtype == np.uint32
    assert sample.ids.tolist() == expected["input_ids"]
    assert sample.trained.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("template", [QWEN2, PHI3, MARKED])
@pytest.mark.parametrize("conversation", [ONE_TURN, TWO_TURNS])
def test_without_marks_turns_are_found_by_comparing(template: str, conversation: Conversation) -> None:
    tokenizer = chat_tokenizer(template, "<|endoftext|>" if template == PHI3 else "<|im_end|>")
    end = "<|end|>\n" if template == PHI3 else "<|im_end|>\n"
    turns = [message["content"] + end for message in conversation.messages if message["role"] == "assistant"]
    # The last turn takes what ends the text.
    turns[-1] += "<|endoftext|>" if template == PHI3 else ""

    assert trained_texts(Renderer(tokenizer), tokenizer, conversation) == turns
    assert trained_texts(Renderer(tokenizer, train_on="last"), tokenizer, conversation) == turns[-1:]
    whole = trained_texts(Renderer(tokenizer, train_on="all"), tokenizer, conversation)
    assert whole == [Renderer(tokenizer).text(conversation)[0]]


@pytest.mark.parametrize("template", [QWEN2, MARKED, QWEN3, PHI3, R1])
def test_a_completion_is_trained_on_as_trl_does(template: str) -> None:
    """TRL's SFTTrainer with completion_only_loss: what follows the common beginning of the tokens."""
    tokenizer = chat_tokenizer(template)
    apply = tokenizer.pretrained.apply_chat_template
    prompt = apply(ANSWER.messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = apply(ANSWER.messages, return_dict=True)["input_ids"]
    begin = next((n for n, token in enumerate(prompt) if token != whole[n]), len(prompt))

    for train_on in ("assistant", "last"):
        sample = sample_of(Renderer(tokenizer, train_on=train_on), ANSWER)
        assert sample.ids.tolist() == whole
        assert sample.trained.tolist() == [False] * begin + [True] * (len(whole) - begin)


@pytest.mark.parametrize(
    ("messages", "prompt", "train_on", "turns"),
    [
        # Turns of a prompt are not trained on.
        (TWO_TURNS.messages, 3, "assistant", [SECOND]),
        ([USER, FIRST, USER], 0, "assistant", [FIRST]),
        ([USER, FIRST, USER], 0, "last", [FIRST]),
        ([FIRST, USER, SECOND], 0, "assistant", [FIRST, SECOND]),
    ],
)
def test_turns_in_other_places(messages: list, prompt: int, train_on: str, turns: list) -> None:
    tokenizer = chat_tokenizer()
    conversation = Conversation(messages, prompt=prompt, where="row 1")
    found = trained_texts(Renderer(tokenizer, train_on=train_on), tokenizer, conversation)
    assert found == [turn["content"] + "<|im_end|>\n" for turn in turns]


def test_turns_of_which_reasoning_is_left_out_later_are_refused_and_each_advice_works(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(QWEN3)
    reasoned = Conversation([USER, FIRST | {"reasoning_content": "Be kind"}, USER, SECOND], where="row 1")
    with pytest.raises(UserError, match=r"^row 1: message 2: the template writes it differently") as caught:
        sample_of(Renderer(tokenizer), reasoned)
    assert "take dataset.train_on=last, or a dataset.template=FILE with {% generation %} marks" in str(caught.value)

    last = trained_texts(Renderer(tokenizer, train_on="last"), tokenizer, reasoned)
    assert last == ["<think>\n\n</think>\n\nGood bye<|im_end|>\n"]
    template = tmp_path / "marked.jinja"
    template.write_text(MARKED)
    assert len(trained_texts(Renderer(tokenizer, template), tokenizer, reasoned)) == 2


def test_empty_reasoning_may_be_left_out_later() -> None:
    tokenizer = chat_tokenizer(QWEN3)
    first, last = trained_texts(Renderer(tokenizer), tokenizer, TWO_TURNS)
    assert first == FIRST["content"] + "<|im_end|>\n"
    assert last == "<think>\n\n</think>\n\nGood bye<|im_end|>\n"


def test_the_last_turn_may_end_as_no_other_does() -> None:
    """As gpt-oss: <|return|> where other messages have <|end|>."""
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
        "{{ eos_token if loop.last and message.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = chat_tokenizer(template, "<|endoftext|>")
    turns = trained_texts(Renderer(tokenizer), tokenizer, TWO_TURNS)
    assert turns == [FIRST["content"] + "<|end|>", SECOND["content"] + "<|endoftext|>"]


# Messages of LLaVA-NeXT are lists of parts.
@pytest.mark.sampled
@pytest.mark.parametrize(
    "file", [file for file in MARKED_BY_TRL if file.stem != "llava_next_training"], ids=lambda file: file.stem
)
def test_turns_of_templates_of_models_are_those_that_trl_marks(file: Path) -> None:
    end = "<|return|>" if file.stem.startswith("gptoss") else "<|endoftext|>"
    tokenizer = chat_tokenizer(file.with_name(file.name.replace("_training", "")).read_text(), end)
    tokenizer.pretrained.bos_token = "<|im_start|>"
    ours = Renderer(tokenizer)
    (text, turns), (marked_text, marks) = (each.text(TWO_TURNS) for each in (ours, Renderer(tokenizer, file)))

    if text == marked_text:
        trained, marked = ({at for span in spans for at in range(*span)} for spans in (turns, marks))
        assert trained <= marked
        begun = "".join(text[at] for at in sorted(marked - trained))
        # Of both turns the same.
        assert begun == 2 * begun[: len(begun) // 2]
        assert begun[: len(begun) // 2] in ours.begins_turn
    else:
        # With marks it also writes empty reasoning, or what follows a turn.
        assert len(turns) == len(marks) == 2
        for (start, stop), (mark, end_of_mark) in zip(turns, marks, strict=True):
            assert TAGS.sub("", text[start:stop]) == TAGS.sub("", marked_text[mark:end_of_mark])


def test_a_template_that_writes_the_date_is_told_once(write, caplog) -> None:
    renderer = Renderer(chat_tokenizer(), write("dated.jinja", "{{ strftime_now('%d') }}{{ messages[-1].content }}"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            renderer.text(Conversation([{"role": "assistant", "content": "a"}], prompt=1))
    (record,) = caplog.records
    assert record.getMessage().startswith("the template of chats writes today's date (strftime_now)")


def test_a_role_that_the_template_skips_is_told_once(caplog) -> None:
    skipping = MARKED.replace("for message in messages", "for message in messages if message.role != 'function_call'")
    call = {"role": "function_call", "content": "f()"}
    conversation = Conversation([USER, call, FIRST, call, SECOND], where="row 1")
    with caplog.at_level(logging.WARNING):
        for template in (MARKED, skipping):
            renderer = Renderer(chat_tokenizer(template), train_on="all")
            sample_of(renderer, conversation)
            sample_of(renderer, conversation)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "row 1: message 2: the template writes nothing of a message of the role 'function_call': give the messages"
    )


@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_calls_that_the_template_skips_are_told_once_for_turns_with_content_and_without(key: str, caplog) -> None:
    """As LFM2, which never writes calls, and DeepSeek R1, which writes those of turns without content."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    turns = [{"role": "assistant", "content": content, key: calls} for content in (None, "I add")] * 2
    conversation = Conversation([USER, *turns], where="row 1")
    some = QWEN2.replace("message.content", "(message.content or message.KEY | tojson)")
    every = QWEN2.replace("message.content", "(message.content or '') + (message.KEY or []) | tojson")
    told = []
    for template in (QWEN2.replace("message.content", "(message.content or '')"), some, every):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            Renderer(chat_tokenizer(template.replace("KEY", key)), train_on="all").text(conversation)
        told.append([record.getMessage() for record in caplog.records])
    without, beside = (
        f"row 1: message {number}: the template writes nothing of the {key} of a message {which} content: give"
        " another dataset.template"
        for number, which in ((2, "without"), (3, "with"))
    )
    assert told == [[without, beside], [beside], []]


@pytest.mark.parametrize(
    ("arguments", "written", "lines"),
    [('{"a": 1}', "arguments | tojson", 1), ('{"a": 1}', "arguments", 0), ({"a": 1}, "arguments | tojson", 0)],
)
def test_arguments_that_are_written_as_text_within_text_are_told_once(
    arguments: object, written: str, lines: int, caplog
) -> None:
    """As Llama 3.1, Qwen2.5 and gpt-oss write those of OpenAI's format, which are text."""
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    conversation = Conversation([USER, {"role": "assistant", "content": "", "tool_calls": [call]}] * 2, where="row 1")
    written = f"(message.content + (message.tool_calls[0].function.{written} if message.tool_calls else ''))"
    renderer = Renderer(chat_tokenizer(QWEN2.replace("message.content", written)), train_on="all")
    for _ in range(2):
        renderer.text(conversation)
    told = "row 1: message 2: the template writes the arguments of its tool_calls with their quotes escaped, because"
    assert [message.startswith(told) for message in caplog.messages] == [True] * lines


def test_a_value_that_the_template_does_not_read_is_told_once(caplog) -> None:
    conversation = replace(ONE_TURN, template_values={"thinking": False, "enable_thinking": False})
    renderer = Renderer(chat_tokenizer("{{ '' if enable_thinking }}" + QWEN2), train_on="all")
    for _ in range(2):
        renderer.text(conversation)
    (line,) = caplog.messages
    assert line.startswith("row 1: the template of chats does not read thinking of chat_template_kwargs: leave it out,")


def test_tools_that_the_template_skips_are_told_once(caplog) -> None:
    conversation = replace(ONE_TURN, tools=[{"type": "function", "function": {"name": "add"}}])
    told = []
    for template in (QWEN2, "{{ tools | tojson if tools }}" + QWEN2):
        caplog.clear()
        renderer = Renderer(chat_tokenizer(template), train_on="all")
        for _ in range(2):
            renderer.text(conversation)
        told.append(caplog.messages)
    line = "row 1: message 1: the template writes nothing of the row's tools: give another dataset.template"
    assert told == [[line], []]


@pytest.mark.parametrize(
    ("turn", "key"),
    [
        ({"content": "<think>Be kind</think>I am well"}, "content"),
        ({"content": "I am well", "reasoning_content": "Be kind"}, "reasoning_content"),
    ],
)
def test_what_a_template_leaves_out_of_a_turn_is_told_once(turn: dict[str, str], key: str, caplog) -> None:
    r1 = R1.replace("message.content -", "message.content.split('</think>')[-1] -")
    conversation = Conversation([USER, {"role": "assistant", **turn}], where="row 1")
    with caplog.at_level(logging.WARNING):
        for template in (MARKED.replace("message.content", "(message.reasoning_content or '') + message.content"), r1):
            renderer = Renderer(chat_tokenizer(template, "<|endoftext|>"))
            for _ in range(2):
                sample_of(renderer, conversation)
    (told,) = [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]
    assert told.startswith(f"row 1: message 2: the template leaves out all or part of its {key}, which is not trained")


@pytest.mark.parametrize(("types", "lines"), [(["text"], 1), (["text", "thinking"], 0)])
def test_a_part_that_a_template_leaves_out_is_told(types: list[str], lines: int, caplog) -> None:
    template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        f"{{% for part in message.content %}}{{{{ part[part.type] if part.type in {types} }}}}{{% endfor %}}"
        "{% endif %}{% endfor %}"
    )
    parts = [{"type": "thinking", "thinking": "Be kind"}, {"type": "text", "text": "I am well"}]
    conversation = Conversation([USER, {"role": "assistant", "content": parts}], where="row 1")
    Renderer(chat_tokenizer(template), train_on="all").text(conversation)
    told = "row 1: message 2: the template leaves out all or part of its content, which is not trained on then: give"
    assert [message.startswith(told) for message in caplog.messages] == [True] * lines


def test_a_prompt_that_the_turn_does_not_begin_with_is_told_once(caplog) -> None:
    tokenizer = chat_tokenizer(R1, "<|endoftext|>")
    renderer = Renderer(tokenizer)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert trained_texts(renderer, tokenizer, ONE_TURN) == [FIRST["content"] + "<|endoftext|>"]

    (record,) = caplog.records
    assert "row 1: message 2: the template prompts for a turn with '<|assistant|><think>\\n'" in record.getMessage()


def test_a_turn_may_begin_with_a_tag_as_the_prompt_ends_with_one() -> None:
    """TRL compares tokens: "<" is one of "<b>", but not of "<think>"."""
    tokenizer = chat_tokenizer(R1, "<|endoftext|>")
    tagged = Conversation([USER, {"role": "assistant", "content": "<b>Hello</b>"}, USER, SECOND], where="row 1")
    first, last = trained_texts(Renderer(tokenizer), tokenizer, tagged)
    assert (first, last) == ("<b>Hello</b><|endoftext|>", "Good bye<|endoftext|>")
    apply = tokenizer.pretrained.apply_chat_template
    prompt = apply(tagged.messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = apply(tagged.messages[:2], return_dict=True)["input_ids"]
    begin = next(n for n, token in enumerate(prompt) if token != whole[n])
    assert tokenizer.pretrained.decode(whole[begin:]) == first


def test_the_last_turn_alone_is_no_advice_where_it_is_not_found() -> None:
    lone = Conversation([FIRST], where="row 1")
    for train_on in ("assistant", "last"):
        with pytest.raises(UserError, match=r"^row 1: message 1: .* take a dataset.template=FILE with"):
            sample_of(Renderer(chat_tokenizer(R1), train_on=train_on), lone)


def test_bytes_are_rendered_by_the_plain_template() -> None:
    tokenizer = ByteTokenizer()
    renderer = Renderer(tokenizer)

    sample = sample_of(renderer, ONE_TURN)

    assert bytes(sample.ids[sample.trained][:-1].astype(np.uint8)).decode() == FIRST["content"]
    assert sample.ids[-1] == tokenizer.end_of_text_id
    assert renderer.prompt([USER]).tolist() == sample.ids[: -int(sample.trained.sum())].tolist()


def test_many_are_rendered_as_each_alone() -> None:
    renderer = Renderer(chat_tokenizer())
    conversations = [ONE_TURN, TWO_TURNS, ANSWER] * 400

    samples = list(renderer.samples(iter(conversations)))

    assert len(samples) == len(conversations)
    for conversation, sample in list(zip(conversations, samples, strict=True))[-3:]:
        alone = sample_of(renderer, conversation)
        assert np.array_equal(alone.ids, sample.ids)
        assert np.array_equal(alone.trained, sample.trained)


def test_a_text_that_has_no_tokens_is_refused_with_its_row() -> None:
    broken = Conversation([USER, {"role": "assistant", "content": "\ud800"}], where="row 1")

    with pytest.raises(UserError, match=r"^row 1: the tokenizer cannot encode it"):
        sample_of(Renderer(chat_tokenizer()), broken)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(UserError, match=r"dataset.train_on=user: must be assistant, last or all"):
        Renderer(ByteTokenizer(), train_on="user")
