"""Trains one model under one offload mode, or a sweep of them: see `python train.py --help`."""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from training import sweep
from training.config import help, schema
from training.config.validation import check
from training.runs import compose_errors
from training.runs.directory import locked, refuse_records
from training.runs.failures import failures_recorded, refusals_reported

schema.register()
help.register()
sweep.register()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    with refusals_reported(), locked(run_dir), failures_recorded(run_dir) as directory:
        directory.propose(config)
        check(config)
        # After composing, because they import torch.
        if config.plan:
            from training.planning.plan import plan_only

            refuse_records(run_dir)
            plan_only(config, run_dir)
            directory.describe(config)
            return
        from training.build import build
        from training.loop import train
        from training.metrics.progress import report

        with build(config, run_dir, lambda: directory.take(config)) as job:
            summary = train(job)
        report(summary, run_dir)


if __name__ == "__main__":
    compose_errors.run(main)
