"""Checkpoints with one flipped bit, in every class of byte of every file, and files that are damaged in other ways.

With `resume=auto` the checkpoint before must be taken; a checkpoint that was asked for by its name must be refused in
one line that names it. One flip of each file is also followed by a whole run.
"""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from tests.faults.outcome import Outcome
from tests.faults.runs import RESIDENT, Whole, modes_and_optimizers, planned, run
from training.checkpoints.resuming import AUTO, starting_point
from training.errors import UserError
from training.runs.checkpoint_files import MANIFEST_FILE, folder_of

STEPS = 2
# Strings, other values, punctuation and the space between them.
JSON_TOKEN = re.compile(rb'"(?:\\.|[^"\\])*"|[^\s"{}\[\],:]+|[{}\[\],:]|\s+')
YAML_TOKEN = re.compile(rb"[^\s:]+|:|\s+")
PAGE = 4096

Damage = tuple[str, str, Callable[[Path], object]]
"""the kind, where it is, and what damages the checkpoint in a folder"""


def survey(work: Path, outcome: Outcome, seed: int) -> None:
    """Damages a checkpoint in every way, or in `outcome.planned` ways, spread evenly."""
    whole = Whole.of(work / "whole", STEPS)
    run_dir, choices = work / "whole", modes_and_optimizers(seed)
    folder, saved = folder_of(run_dir, STEPS), work / "saved"
    shutil.copytree(folder, saved)
    damages = list(chain(_flips(saved, random.Random(seed)), _others(saved)))
    # One of each kind in the whole survey.
    runs = _first_flips(damages)[: outcome.planned // 10]
    outcome.planned = min(outcome.planned, len(damages) + len(runs))
    count = outcome.planned - len(runs)
    config = planned(RESIDENT)[0]
    configs = [OmegaConf.merge(config, {"resume": resume, "steps": STEPS}) for resume in (AUTO, str(folder))]
    # Not the warnings of all these cases.
    logging.disable(logging.WARNING)
    for number in outcome.in_time(range(count)):
        kind, where, damage = damages[number * len(damages) // count]
        damage(folder)
        outcome.add(kind, where, _problem(*configs, run_dir))
        _restore(folder, saved)
    logging.disable(logging.NOTSET)
    for kind, where, damage in outcome.in_time(runs):
        damaged_run = work / "damaged"
        shutil.copytree(run_dir, damaged_run)
        damage(folder_of(damaged_run, STEPS))
        ended = run(damaged_run, next(choices), STEPS)
        problem = ended.problem()
        if not problem and f"{folder_of(damaged_run, STEPS)} is later than" not in ended.output:
            problem = "the run did not begin from the checkpoint before"
        outcome.add("followed by a run", f"{kind} {where}", problem or whole.problem(damaged_run, STEPS))
        shutil.rmtree(damaged_run)


def _flips(folder: Path, choices: random.Random) -> Iterator[Damage]:
    """Yields a flip of one bit for each class of byte; of the manifest, which no checksum protects, of every bit."""
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for where, offset in _places(path.name, content):
            for bit in range(8) if path.name == MANIFEST_FILE else [choices.randrange(8)]:
                yield (
                    f"flip in {path.name}",
                    f"bit {bit} of byte {offset} of {path.name}, {where}",
                    _flip(path.name, offset, bit),
                )


def _places(name: str, content: bytes) -> Iterator[tuple[str, int]]:
    """Yields the classes of bytes of a file, each with an offset."""
    if not name.endswith(".safetensors"):
        token = JSON_TOKEN if name.endswith(".json") else YAML_TOKEN
        yield from _tokens(content, token, 0, ("the first", "the middle", "the last"))
        return
    size = int.from_bytes(content[:8], "little")
    yield from ((f"byte {offset} of the header's length", offset) for offset in range(8))
    yield from _tokens(content[8 : 8 + size], JSON_TOKEN, 8, ("the middle",))
    for tensor, entry in json.loads(content[8 : 8 + size]).items():
        if tensor != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            yield from ((f"data of {tensor}", offset) for offset in sorted({begin, (begin + end) // 2, end - 1}))


def _tokens(text: bytes, token: re.Pattern, start: int, parts: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    seen = set()
    for match in token.finditer(text):
        # One of all equal pieces of punctuation and space.
        if not re.search(rb"\w", match[0]) and match[0] in seen:
            continue
        seen.add(match[0])
        offsets = {"the first": match.start(), "the middle": sum(match.span()) // 2, "the last": match.end() - 1}
        shown = match[0].decode(errors="replace")[:40]
        for offset in sorted({offsets[part] for part in parts}):
            yield f"in {shown!r}", start + offset


def _others(folder: Path) -> Iterator[Damage]:
    """Yields damage of whole files, as a disk or a person leaves it."""

    def rewritten(change: Callable[[bytes], bytes], name: str) -> Callable[[Path], object]:
        return lambda at: (at / name).write_bytes(change((at / name).read_bytes()))

    for path in sorted(folder.iterdir()):
        name, size = path.name, path.stat().st_size
        page = max(size // 2 // PAGE * PAGE, 0)
        zeros = bytes(min(PAGE, size - page))
        changes: dict[str, Callable[[Path], object]] = {
            "a byte less": rewritten(lambda content: content[:-1], name),
            "a byte more": rewritten(lambda content: content + b" ", name),
            "empty": rewritten(lambda content: b"", name),
            "all zeros": rewritten(lambda content: bytes(len(content)), name),
            "a page of zeros": rewritten(
                lambda content, page=page, zeros=zeros: content[:page] + zeros + content[page + len(zeros) :], name
            ),
            "missing": lambda at, name=name: (at / name).unlink(),
            "a folder": lambda at, name=name: ((at / name).unlink(), (at / name).mkdir()),
        }
        if name not in ("config.json", "config.yaml", "manifest.json"):
            # The other files are the same in both checkpoints, but for the sums in the manifest.
            changes["the file of the checkpoint before"] = lambda at, name=name: shutil.copy(
                at.with_name(folder_of(at, STEPS - 1).name) / name, at / name
            )
        for kind, damage in changes.items():
            yield "other damage", f"{name}: {kind}", damage


def _first_flips(damages: list[Damage]) -> list[Damage]:
    """Returns the flip in the middle of the first of each kind's damages."""
    kinds: dict[str, list[Damage]] = {}
    for damage in damages:
        kinds.setdefault(damage[0], []).append(damage)
    return [same[len(same) // 2] for same in kinds.values()]


def _flip(name: str, offset: int, bit: int) -> Callable[[Path], object]:
    def flip(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[offset] ^= 1 << bit
        (folder / name).write_bytes(content)

    return flip


def _restore(folder: Path, saved: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(saved, folder)


def _problem(auto: DictConfig, named: DictConfig, run_dir: Path) -> str | None:
    """Returns what is wrong with how the damaged checkpoint in `run_dir` is treated.

    Args:
        auto: a configuration with `resume=auto`.
        named: one that names the damaged checkpoint.
    """
    try:
        taken = starting_point(auto, run_dir)
        if taken is None or taken.folder != folder_of(run_dir, STEPS - 1):
            return f"resume=auto takes {taken and taken.folder}"
        try:
            starting_point(named, run_dir)
        except UserError as refusal:
            message = str(refusal)
            good = "\n" not in message and f"{named.resume}/" in message
            return None if good else f"refused with {message!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it is loaded"
