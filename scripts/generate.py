"""Generates text with the model of a run: from its newest checkpoint, or from the checkpoint that is given.

    python scripts/generate.py outputs/DATE/TIME 'def main('
    python scripts/generate.py runs/a/checkpoints/step-00000500 'def main(' offload=layer_stream device=cpu
    python scripts/generate.py runs/a '' --tokens 400 --temperature 0          # from the start of a document, greedy

The model is made as the run made it, under the run's offload mode, so a model that does not fit the GPU generates too.
KEY=VALUE and GROUP=OPTION change the run's configuration, as for train.py. The same seed gives the same text in every
mode. An empty prompt begins a new document; a document that ends before --tokens ends the text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.runs import allocator, starting

if __name__ == "__main__":
    starting.refuse_foreign_python()
    starting.end_on_interrupt()
    allocator.expand_segments()

from offload import KnobError, in_range
from training.errors import UserError
from training.runs import compose_errors, console
from training.saved_runs.finding import configuration, found, newest_checkpoint, refuse_damage
from training.visible_text import visible_lines

RANGES = {
    "tokens": {"at_least": 1},
    "temperature": {"at_least": 0},
    "top_p": {"above": 0, "at_most": 1},
    "seed": {"at_least": 0, "at_most": 2**64 - 1},
}


def check_ranges(options: argparse.Namespace) -> None:
    """Raises UserError for a number on the command line that is out of its range."""
    for name, bounds in RANGES.items():
        try:
            in_range(f"--{name.replace('_', '-')}", getattr(options, name), **bounds)
        except KnobError as error:
            raise UserError(str(error)) from None


def text_of(options: argparse.Namespace) -> str:
    """Returns the prompt and its continuation. Raises UserError for everything that the user can fix."""
    check_ranges(options)
    run_dir, checkpoint = found(options.run)
    config, invocation = configuration(run_dir, options.overrides)
    checkpoint = checkpoint or newest_checkpoint(run_dir)
    from training.components import Components, acquired, attached
    from training.evaluation.held_out import observed
    from training.planning.samples import refuse_text
    from training.profiling.hardware import resolve_device
    from training.saved_runs.loading import load_model
    from training.tasks.text_samples import (
        check_vocabulary,
        continued,
        prompt_ids,
        refuse_model,
        refuse_positions,
        tokenizer_of,
    )
    from training.weights.filling import fill_buffers

    tokenizer = tokenizer_of(config, options.run)
    components = Components.of(config, invocation, resolve_device(config.device))
    check_vocabulary(components.model, tokenizer.vocab_size)
    refuse_model(components.model, options.run)
    refuse_damage(checkpoint, config)
    prompt = prompt_ids(tokenizer, options.prompt)
    positions = len(prompt) + options.tokens
    # The last token is only drawn.
    refuse_positions(components.model, positions - 1, f"--tokens={options.tokens} after {len(prompt)} of the prompt")
    refuse_text(components, positions)
    if positions > config.seq_len:
        print(f"note: the text may be longer than seq_len={config.seq_len}, the longest in training", file=sys.stderr)
    with acquired(components.device) as streams, attached(components, streams) as model:
        try:
            fill_buffers(model)
            load_model(model, checkpoint, config, components.device)
            with observed(model, options.seed, streams.device), components.mode.inference():
                return continued(
                    model,
                    tokenizer,
                    prompt,
                    tokens=options.tokens,
                    temperature=options.temperature,
                    top_p=options.top_p,
                    seed=options.seed,
                    device=streams.device,
                )
        except ValueError as error:
            raise UserError(f"{checkpoint}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="the directory of a run, or of one of its checkpoints")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the run's configuration"
    )
    parser.add_argument("--tokens", type=int, default=100, help="tokens to generate, at most [%(default)s]")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="divides the logits; 0 takes the likeliest [%(default)s]"
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="share of probability to draw from [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers [%(default)s]")
    print(visible_lines(text_of(parser.parse_intermixed_args())))


if __name__ == "__main__":
    starting.interrupt_as_usual()
    console.tolerate_failures()
    compose_errors.run(main)
