"""Generates text with the model of a run: from its newest checkpoint, or from the checkpoint that is given.

    python scripts/generate.py outputs/DATE/TIME 'def main('
    python scripts/generate.py runs/a/checkpoints/step-00000500 'def main(' offload=layer_stream device=cpu
    python scripts/generate.py runs/a '' --tokens 400 --temperature 0          # from the start of a document, greedy
    python scripts/generate.py runs/a --chat                                   # a conversation; an empty line ends it
    python scripts/generate.py runs/b 'a red circle' --picture circle.png      # of model=pipeline

The model is made as the run made it, under the run's offload mode, so a model that does not fit the GPU generates too.
KEY=VALUE and GROUP=OPTION change the run's configuration, as for train.py. The same seed gives the same text in every
mode. Where the run has averages of its weights (ema), these generate, and with ema=null the weights. An empty prompt
begins a new document. A text ends after --tokens, or where the model ends it: with its tokenizer's end of text, or
another end that its generation_config.json and config.json name. With --chat each line of the input is what the user
says, and the answer, of at most --tokens, is written as it is drawn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.runs import starting

if __name__ == "__main__":
    starting.refuse_foreign_python()
    starting.end_on_interrupt()
    starting.expand_segments()

from offload.knobs import in_range
from training.errors import UserError, as_user_error
from training.runs import compose_errors, console
from training.saved_runs.finding import configuration, found, newest_checkpoint, refuse_damage, take_tokenizer
from training.visible_text import visible_lines

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from torch import nn

    from training.data.tokenizer import Tokenizer
    from training.settle.components import Components

RANGES = {
    "tokens": {"at_least": 1},
    "temperature": {"at_least": 0},
    "top_p": {"above": 0, "at_most": 1},
    "seed": {"at_least": 0, "at_most": 2**64 - 1},
}


def check_ranges(options: argparse.Namespace) -> None:
    """Raises UserError for a number on the command line that is out of its range."""
    for name, bounds in RANGES.items():
        with as_user_error(""):
            in_range(f"--{name.replace('_', '-')}", getattr(options, name), **bounds)


@dataclass(frozen=True)
class Writer:
    """A model that is in its place, and how it draws."""

    model: nn.Module
    device: torch.device
    config: DictConfig
    tokenizer: Tokenizer
    stops: frozenset[int]
    drawing: dict[str, Any]


def components_of(options: argparse.Namespace) -> tuple[Components, Path]:
    """Returns the components of the run, and its checkpoint. Raises UserError for everything that the user can fix."""
    check_ranges(options)
    run_dir, checkpoint = found(options.run)
    config, invocation = configuration(run_dir, options.overrides)
    checkpoint = checkpoint or newest_checkpoint(run_dir)
    take_tokenizer(config, checkpoint)
    from training.profiling.hardware import resolve_device
    from training.settle.components import Components

    components = Components.of(config, invocation, resolve_device(config.device))
    refuse_damage(checkpoint, config)
    return components, checkpoint


@contextmanager
def writer(
    options: argparse.Namespace, prompt_of: Callable[[DictConfig, Tokenizer], Sequence[int]]
) -> Iterator[tuple[Writer, Sequence[int]]]:
    """Loads the model of the run; gives what writes text with it, and the ids that `prompt_of` makes, to be continued.

    Raises UserError for a run whose model makes no text, or a prompt that does not fit.
    """
    components, checkpoint = components_of(options)
    config = components.config
    from training.planning.fit import refuse_text
    from training.tasks.text_samples import (
        check_vocabulary,
        refuse_model,
        refuse_positions,
        tokenizer_of,
        warn_of_not_done,
    )
    from training.weights.model_tokenizer import stops_of

    if "pipeline" in config.dataset:
        raise UserError(f"{options.run}: its model makes pictures: give --picture FILE.png")
    tokenizer = tokenizer_of(config, options.run)
    refuse_model(components.model, options.run)
    prompt = prompt_of(config, tokenizer)
    check_vocabulary(config, components.model, tokenizer.vocab_size, max(prompt) + 1)
    positions = len(prompt) + options.tokens
    # The last token is only drawn.
    refuse_positions(components.model, positions - 1, f"--tokens={options.tokens} after {len(prompt)} of the prompt")
    refuse_text(components, positions)
    if positions > config.seq_len:
        print(f"note: the text may be longer than seq_len={config.seq_len}, the longest in training", file=sys.stderr)
    warn_of_not_done(config)
    drawing = {name: getattr(options, name) for name in RANGES}
    with filled(components, checkpoint, options.seed) as (model, device):
        yield Writer(model, device, config, tokenizer, stops_of(config, tokenizer), drawing), prompt


@contextmanager
def filled(components: Components, checkpoint: Path, seed: int) -> Iterator[tuple[nn.Module, torch.device]]:
    """Gives the model of a checkpoint under its mode, for forwards, and its device."""
    from training.evaluation.held_out import observed
    from training.saved_runs.finding import load_model
    from training.settle.components import acquired, attached
    from training.weights.filling import fill_buffers

    with acquired(components.device) as streams, attached(components, streams) as under_mode:
        model = under_mode.model
        with as_user_error(f"{checkpoint}: "):
            fill_buffers(model)
            load_model(model, checkpoint, components.config, components.device)
            with observed(model, seed, streams.device), under_mode.inference():
                yield model, streams.device


def text_of(options: argparse.Namespace) -> str:
    """Returns the prompt and its continuation. Raises UserError for everything that the user can fix."""
    from training.tasks.text_samples import continued, prompt_ids

    with writer(options, lambda config, tokenizer: prompt_ids(tokenizer, options.prompt)) as (made, prompt):
        return continued(made.model, made.tokenizer, prompt, stops=made.stops, device=made.device, **made.drawing)


def draw(options: argparse.Namespace) -> None:
    """Writes the picture that the run's pipeline makes of the prompt. Raises UserError for what the user can fix."""
    from PIL import Image

    from training.run.encoding import encode_prompts

    components, checkpoint = components_of(options)
    config = components.config
    if "pipeline" not in config.dataset:
        raise UserError(f"--picture: {options.run} trained no model=pipeline, which alone makes pictures of prompts")
    config.seed, config.sample.prompts = options.seed, [options.prompt]
    encode_prompts([options.prompt], components)
    sampler = components.task.sampler(config, components.model)
    with filled(components, checkpoint, options.seed) as (model, device):
        (picture,) = sampler.pictures(model, device, lambda: False)
    try:
        Image.fromarray(picture.numpy()).save(options.picture)
    except (OSError, ValueError) as error:
        raise UserError(f"--picture={options.picture} cannot be written ({error}): give a file.png") from error


