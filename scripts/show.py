"""Shows chats as a run gets them: as text with special tokens, and what of it is trained on.

    python scripts/show.py model=hf model.source=Qwen/Qwen3-8B dataset=chat 'dataset.files=chats/*.jsonl' --count 5
    python scripts/show.py outputs/DATE/TIME dataset.train_on=last          # a run's dataset, with a change

What is trained on is green in a terminal, and in double brackets elsewhere. The rest of the arguments are those of
train.py. No weights are read.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.runs import starting

if __name__ == "__main__":
    starting.refuse_foreign_python()
    starting.end_on_interrupt()

from training.errors import UserError
from training.runs import compose_errors, console
from training.visible_text import visible, visible_lines

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from training.data.chats.rendering import Sample
    from training.runs.invocation import Invocation

IN_TERMINAL = ("\033[32m", "\033[0m")
ELSEWHERE = ("\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}")


def show(given: Sequence[str], count: int, marks: tuple[str, str]) -> None:
    """Prints the first `count` chats of a configuration, and facts about its dataset.

    Raises UserError for a configuration or dataset that cannot be used.
    """
    if count < 1:
        raise UserError(f"--count={count}: must be at least 1")
    config, invocation = _configuration(given)
    # With these come torch and transformers: they are imported once the configuration was checked.
    from training.data.datasets import build_dataset, has_facts
    from training.profiling.hardware import resolve_device
    from training.settle.components import Components

    if not has_facts(config):
        name = config.dataset._target_.rpartition(".")[2]
        raise UserError(f"{name} has no chats to show: take dataset=chat or preferences")
    # Settles the tokenizer, which may be that of the model.
    components = Components.of(config, invocation, resolve_device("cpu"))
    with tempfile.TemporaryDirectory(prefix="show-") as folder:
        dataset = build_dataset(components.config, components.model, Path(folder))
        for place, sample in dataset.shown(count):
            print(f"--- {visible(place)}\n{marked(dataset, sample, marks)}")
    print("---")
    facts = dataset.facts()
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:{width}}  {visible(fact)}")


def marked(dataset: object, sample: Sample, marks: tuple[str, str]) -> str:
    """Returns a sample's text, with `marks` (before, after) around each part that is trained on."""
    text, start, tokens = "", 0, len(sample.ids)
    while start < tokens:
        end = next((n for n in range(start, tokens) if sample.trained[n] != sample.trained[start]), tokens)
        part = visible_lines(dataset.text_of(sample.ids[start:end]))
        text += f"{marks[0]}{part}{marks[1]}" if sample.trained[start] else part
        start = end
    return text


def _configuration(given: Sequence[str]) -> tuple[DictConfig, Invocation]:
    """Composes what the arguments of train.py, or a run and changes of it, describe."""
    from training.saved_runs.finding import configuration, found

    if given and "=" not in given[0]:
        return configuration(found(given[0])[0], list(given[1:]))
    from training.config import schema
    from training.config.validation import check
    from training.runs.invocation import Invocation
    from training.sweeps import launcher

    schema.register()
    launcher.register_launcher()
    config, invocation = Invocation.composed(given)
    check(config)
    return config, invocation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "given", nargs="+", metavar="RUN|KEY=VALUE", help="the directory of a run, or the arguments of train.py"
    )
    parser.add_argument("--count", type=int, default=3, help="chats to show [%(default)s]")
    options = parser.parse_intermixed_args()
    show(options.given, options.count, IN_TERMINAL if sys.stdout.isatty() else ELSEWHERE)


if __name__ == "__main__":
    starting.interrupt_as_usual()
    console.tolerate_failures()
    compose_errors.run(main)
