"""A small tokenizer of transformers with the special tokens of chats, in memory or as a model's folder."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|end|>", "<|user|>", "<|assistant|>")
QWEN2 = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# As QWEN2, with marks.
MARKED = """\
{%- for message in messages -%}
{%- if loop.first and message.role != 'system' -%}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' -}}{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>\\n' -}}{%- endgeneration -%}
{%- else -%}{{- message.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# As Qwen3: reasoning is written into turns after the last question alone.
QWEN3 = """\
{%- set ns = namespace(last=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.index0 > ns.last -%}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# As Phi-3: a text ends with its end of text, but no turn does.
PHI3 = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- else -%}{{- eos_token -}}{%- endif -%}
"""
# As DeepSeek-R1: it prompts with the beginning of reasoning, which it leaves out of turns.
R1 = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' + message.content -}}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\\n' -}}{%- endif -%}
"""


@cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As GPT-2 and Llama 3: offsets leave spaces out.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["Hello there, how are you? I am well.\n\nThank you for asking, friend!"] * 20, trainer
    )
    return tokenizer.to_str()


def pretrained(template: str | None = QWEN2, end_of_text: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Makes a tokenizer of transformers with a template of chats."""
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_backend()), eos_token=end_of_text)
    made.chat_template = template
    return made


def chat_tokenizer(template: str | None = QWEN2, end_of_text: str = "<|im_end|>") -> SimpleNamespace:
    """Makes what `load_tokenizer` would return for it, as far as chats need it."""
    made = pretrained(template, end_of_text)
    ids = made.get_vocab()
    return SimpleNamespace(pretrained=made, vocab_size=max(ids.values()) + 1, stops=frozenset({ids[end_of_text]}))


def save(folder: Path, template: str | None = QWEN2) -> str:
    """Writes the tokenizer as a model's folder has it, and returns the folder."""
    pretrained(template).save_pretrained(folder)
    return str(folder)
