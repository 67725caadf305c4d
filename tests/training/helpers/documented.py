"""The commands that a page or a file of the configuration shows, to be run by tests."""

import re
import shlex
from pathlib import Path

# Overrides with which a model of transformers takes a fraction of a second a step, in place of one of the Hub.
SMALL_QWEN = (
    "model.source=qwen3",
    "model.overrides={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2,"
    " num_key_value_heads: 2, head_dim: 16, vocab_size: 320}",
    "model.weights=null",
)


def commands(path: Path, program: str = "train.py") -> list[list[str]]:
    """Returns the arguments of each `python PROGRAM` in a page's blocks of code, or a file's comments, in its order."""
    text = path.read_text().replace("\\\n", " ")
    found = re.findall(rf"^(?:#? {{2,}})?(?:\w+=\S+ )?python {re.escape(program)} (.*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in found]
