"""The frozen base of a run that trains an adapter: a checkpoint names it and does not hold it.

`base.json` has the seed from which the base is made again, or the files of weights with their SHA-256. A run that
resumes makes or loads the base again; other files than those are refused.
"""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

from training.errors import UserError, as_user_error
from training.runs.bounded_files import DamagedError, read_json
from training.runs.checkpoint_files import BASE_FILE, sha256_of_file, side_by_side
from training.weights.files import ModelWeights, weight_files


@dataclass(frozen=True)
class BaseReference:
    """The source of a frozen base: `seed`, or `weights` (model.weights as given) and their files' SHA-256 by name.

    `revision` is the part of `weights` behind `@`, of a model on the Hub.
    """

    seed: int | None
    weights: str | None
    sha256: dict[str, str]
    revision: str | None = None

    @classmethod
    def of(cls, seed: int, weights: ModelWeights | None) -> Self:
        """Reads and hashes the files of `weights`, if there are any. Raises UserError for one that cannot be read."""
        if weights is None:
            return cls(seed, None, {})
        path = weights.path()
        with as_user_error(f"model.weights={weights.given}: ", (DamagedError, ValueError, FileNotFoundError)):
            files = sorted(weight_files(path))
            digests = side_by_side([partial(sha256_of_file, file) for file in files])
        within = path if path.is_dir() else path.parent
        names = [str(file.relative_to(within)) for file in files]
        revision = weights.on_hub.revision if weights.on_hub else None
        return cls(None, weights.given, dict(zip(names, digests, strict=True)), revision)

    @property
    def name(self) -> str | None:
        """The name on the Hub or the folder of the weights, without a revision."""
        return self.weights and self.weights.removesuffix(f"@{self.revision}")

    def to_json(self) -> bytes:
        """Returns the content of a checkpoint's base.json."""
        values = asdict(self)
        # It is in `weights` too.
        del values["revision"]
        return json.dumps(values, indent=2).encode()

    def check(self, folder: Path, key: str, name: str = BASE_FILE) -> None:
        """Raises UserError, whose message begins with `key`, unless the file `name` in `folder` names this base."""
        with as_user_error(f"{key}: ", DamagedError):
            saved = read_json(folder / name)
        if (saved.get("seed"), saved.get("sha256")) == (self.seed, self.sha256):
            return
        if saved.get("weights") is None:
            was, advice = f"was made from seed={saved.get('seed')}", f"give model.weights=null seed={saved.get('seed')}"
        else:
            was = f"was loaded from model.weights={saved['weights']}"
            advice = "give files with the same SHA-256"
        now = f"seed={self.seed}" if self.weights is None else f"model.weights={self.weights}, with other contents"
        raise UserError(f"{key}: the frozen base {was}, and is {now}: {advice}")
