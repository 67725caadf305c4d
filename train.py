"""Trains one model under one offload mode, or a sweep of them: see `python train.py --help`."""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from training import launcher, refusals, schema
from training.checks import check
from training.errors import failures_recorded, refusals_reported
from training.run_directory import refuse_records
from training.run_lock import locked

schema.register()
launcher.register()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    with refusals_reported(), locked(run_dir), failures_recorded(run_dir) as directory:
        directory.propose(config)
        check(config)
        # After composing, because they import torch.
        if config.plan:
            from training.planning import plan_only

            refuse_records(run_dir)
            plan_only(config, run_dir)
            directory.describe(config)
            return
        from training.build import build
        from training.loop import train
        from training.progress import report

        with build(config, run_dir, lambda: directory.take(config)) as job:
            summary = train(job)
        report(summary, run_dir)


if __name__ == "__main__":
    refusals.run(main)
