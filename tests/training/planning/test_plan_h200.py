"""Plans against what one H200 measured (docs/log.md): bytes within 10%, times within 15% (5% on streams that keep
time), with no GPU.

The blocks alone of a 7B model in bf16, sequences of 2048 tokens, as scripts/bench.py runs them.
"""

from functools import partial

import pytest
import torch

from models.llama import Llama
from offload.blocks import find_blocks
from offload.knobs import GIB
from offload.planning.cost_model import UpdateTimes, forecast, hidden_share
from offload.planning.dry_run import DryRun, dry_run
from offload.planning.simulated_streams import SimulatedStreams
from scripts.workload import Blocks, build_mode
from tests.training.helpers.in_process import components_of
from training.planning.machine import Machine, machine_of, preset
from training.planning.plan import plan_run

GB = 1e9

# Mode, sequences, recompute: ms, peak GiB, GB in, GB out.
STEPS = [
    ("none", 2, False, 293, 31.2, 0, 0),
    ("bounce_linear", 2, False, 494.1, 19.5, 25.60, 12.95),
    ("layer_stream", 2, False, 494.0, 20.3, 24.69, 12.95),
    ("layer_stream:resident=60%", 2, False, 301.1, 27.4, 9.31, 5.26),
    ("none", 8, True, 1480, 27.0, 0, 0),
    ("bounce_linear", 8, True, 1502.2, 7.5, 29.04, 12.95),
    ("shard_offload", 8, True, 1498.1, 5.3, 25.1 + 3.9, 12.95 + 4.2),
    ("tensor_swap", 2, False, 720.1, 24.7, 19.6, 20.2),
    # Its copies were not counted then. Its time over none, at 50 GB/s, makes them 75 GB.
    ("save_on_cpu", 2, False, 1780.6, 24.5, 37.5, 37.5),
]
# When updates begin: ms of a full step of 16 blocks with layer_stream, recompute, 16k tokens.
FULL_STEPS = [("inside", 807.2), ("at the end", 1231.1)]


@pytest.fixture(scope="module")
def h200() -> Machine:
    return preset("h200")


@pytest.fixture
def timed(h200: Machine) -> SimulatedStreams:
    return h200.simulated(torch.bfloat16)


def dry_run_of(
    spec: str, sequences: int, recomputes: bool, blocks: int = 32, timed: SimulatedStreams | None = None
) -> tuple[int, DryRun]:
    """Returns the bytes of the weights that stay on the device, and the dry run of a step."""
    with torch.device("meta"):
        model = Blocks(Llama(1, 4096, 11008, blocks, 32, 32).model.layers, 128).bfloat16()
        batch = torch.empty(sequences, 2049, dtype=torch.int64)
    _, mode = build_mode(spec)
    resident_bytes = mode.footprint(model).resident_bytes
    recomputed = [block for _, block in find_blocks(model)] if recomputes and not mode.recomputes else []
    loss = partial(model, batch[:, :-1], batch[:, 1:])
    return resident_bytes, dry_run(mode, model, [loss], recomputed=recomputed, timed=timed)


@pytest.mark.parametrize(
    ("spec", "sequences", "recomputes", "ms", "peak_gib", "gb_in", "gb_out"),
    STEPS,
    ids=[f"{spec}-{2 * sequences}k" for spec, sequences, *_ in STEPS],
)
@pytest.mark.slow
def test_forward_and_backward(h200: Machine, timed, spec, sequences, recomputes, ms, peak_gib, gb_in, gb_out):
    resident_bytes, found = dry_run_of(spec, sequences, recomputes, timed=timed)
    assert (resident_bytes + found.peak_bytes) / GIB == pytest.approx(peak_gib, rel=0.1)
    assert found.total("h2d_bytes") / GB == pytest.approx(gb_in, rel=0.1)
    assert found.total("d2h_bytes") / GB == pytest.approx(gb_out, rel=0.1)
    in_time, by_phase = (
        forecast(found.phases, *h200.speeds(torch.bfloat16), UpdateTimes(), known_ms, **h200.rates)
        for known_ms in (timed.step_ms, None)
    )
    assert by_phase.step_ms == pytest.approx(ms, rel=0.15)
    # torch makes the copies of save_on_cpu, on no stream of the engine.
    assert in_time.step_ms == pytest.approx(ms, rel=0.1 if spec == "save_on_cpu" else 0.05)


def test_full_steps(h200: Machine):
    _, found = dry_run_of("layer_stream", 8, True, blocks=16)
    host_ms = 3.24e9 / (h200.update_gparams_s * 1e9) * 1e3
    for begins, ms in FULL_STEPS:
        update = UpdateTimes(host_ms=host_ms, begins=begins)
        predicted = forecast(found.phases, *h200.speeds(torch.bfloat16), update, **h200.rates)
        assert predicted.step_ms == pytest.approx(ms, rel=0.15), begins


@pytest.mark.slow
def test_a_budget_that_finds_itself(h200: Machine):
    resident_bytes, found = dry_run_of("tensor_swap:budget=auto", 8, False)
    speeds, rates = h200.speeds(torch.bfloat16), h200.rates
    found = found.swapping(hidden_share(found.phases, *speeds, rates["memory_gb_s"]))
    assert found.total("activation_d2h_bytes") / GB == pytest.approx(20.9, rel=0.1)
    assert (resident_bytes + found.peak_bytes) / GIB == pytest.approx(72.7, rel=0.1)
    assert forecast(found.phases, *speeds, UpdateTimes(), **rates).step_ms == pytest.approx(1187, rel=0.15)


@pytest.mark.parametrize(
    ("overrides", "ms", "vram_gib", "rss_gib", "gib_in", "gib_out"),
    [
        ((), 1637, 19.16, 91.2, 23.0, 13.19),
        (
            ("model=llama13b", "model.num_hidden_layers=34", "optimizer.state_dtype=bf16", "host_budget=119GiB"),
            *(2482, 19.89, 117.2, 38.4, 20.97),
        ),
    ],
    ids=["7 B, exact states", "11 B, bf16 moments"],
)
@pytest.mark.slow
def test_whole_runs_within_24_gib(overrides, ms, vram_gib, rss_gib, gib_in, gib_out):
    # Measured with gradients that were kept, and with float32 masters, which no run has any more.
    job = ("experiment=exact_7b_24gib", "dataset=synthetic", "hardware=h200")
    job += ("optimizer.gradients=keep",)
    components = components_of(*job, *overrides)
    plan = plan_run(components, machine_of(components), has_gpu=True)
    assert plan.forecast.step_ms == pytest.approx(ms, rel=0.15)
    assert plan.totals["vram_budget"] / GIB == pytest.approx(vram_gib, rel=0.1)
    masters_gib = 2 * plan.parameters / GIB
    assert plan.totals["host_budget"] / GIB == pytest.approx(rss_gib - masters_gib, rel=0.03)
    assert plan.step_bytes["in"] / GIB == pytest.approx(gib_in, rel=0.1)
    assert plan.step_bytes["out"] / GIB == pytest.approx(gib_out, rel=0.1)
