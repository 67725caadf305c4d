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

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict

from offload import KnobError, in_range
from training import sweep
from training.checkpoints.layout import MANIFEST_FILE, WEIGHTS_STEM, checkpoints_in, step_of
from training.checkpoints.manifest import DamagedError, read_manifest, verify
from training.config import schema
from training.config.modes import FOLDER
from training.config.validation import check
from training.errors import UserError
from training.runs import compose_errors, console
from training.runs.files import CHECKPOINTS_FOLDER
from training.runs.invocation import Invocation
from training.runs.paths import home_expanded
from training.runs.repeat import overrides_of
from training.visible_text import visible_lines


def found(given: str) -> tuple[Path, Path | None]:
    """Returns the directory of the run that `given` names, and the checkpoint if it names one.

    Raises UserError if there is no such directory.
    """
    path = home_expanded("RUN", given).absolute()
    if not path.is_dir():
        raise UserError(f"{given}: no such directory: give the directory of a run, or one of its checkpoints")
    if (path / MANIFEST_FILE).exists() or step_of(path) is not None:
        return path.parent.parent, path
    return path, None


def newest_checkpoint(run_dir: Path) -> Path:
    """Returns the newest checkpoint of a run. Raises UserError if there is none."""
    if checkpoints := checkpoints_in(run_dir / CHECKPOINTS_FOLDER):
        return checkpoints[0]
    raise UserError(f"{run_dir}: the run has no checkpoint: train with checkpoint.every=N")


def configuration(run_dir: Path, overrides: list[str]) -> tuple[DictConfig, Invocation]:
    """Composes and checks the configuration of the run in `run_dir`, changed by `overrides`."""
    schema.register()
    sweep.register_launcher()
    own = overrides_of(run_dir, str(run_dir), overrides)
    with initialize_config_dir(str(FOLDER.parent), version_base="1.3"):
        config = compose("config", own, return_hydra_config=True)
    invocation = Invocation.of(config.hydra, run_dir)
    with open_dict(config):
        del config["hydra"]
    check(config)
    return config, invocation


def refuse_damage(checkpoint: Path) -> None:
    """Raises UserError if the weights in `checkpoint` are not those that were saved."""
    try:
        files = read_manifest(checkpoint)
        verify(checkpoint, {name: record for name, record in files.items() if name.startswith(WEIGHTS_STEM)})
    except DamagedError as error:
        raise UserError(f"{error}: give another checkpoint") from error


def text_of(options: argparse.Namespace) -> str:
    """Returns the prompt and its continuation. Raises UserError for everything that the user can fix."""
    for name, bounds in RANGES.items():
        try:
            in_range(f"--{name.replace('_', '-')}", getattr(options, name), **bounds)
        except KnobError as error:
            raise UserError(str(error)) from None
    run_dir, checkpoint = found(options.run)
    config, invocation = configuration(run_dir, options.overrides)
    checkpoint = checkpoint or newest_checkpoint(run_dir)
    from models.weights import load_weights
    from training.build import attached
    from training.components import Components, acquired
    from training.evaluation import observed
    from training.profiling.hardware import resolve_device
    from training.tasks.causal_lm import check_vocabulary, continued, prompt_ids, refuse_model, tokenizer_of

    tokenizer = tokenizer_of(config, options.run)
    components = Components.of(config, invocation, resolve_device(config.device))
    check_vocabulary(components.model, tokenizer.vocab_size)
    refuse_model(components.model, options.run)
    refuse_damage(checkpoint)
    prompt = prompt_ids(tokenizer, options.prompt)
    if len(prompt) + options.tokens > config.seq_len:
        print(f"note: the text may be longer than seq_len={config.seq_len}, the longest in training", file=sys.stderr)
    with acquired(components.device) as streams, attached(components, streams) as model:
        try:
            load_weights(model, checkpoint)
            with observed(model, options.seed, streams.device):
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


RANGES = {
    "tokens": {"at_least": 1},
    "temperature": {"at_least": 0},
    "top_p": {"above": 0, "at_most": 1},
    "seed": {"at_least": 0, "at_most": 2**64 - 1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="the directory of a run, or of one of its checkpoints")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes of the run's configuration")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to generate, at most [%(default)s]")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="divides the logits; 0 takes the likeliest [%(default)s]"
    )
    parser.add_argument("--top-p", type=float, default=0.95, help="share of probability to draw from [%(default)s]")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers [%(default)s]")
    print(visible_lines(text_of(parser.parse_intermixed_args())))


if __name__ == "__main__":
    console.may_fail()
    compose_errors.run(main)
