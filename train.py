"""Trains one model under one offload mode, or a sweep of them: see `python train.py --help`."""

import gc
import sys
from functools import partial

from training.runs import starting

if __name__ == "__main__":
    starting.refuse_foreign_python()
    starting.end_on_interrupt()
    starting.expand_segments()
    starting.end_soon()
    # The objects that imports make stay, and a quarter of their time would be looks for garbage.
    gc.disable()

import hydra
from omegaconf import DictConfig

from training.config import help, schema
from training.config.own_options import register_own
from training.config.validation import check, warn_of_keys_without_effect
from training.errors import UserError
from training.parallel.launch import connected
from training.parallel.world import World, refuse_other_launchers, settle_devices
from training.runs import command_line, compose_errors, console
from training.runs.directory import locked, refuse_records, register_fresh
from training.runs.failures import failures_recorded, print_failure, refusals_reported
from training.runs.invocation import Invocation
from training.runs.signals import end_with_parent
from training.sweeps import cluster, launcher

schema.register()
help.register()
launcher.register_launcher()
cluster.register_launcher()
register_fresh()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    invocation = Invocation.current()
    run_dir = invocation.run_dir
    with refusals_reported(), locked(run_dir), failures_recorded(run_dir) as directory:
        directory.propose(config, invocation)
        invocation.refuse_unswept()
        world = World.of_environment()
        settle_devices(config, world, invocation.overridden)
        check(config)
        warn_of_keys_without_effect(config, invocation.overridden)
        # With these come wandb, datasets and rich: they are imported once the configuration was checked.
        if config.plan:
            from training.planning.plan_only import plan_only

            # With it the process ends.
            gc.disable()
            refuse_records(run_dir)
            summary = plan_only(config, invocation)
            directory.write_config(config, invocation)
            if summary["reason"]:
                sys.exit(print_failure(UserError(summary["reason"])))
            return
        from training.metrics.progress import print_summary
        from training.run.build import build
        from training.run.loop import train

        begin = partial(directory.take, config, invocation)
        with connected(config, world) as ranks, build(config, invocation, begin, ranks) as job:
            summary = train(job)
        print_summary(summary, run_dir)


def start() -> None:
    sys.argv[1:] = command_line.for_hydra(sys.argv[1:])
    with refusals_reported():
        register_own(sys.argv[1:])
    main()


if __name__ == "__main__":
    starting.interrupt_as_usual()
    gc.freeze()
    gc.enable()
    console.tolerate_failures()
    with refusals_reported():
        refuse_other_launchers()
    if World.is_follower():
        from training.run import follow

        sys.exit(follow.main())
    end_with_parent()
    compose_errors.run(start)
