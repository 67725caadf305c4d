"""Runs the other systems and the modes of this repository on one GPU, and compares them: docs/peers.md.

    python scripts/peers.py runs/peers                        # 4k and 16k tokens a step, 9 minutes at most
    python scripts/peers.py runs/peers --minutes 30 --page    # runs what is missing, and fills docs/peers.md
    python scripts/peers.py runs/peers --systems none fsdp2 roundpipe --tokens 16384

Each system runs in a process of its own, with a time limit; one that fails does not stop the others. A run that ended
well is not repeated. No run is started that the time left may not suffice for.
"""

import argparse
import os
import shutil
import sys
from pathlib import Path
from time import monotonic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.comparison.report import compare
from training.comparison.rows import Row
from training.comparison.table import to_markdown
from training.config.modes import options_of
from training.runs import console
from training.runs.files import MEMORY_FIGURE
from training.sweeps.job import SweepJob, summary_in

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "peers.md"
FIGURES = ROOT / "docs" / "figures"
START = "<!-- The measured tables: scripts/peers.py --page makes them from its runs. -->\n"
END = "<!-- The end of the measured tables. -->"
VARIANTS = {
    "roundpipe_stale": ["offload=roundpipe", "offload.stale=true"],
    "ramtorch_bf16": ["offload=ramtorch", "offload.masters=none"],
    "superoffload": ["offload=deepspeed_zero3", "offload.super_offload=true"],
}
NAMES = (
    "none", "layer_stream", "shard_offload", "fsdp2", "deepspeed_zero3", "roundpipe", "roundpipe_stale", "ramtorch",
    "ramtorch_bf16", "fairscale", "torchao_optimizer", "bounce_linear", "save_on_cpu", "tensor_swap", "superoffload",
    "diffusers_group",
)  # fmt: skip
# The overrides that choose each system, in the order in which the systems run.
SYSTEMS = {name: VARIANTS.get(name, [f"offload={name}"]) for name in NAMES}
# Seconds without which no run is started, and those that a run may take to end when its time is over.
LEAST_S, GRACE_S = 20.0, 5.0


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path, help="directory of the runs")
    options.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], help="tokens of a step")
    options.add_argument("--seq-len", type=int, default=2048)
    options.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    options.add_argument("--experiment", choices=options_of("experiment"), default="peers_7b", metavar="NAME")
    options.add_argument("--minutes", type=float, default=9.0, help="of all runs together")
    options.add_argument("--job-minutes", type=float, default=2.0, help="of one run")
    options.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of every run")
    options.add_argument("--page", action="store_true", help=f"write the tables into {PAGE.relative_to(ROOT)}")
    return options


def check(options_parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the process with one line for a number of tokens that is not a number of sequences."""
    length = options.seq_len
    if length < 1:
        options_parser.error(f"argument --seq-len: {length} must be at least 1")
    for tokens in options.tokens:
        if tokens < length or tokens % length:
            options_parser.error(f"argument --tokens: {tokens} must be a multiple of --seq-len {length}, in sequences")


def jobs(options: argparse.Namespace) -> list[SweepJob]:
    """Returns the runs that are missing, those of the first size first."""
    found = []
    for tokens in options.tokens:
        for system in options.systems:
            directory = options.out.resolve() / str(tokens) / system
            overrides = [
                f"experiment={options.experiment}",
                *SYSTEMS[system],
                f"seq_len={options.seq_len}",
                f"batch_size={tokens // options.seq_len}",
                "tracking=disabled",
                # The metrics of a run that ended early are made again.
                "resume=auto",
                *options.set,
                f"hydra.run.dir='{directory}'",
            ]
            if summary_in(directory).get("status") != "ok":
                found.append(SweepJob(len(found), overrides, directory, grace_s=GRACE_S))
    return found


def run_all(waiting: list[SweepJob], options: argparse.Namespace) -> None:
    """Runs each job within what is left of the time; those that are left over are named."""
    end = monotonic() + options.minutes * 60
    for position, job in enumerate(waiting):
        left = end - monotonic() - GRACE_S
        if left < LEAST_S:
            print("no time left for:", *("/".join(job.directory.parts[-2:]) for job in waiting[position:]), flush=True)
            return
        job.timeout_min = min(options.job_minutes, left / 60)
        print(f"\n== {'/'.join(job.directory.parts[-2:])}", flush=True)
        begin = monotonic()
        job.directory.mkdir(parents=True, exist_ok=True)
        # Overrides may hold paths relative to where the caller stands, train.py and conf/ do not.
        job.run([sys.executable, str(ROOT / "train.py"), *job.overrides], dict(os.environ))
        status, reason = job.outcome
        print(f"== {status} in {monotonic() - begin:.0f} s{f': {reason}' if reason else ''}", flush=True)


def with_tables(page: str, tables: str) -> str:
    """Returns the page with `tables` between the two markers."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{tables}{END}{after}"


def tables_of(sizes: dict[int, list[Row]], command: str) -> str:
    """Returns a table for each number of tokens, and the machine, the versions and the command of the runs."""
    runs = [run for rows in sizes.values() for row in rows for run in row.runs]
    facts = [sorted({run.origin[key] for run in runs if key in run.origin}) for key in ("machine", "torch", "commit")]
    dates = sorted({run.origin["date"][:10] for run in runs if "date" in run.origin})
    machine, torch_version, commit = (", ".join(fact) for fact in facts)
    about = f"Measured on {machine}, torch {torch_version}, commit {commit}, {', '.join(dates)}, by\n`{command}`.\n"
    parts = [to_markdown(rows, f"{tokens:,} tokens a step", "") for tokens, rows in sizes.items()]
    return "\n".join(["", about, *parts, ""])


def main() -> int:
    options_parser = parser()
    options = options_parser.parse_args()
    check(options_parser, options)
    run_all(jobs(options), options)
    sizes = {}
    for tokens in options.tokens:
        folder = options.out.resolve() / str(tokens)
        if any(folder.glob("*/summary.json")):
            sizes[tokens] = compare([folder], folder)
    if options.page and sizes:
        command = "python scripts/peers.py " + " ".join(sys.argv[1:])
        PAGE.write_text(with_tables(PAGE.read_text(), tables_of(sizes, command)))
        for tokens in sizes:
            shutil.copyfile(options.out / str(tokens) / f"{MEMORY_FIGURE}.png", FIGURES / f"peers_{tokens}.png")
    return 1 if any(summary_in(job.directory).get("status") == "failed" for job in jobs(options)) else 0


if __name__ == "__main__":
    console.tolerate_failures()
    sys.exit(main())
