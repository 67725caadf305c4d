"""Writes the model of a run, from its newest checkpoint or the one that is given, in the form of its library.

    python scripts/export.py outputs/DATE/TIME exported
    python scripts/export.py runs/a/checkpoints/step-00000500 exported

A model of transformers, and our Llama, becomes config.json and model.safetensors with the tokenizer's files, for
AutoModelForCausalLM and AutoTokenizer; a model of diffusers config.json and diffusion_pytorch_model.safetensors, with
the scheduler_config.json that it was trained by, so that model.weights=OUT trains on. Large models are written in
several files with an index. Where the run trained an adapter, OUT has the adapter in peft's form, for a model of
diffusers also as pytorch_lora_weights.safetensors for its pipelines and ComfyUI, or with --merge the whole model. Where
the run has averages of its weights (ema), they are written. KEY=VALUE changes the run's configuration: ema=null for the
weights themselves, dataset.tokenizer=FILE for a tokenizer's file that was moved. OUT is complete or not there.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.runs import starting

if __name__ == "__main__":
    starting.refuse_foreign_python()
    starting.end_on_interrupt()

from offload.knobs import parse_bytes
from training.errors import as_user_error
from training.runs import compose_errors, console


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN|CHECKPOINT", help="the directory of a run, or of one of its checkpoints")
    parser.add_argument("out", metavar="OUT", help="a new folder, or an empty one")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the run's configuration"
    )
    parser.add_argument(
        "--max-shard",
        default="4GiB",
        metavar="BYTES",
        help="the most bytes of a file of weights, but for one layer [%(default)s]",
    )
    parser.add_argument("--merge", action="store_true", help="an adapter: the model with the adapter merged into it")
    options = parser.parse_intermixed_args()
    from training.saved_runs.export import export

    with as_user_error(""):
        limit = parse_bytes("--max-shard", options.max_shard)
    names = export(options.run, options.out, options.overrides, limit, options.merge)
    print(f"{options.out}: {', '.join(names)}")


if __name__ == "__main__":
    starting.interrupt_as_usual()
    console.tolerate_failures()
    compose_errors.run(main)
