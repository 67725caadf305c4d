"""Counts the positions of a text for which a model of transformers has an embedding each.

A table is read by number: on a GPU a position beyond its end would end the process.
"""

from __future__ import annotations

import re

from torch import nn

# wpe in GPT-2, embed_positions in OPT, position_embeddings in BERT.
OF_POSITIONS = re.compile(r"(^|\.)(wpe|\w*position\w*)$")
# Towers beside the text have positions of their own.
OF_OTHERS = re.compile("vision|visual|image|audio|speech")


def most_positions(model: nn.Module) -> int | None:
    """Returns the most tokens of a text; None for a model without such a table, as with rotary embeddings."""
    tables = (
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and OF_POSITIONS.search(name) and not OF_OTHERS.search(name)
    )
    return min((table.num_embeddings - _first_row(table) for table in tables), default=None)


def _first_row(table: nn.Embedding) -> int:
    """Returns the row of the first position: those before it stand for padding."""
    after_padding = 0 if table.padding_idx is None else table.padding_idx + 1
    return getattr(table, "offset", after_padding)
