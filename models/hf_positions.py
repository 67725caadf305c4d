"""Counts the positions of a text for which a model of transformers has an embedding each.

A table is read by number: on a GPU a position beyond its end would end the process.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

# wpe in GPT-2, embed_positions in OPT, position_embeddings in BERT.
OF_POSITIONS = re.compile(r"(^|\.)(wpe|\w*position\w*)$")
# Tables that nothing trains: buffers in GPT-J and CodeGen, a plain attribute in CTRL.
COMPUTED = ("embed_positions", "pos_encoding")
# Towers beside the text have positions of their own.
OF_OTHERS = re.compile("vision|visual|image|audio|speech")


def most_positions(model: nn.Module) -> int | None:
    """Returns the most tokens of a text; None for a model without such a table, as with rotary embeddings."""
    trained = (
        module.num_embeddings - _other_rows(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and OF_POSITIONS.search(name) and not OF_OTHERS.search(name)
    )
    named = (getattr(module, name, None) for module in model.modules() for name in COMPUTED)
    # [positions, width] or [1, positions, width]
    computed = (table.shape[-2] for table in named if isinstance(table, Tensor) and table.ndim > 1)
    return min((*trained, *computed), default=None)


def _other_rows(table: nn.Embedding) -> int:
    """Returns the number of rows that are no positions of a text: those before the first stand for padding."""
    after_padding = 0 if table.padding_idx is None else table.padding_idx + 1
    # It looks up the position after each one too.
    ahead = type(table).__name__ == "ProphetNetPositionalEmbeddings"
    return getattr(table, "offset", after_padding) + ahead
