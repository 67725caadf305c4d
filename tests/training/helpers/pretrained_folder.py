"""Small models of transformers in a folder, as people download them: weights, tokenizer, template, what ends a text."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

WORDS = "the quick brown fox jumps over the lazy dog and the cat sat on the mat with a hat. user assistant system\n"
SPECIAL = ("<end>", "<bos>", "<turn>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + '\n' + message['content'] + '<turn>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
# The ids of a model that ends a text with either of two tokens.
STOPS = [2, 0]


def small_tokenizer(begins: bool = True, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens with <end> = 0, <bos> = 1, <turn> = 2; `begins`: each text begins with <bos>."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIAL),
        show_progress=False,
    )
    made.train_from_iterator([WORDS] * 3, trainer)
    if begins:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<turn>", pad_token="<end>")
    tokenizer.chat_template = template
    return tokenizer


def save_pretrained(folder: Path, kind: str = "qwen2", tokenizer: bool = True, **changes) -> PreTrainedModel:
    """Saves a small model with what a published one has beside its weights; `changes` are of its configuration."""
    config_class, model_class = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[
        kind
    ]
    torch.manual_seed(0)
    values = {**SIZES, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 1e-5, **changes}
    model = model_class(config_class(**values)).eval()
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=STOPS, pad_token_id=0, do_sample=True, temperature=0.6, top_p=0.9
    )
    model.save_pretrained(folder)
    if tokenizer:
        small_tokenizer().save_pretrained(folder)
    return model
