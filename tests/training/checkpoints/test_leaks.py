"""Memory over a whole run with many saves."""

from pathlib import Path

from training.runs.records import read_metrics

STEPS = 60
# The moments alone take 0.6 MiB, and the last three quarters of the steps save 15 times.
GROWTH_MIB = 4


def test_resident_memory_stays_flat(tmp_path: Path, run_here):
    """After a quarter of the steps all has been allocated that a run ever holds."""
    overrides = ("offload=layer_stream_swap", "optimizer=host_adamw")
    sizes = ("model.hidden_size=64", "model.intermediate_size=128")
    run_here(tmp_path, *overrides, *sizes, "checkpoint.every=3", f"steps={STEPS}", "log_every=3")
    rss = [record["memory/rss_gib"] * 2**10 for record in read_metrics(tmp_path)]
    assert max(rss[-len(rss) // 4 :]) - rss[len(rss) // 4] < GROWTH_MIB
