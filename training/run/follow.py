"""A rank other than the first: it obeys the orders of rank 0 until the run is over.

It writes no file, and prints nothing but warnings. It tells rank 0 why it cannot continue, and rank 0 tells the user.
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from offload import HostAdamW, Speculation
from training.config import schema
from training.config.construct import keys_under
from training.config.own_options import register_own
from training.evaluation.held_out import scores_of_parts
from training.evaluation.reference import log_probs_of_parts
from training.optim import set_step
from training.parallel.devices import take_seat
from training.parallel.group import Group
from training.parallel.launch import HOST, START_S
from training.parallel.messages import FirstHungError, FirstLostError, Messages, from_first
from training.parallel.world import World, is_torchrun
from training.run.build import RankJob, build_optimizer, build_schedule, place_states_in_spare_vram
from training.run.loop import run_share
from training.run.meters import memory_of_rank
from training.run.reference_model import attached_models
from training.runs.failures import FAILED, explain
from training.runs.invocation import Invocation
from training.runs.signals import PARENT_VARIABLE, SIGNALS, end_with_parent
from training.settle.components import Components, acquired
from training.settle.settled import GradientChoice
from training.visible_text import visible_lines
from training.weights.filling import fill_buffers

logger = logging.getLogger(__name__)


def main() -> int:
    """Joins the run and obeys its orders; returns the exit status of the process."""
    parent = os.environ.setdefault(PARENT_VARIABLE, str(os.getppid()))
    # Rank 0 decides what a signal means. This process ends with it, or with torchrun, whatever ends that.
    end_with_parent(signal.SIGKILL)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # Rank 0 has blocked them until here. Processes that this one starts would inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    world = World.of_environment()
    # Rank 0 shows what all are busy with.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, it is open until the process ends
    logging.basicConfig(format=f"rank {world.rank}: %(message)s", level=logging.WARNING)
    logging.captureWarnings(True)
    schema.register()
    joined = None
    try:
        register_own(sys.argv[1:])
        joined = join(world)
        obey(joined)
    except FirstLostError:
        # Inside a step the others may wait for this rank's collectives until its process ends.
        if joined is not None and not joined.exchange_in_steps:
            joined.messages.await_end()
        return FAILED
    except FirstHungError as error:
        logger.error("error: %s", error)
        if not is_torchrun():
            os.kill(int(parent), signal.SIGKILL)
        return FAILED
    except Exception as error:
        failure = explain(error)
        if not failure.fixable:
            logger.error("%s", visible_lines("".join(traceback.format_exception(error))).rstrip())
        if joined is None or joined.messages.is_exchanging or joined.exchange_in_steps:
            logger.error("error: %s", failure.reason)
        else:
            joined.messages.report_failure(failure.reason)
        return FAILED
    return 0


def join(world: World) -> Group:
    """Connects with the other ranks. Raises UserError if the host has fewer GPUs than ranks."""
    if is_torchrun():
        dist.init_process_group("gloo")
    else:
        limit = timedelta(seconds=START_S)
        store = dist.TCPStore(HOST, int(os.environ["MASTER_PORT"]), world.size, is_master=False, timeout=limit)
        store.set(f"ready{world.rank}", "1")
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    device, timeout_s = from_first()
    own, cores = take_seat(device, world)
    return Group(own, Messages(timeout_s, world.host), cores=cores)


def obey(ranks: Group) -> None:
    """Builds this rank's part of the run, and carries out orders until the one to end. Raises FirstLostError."""
    # torch imports its compiler with the first optimizer, which takes seconds: now, while rank 0 plans.
    HostAdamW([torch.nn.Parameter(torch.empty(1, device="meta"))])
    match ranks.messages.order():
        case ("build", config, invocation, releases, speculation):
            with built(config, invocation, releases, ranks, speculation) as job:
                carry_out(job, ranks)
        case ("end",):
            ranks.messages.leave()


def carry_out(job: RankJob, ranks: Group) -> None:
    """Carries out the orders of a run that is built."""
    first = True
    while True:
        match ranks.messages.order():
            case ("step", step, share):
                run_share(job, step, share)
                if first:
                    place_states_in_spare_vram(job)
                    first = False
            case ("evaluate", parts):
                # The mode waits for the updates of units that stream, and for no others.
                job.optimizer.finish()
                components = job.components
                task, seed = components.task, components.config.seed
                with job.attached.inference():
                    scores = scores_of_parts(task, components.model, parts, seed, ranks.device, lambda: False)
                ranks.messages.report(scores)
            case ("reference", parts):
                components = job.components
                with job.attached.trained.inference():
                    found = log_probs_of_parts(components.model, parts, ranks.device, lambda: False)
                ranks.messages.report(found)
            case ("finish",):
                job.optimizer.finish()
                ranks.messages.report()
            case ("measure",):
                ranks.messages.report(memory_of_rank(ranks.device, job.attached.counters(), ranks.home_sharers))
            case ("routers",):
                ranks.messages.report(job.routers.sums())
            case ("fingerprints", saves):
                ranks.messages.report(ranks.fingerprints(saves))
            case ("end",):
                job.optimizer.finish()
                ranks.messages.leave()
                return


@contextmanager
def built(
    config: DictConfig, invocation: Invocation, releases: bool, ranks: Group, speculation: Speculation | None
) -> Iterator[RankJob]:
    """Builds what `build` does, but for what only rank 0 has. Weights and states are those of rank 0."""
    torch.manual_seed(config.seed)
    components = Components.of(config, invocation, ranks.device).with_gradients(GradientChoice(releases))
    components.begin_compiling()
    sharers = ranks.sharers(components.shares_homes)
    ranks.join_sequence(components.model)
    with (
        acquired(ranks.device) as streams,
        keys_under("offload"),
        attached_models(components, streams, sharers) as attached,
    ):
        fill_buffers(components.model)
        optimizer = build_optimizer(components, attached.trained, speculation, ranks.cores)
        schedule = build_schedule(config, optimizer)
        ranks.messages.report()
        word, step = ranks.messages.order()
        if word != "start":
            raise FirstLostError(f"expected start, got {word}")
        ranks.equalise(components.model, optimizer, step, attached.shared_parameters, attached.reference_model)
        if step:
            set_step(schedule, step)
        yield RankJob(
            components=components,
            attached=attached,
            streams=streams,
            optimizer=optimizer,
            schedule=schedule,
            ranks=ranks,
        )


if __name__ == "__main__":
    sys.exit(main())