def chat(options: argparse.Namespace) -> None:
    """Answers each line of the input, until an empty one or the end. Raises UserError for what the user can fix."""
    from models.generation import generate
    from training.data.chats.rendering import Renderer
    from training.tasks.text_samples import has_template, pieces, refuse_positions

    messages: list[dict[str, str]] = []
    renderers = []

    def first_prompt(config: DictConfig, tokenizer: Tokenizer) -> Sequence[int]:
        template = options.template or config.dataset.get("template")
        if template is None and not has_template(config, tokenizer):
            raise UserError("--chat: the model has no template of chats: give --template FILE, a template of Jinja")
        renderers.append(Renderer(tokenizer, template))
        if "<|channel|>" in renderers[0].template.text():
            # It expects reasoning and answer apart, and writes them in their channels itself.
            raise UserError("--chat: answers in channels, as of gpt-oss, are not taken apart here: give a PROMPT alone")
        return renderers[0].prompt([{"role": "user", "content": "?"}])

    with writer(options, first_prompt) as (made, _):
        while said := asked():
            messages.append({"role": "user", "content": said})
            prompt = tuple(map(int, renderers[0].prompt(messages)))
            given = f"--tokens={options.tokens} after {len(prompt)} of the conversation"
            refuse_positions(made.model, len(prompt) + options.tokens - 1, given)
            drawn = generate(
                made.model, prompt, device=made.device, vocab_size=made.tokenizer.vocab_size, **made.drawing
            )
            answer = ""
            for piece in pieces(made.tokenizer, drawn, made.stops):
                print(visible_lines(piece), end="", flush=True)
                answer += piece
            print(flush=True)
            messages.append({"role": "assistant", "content": answer})


def asked() -> str:
    """Returns what the user says next, without the end of its line; "" at the end."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="the directory of a run, or of one of its checkpoints")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="text to continue; none with --chat")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the run's configuration"
    )
    parser.add_argument("--tokens", type=int, default=100, help="tokens to generate, at most [%(default)s]")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="divides the logits; 0 takes the likeliest [%(default)s]"
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="share of probability to draw from [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers [%(default)s]")
    parser.add_argument("--chat", action="store_true", help="answers each line of the input, until an empty one")
    parser.add_argument("--template", metavar="FILE", help="with --chat: a template of Jinja in place of the model's")
    parser.add_argument("--picture", metavar="FILE", help="of model=pipeline: writes the picture of PROMPT to FILE.png")
    options = parser.parse_intermixed_args()
    if options.chat:
        options.overrides = [*([] if options.prompt is None else [options.prompt]), *options.overrides]
        chat(options)
        return
    if options.prompt is None:
        raise UserError("PROMPT is missing: give a text to continue, '' for the start of one, or --chat")
    if options.picture is not None:
        draw(options)
    else:
        print(visible_lines(text_of(options)))


if __name__ == "__main__":
    starting.interrupt_as_usual()
    console.tolerate_failures()
    compose_errors.run(main)
