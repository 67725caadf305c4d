"""A survey of faults: runs that are killed, exit, lose wandb or fill their disk, by the hundred.

It runs on demand, on Linux: `scripts/run.sh python -m tests.faults`, or a part of it with `--kills 20 --calls 0 ...`.
`--help` lists the counts. `test_survey.py` runs a few cases of each part in the ordinary suite.
"""
