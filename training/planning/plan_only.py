"""Does all of plan=true: prints the plan, draws its step, and tells what does not fit."""

from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from training.checkpoints.saving import check_best
from training.config.cards import PRESETS
from training.config.declare import LONGEST
from training.data.datasets import build_dataset, facts_of, has_facts
from training.evaluation.samples import Samples
from training.metrics.progress import phase, print_plan
from training.planning.encoding import planned_encoding
from training.planning.fit import misfit
from training.planning.longest import Longest
from training.planning.machine import machine_of
from training.planning.plan import draw_timeline, plan_filled
from training.profiling.hardware import resolve_device
from training.runs.files import PLAN_PICTURE
from training.runs.invocation import Invocation
from training.runs.records import write_summary
from training.settle.components import Components
from training.settle.missing_abilities import without_abilities
from training.visible_text import visible
from training.weights.files import ModelWeights
from training.weights.model_tokenizer import tokenizer_is_here

NO_GPU = "no GPU here: the CPU is planned for; hardware=rtx4090, or another of --help, plans for one"


def plan_only(config: DictConfig, invocation: Invocation) -> dict:
    """Does all of `plan=true`: prints the plan, writes plan.json and a summary, and returns the summary.

    Its status is "planned"; its reason names what does not fit. Raises UserError as a run would.
    """
    is_preset = invocation.choices["hardware"] in PRESETS
    device = resolve_device("auto" if is_preset else config.device)
    on_gpu = is_preset or config.hardware.vram_gib is not None or device.type == "cuda"
    longest = Longest.of(config, invocation, device, on_gpu) if config.seq_len == LONGEST else None
    if longest is not None:
        invocation = longest.invocation
        for key, value in longest.chosen.items():
            OmegaConf.update(config, key, value)
    components = Components.of(config, invocation, device, on_gpu=on_gpu, model=getattr(longest, "model", None))
    # Refuses samples that cannot be made: for that no data are read, and nothing is downloaded.
    if tokenizer_is_here(config):
        Samples.of(without_abilities(config, components.mode)[0], components.task, components.model)
    if config.model.weights is not None:
        # A plan needs no weights, and sends no request for them.
        ModelWeights.find(config.model.weights, ask=False)
    check_best(config, components.task)
    dataset = None
    if has_facts(config):
        # It refuses what a run of it would.
        with phase("reading the dataset"):
            dataset = build_dataset(config, components.model, invocation.run_dir)
        components.task.check(config, dataset, components.model)
    with phase("measuring the machine"):
        machine = machine_of(components) if longest is None else longest.machine
    with phase("planning"):
        has_gpu = machine.vram_gib is not None
        with planned_encoding(dataset, components, machine, has_gpu) as encoding:
            _, plan = plan_filled(components, machine, has_gpu, getattr(longest, "steps", None))
    plan = replace(plan, facts=facts_of(dataset), encoding=encoding)
    if longest is not None:
        plan = replace(plan, chosen={**longest.reasons, **plan.chosen})
    if not plan.has_gpu:
        plan = replace(plan, notes=(*plan.notes, NO_GPU))
    print_plan(plan.rows(), title=f"Plan: {invocation.title}")
    plan.write(invocation.run_dir)
    if plan.timeline:
        title = f"planned: {invocation.choices['offload']}, {invocation.choices['model']} on {machine.name}"
        picture = invocation.run_dir / PLAN_PICTURE
        draw_timeline(plan, config.microbatches, picture, title)
        print(f"picture {visible(picture)}")
    summary = {
        "status": "planned",
        "reason": misfit(components, plan, lambda _, some: some.exceeded(), plan.limits()),
        **plan.summary(),
    }
    write_summary(invocation.run_dir, summary)
    return summary
