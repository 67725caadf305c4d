"""Draws the planned steps of docs/modes.md, of the preset of an H200: python -m docs.figures.draw_plans."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from training.runs.files import PLAN_PICTURE

FOLDER = Path(__file__).parent
STEP = ("plan=true", "hardware=h200", "experiment=llama7b_speed", "batch_size=8", "clip_norm=null")
MODES = {
    "none": ("recompute=block",),
    "bounce_linear": ("recompute=block",),
    "layer_stream": ("recompute=block",),
    "shard_offload": ("offload.shard_bytes=2GiB", "microbatches=4"),
    "tensor_swap": (),
    "layer_stream_swap": ("recompute=block",),
}


def main() -> None:
    for mode, knobs in MODES.items():
        with tempfile.TemporaryDirectory() as run:
            command = [sys.executable, "train.py", *STEP, f"offload={mode}", *knobs, f"hydra.run.dir={run}"]
            subprocess.run(command, cwd=FOLDER.parents[1], check=True)
            shutil.copy(Path(run) / PLAN_PICTURE, FOLDER / f"plan_{mode}.png")


if __name__ == "__main__":
    main()
