"""Whole training steps of chats: modes of this repository and TRL's SFTTrainer, on the same model, chats and card.

    python scripts/bench_trl.py --modes none layer_stream --chats 3000
    python scripts/bench_trl.py --long --activation-offloading --set seq_len=65536 batch_size=1
    python scripts/bench_trl.py --device cpu --model tiny_qwen3 --set seq_len=256 --steps 4 --chats 40    # does it run?

A mode is a run of `train.py`, whose summary has its step time and its tokens a second. TRL (1.16) gets the model as
`offload=none` holds it, with the same adapters and quantised weights, and the same rows: packed by best fit, one row a
microbatch with accumulation, positions that restart at each chat, gradient checkpointing, and the attention that
`--attention` names (sdpa makes a mask of the row's length squared). Each row of the table is a process of its own.
Chats are drawn at random: their lengths are those of talks, their letters mean nothing. With `--long` each chat fills a
row of `seq_len` tokens.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.runs.files import SUMMARY_FILE

ROOT = Path(__file__).resolve().parent.parent

# A model for the first look, on a CPU.
TINY = {
    "tiny_qwen3": [
        "model=hf",
        "model.source=qwen3",
        "model.overrides={vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,"
        " num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}",
    ]
}


def write_chats(file: Path, count: int, least: int = 20) -> None:
    """Writes `count` chats of one to four turns; a turn has 20 to 3,000 letters, half of the answers fewer than 300.

    An answer has `least` letters or more.
    """
    draw = random.Random(0)
    with file.open("w") as lines:
        for _ in range(count):
            messages = []
            for _ in range(draw.randint(1, 4)):
                for role, median in (("user", 120), ("assistant", 300)):
                    letters = min(max(int(draw.lognormvariate(0, 0.9) * median), 20), 3000)
                    letters = max(letters, least if role == "assistant" else 0)
                    text = "".join(draw.choice("etaoin shrdlu cmfwyp") for _ in range(letters))
                    messages.append({"role": role, "content": text})
            lines.write(json.dumps({"messages": messages}) + "\n")


def overrides_of(options: argparse.Namespace, chats: Path) -> list[str]:
    """Returns what all rows have in common."""
    model = TINY.get(options.model, [f"model={options.model}"])
    data = ["dataset=chat", f"dataset.files={chats}", "dataset.packed=true", "dataset.eval_share=0"]
    data += ["dataset.too_long=truncate"] if options.long else []
    return [*model, *data, "adapter=lora", f"device={options.device}", *options.set]


def measure_mode(mode: str, options: argparse.Namespace, common: list[str], folder: Path) -> dict:
    """Runs train.py under a mode; returns its step time, its tokens a second and its peak."""
    run = folder / mode
    steps = [f"steps={options.warmup + options.steps}", f"warmup_steps={options.warmup}", "tracking=disabled"]
    command = [sys.executable, str(ROOT / "train.py"), *common, *steps, f"offload={mode}", f"hydra.run.dir={run}"]
    result = subprocess.run([*command, "log_every=1"], capture_output=True, text=True)
    if result.returncode:
        return {"failed": result.stderr.strip().splitlines()[-1]}
    summary = json.loads((run / SUMMARY_FILE).read_text())
    tokens = summary["perf/tokens_per_s"]
    return {"step_ms": summary["perf/step_ms"], "tokens_per_s": tokens, "peak": summary.get("memory/vram_peak_gib")}


def measure_trl(flags: list[str], options: argparse.Namespace, common: list[str], folder: Path) -> dict:
    """Runs TRL in a process of its own."""
    given = [f"--device={options.device}", f"--steps={options.steps}"]
    command = [sys.executable, __file__, *flags, *given, f"--warmup={options.warmup}", "--set", *common]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        return {"failed": result.stderr.strip().splitlines()[-1]}
    return json.loads(result.stdout.strip().splitlines()[-1])


def run_trl(options: argparse.Namespace) -> dict:
    """Trains with SFTTrainer for `warmup` + `steps` steps; returns medians of those that are timed."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from scripts.workload import composed
    from training.config.validation import check
    from training.data.tokenizer import load_tokenizer
    from training.profiling.hardware import resolve_device, vram_peak_gib
    from training.run.prepare import build_dataset
    from training.runs.invocation import Invocation
    from training.settle.components import Components, acquired, attached
    from training.weights.adapter import RunAdapter
    from training.weights.filling import fill_buffers, fill_parameters

    config = composed([*options.set, "offload=none"])
    check(config)
    device = resolve_device(config.device)
    components = Components.of(config, Invocation(Path(), {}), device)
    with tempfile.TemporaryDirectory() as folder:
        dataset = build_dataset(config, components.model, Path(folder))
    rows, real = [], []
    for index in range(options.warmup + options.steps):
        batch = dataset.batch(index)
        real.append(components.task.units_in(batch))
        for ids, labels, segments in zip(batch["input_ids"], batch["labels"], batch["segments"], strict=True):
            kept = segments >= 0
            # TRL shifts labels itself, leaves out the first of each chat, and is told by lengths where positions begin.
            shifted = torch.cat([labels.new_tensor([-100]), labels[kept][:-1]])
            lengths = segments[kept].unique_consecutive(return_counts=True)[1].tolist()
            rows.append({"input_ids": ids[kept].tolist(), "labels": shifted.tolist(), "seq_lengths": lengths})
    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.start = self.now()

        def on_step_end(self, *_, **__):
            times.append(self.now() - self.start)

        def now(self) -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter()

    with acquired(device) as streams, attached(components, streams) as on_gpu, tempfile.TemporaryDirectory() as out:
        model = on_gpu.model
        fill_buffers(model)
        fill_parameters(model, config, device, None)
        RunAdapter.of(config, model, starts=True).fill(model, device)
        hf = model.hf
        hf.set_attn_implementation(options.row)
        settings = SFTConfig(
            output_dir=out,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=config.batch_size,
            max_steps=len(real),
            learning_rate=config.optimizer.lr,
            padding_free=True,
            activation_offloading=options.activation_offloading,
            packing=False,
            max_length=None,
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            shuffle_dataset=False,
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            optim="adamw_torch_fused",
            max_grad_norm=config.clip_norm or 0.0,
        )
        tokenizer = load_tokenizer(config.dataset.tokenizer).pretrained
        data = Dataset.from_list(rows)
        SFTTrainer(hf, settings, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()]).train()
    timed = times[options.warmup :]
    return {
        "step_ms": statistics.median(timed) * 1e3,
        "tokens_per_s": sum(real[options.warmup :]) / sum(timed),
        "peak": vram_peak_gib(device) if device.type == "cuda" else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_8b", help="an option of conf/model")
    parser.add_argument("--modes", nargs="*", default=["none", "layer_stream"], metavar="MODE")
    parser.add_argument("--attention", nargs="*", default=["sdpa"], help="of TRL's rows")
    parser.add_argument(
        "--activation-offloading", action="store_true", help="a row of TRL with its own too; needs a GPU"
    )
    parser.add_argument("--long", action="store_true", help="each chat fills a row")
    parser.add_argument("--chats", type=int, default=3000)
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--set", nargs="+", default=["quantize=nf4", "seq_len=4096", "batch_size=4"], metavar="KEY=VALUE"
    )
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    values = dict(pair.split("=", 1) for pair in options.set)
    if options.long and "seq_len" not in values:
        parser.error("--long: a chat fills a row of seq_len tokens: add seq_len=N to --set")
    if options.row:
        print(json.dumps(run_trl(options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        chats = Path(folder) / "chats.jsonl"
        write_chats(chats, options.chats, *([2 * int(values["seq_len"])] if options.long else []))
        common = overrides_of(options, chats)
        print(" ".join(common[1:]), flush=True)
        print(f"{'':24}{'step ms':>11}{'tokens/s':>11}{'to first':>11}{'peak GiB':>11}", flush=True)
        first = None
        rows = [(mode, measure_mode, mode) for mode in options.modes]
        for attention in options.attention:
            rows.append((f"TRL, {attention}", measure_trl, [f"--row={attention}"]))
            if options.activation_offloading:
                flags = [f"--row={attention}", "--activation-offloading"]
                rows.append((f"TRL, {attention}, offloading", measure_trl, flags))
        for name, measure, given in rows:
            row = measure(given, options, common, Path(folder))
            if "failed" in row:
                print(f"{name:24}failed: {row['failed']}", flush=True)
                continue
            first = first or row["tokens_per_s"]
            peak = "-" if row["peak"] is None else f"{row['peak']:.1f}"
            ratio = first / row["tokens_per_s"]
            print(f"{name:24}{row['step_ms']:11.1f}{row['tokens_per_s']:11.0f}{ratio:11.3f}{peak:>11}", flush=True)


if __name__ == "__main__":
    main()
