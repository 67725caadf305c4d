"""A language model of your own, which every mode trains: token ids in, mean loss out."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, pad


class Block(nn.Module):
    """Each place sees the seven places before it, and through the blocks below it more."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Conv1d(width, 4 * width, 8)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(gelu(self.mix(pad(self.norm(hidden).mT, (7, 0)))).mT)


class OwnModel(nn.Module):
    def __init__(self, vocab_size: int, width: int = 128, depth: int = 6):
        super().__init__()
        self.vocab_size = vocab_size
        self.embedding, self.head = nn.Embedding(vocab_size, width), nn.Linear(width, vocab_size)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
