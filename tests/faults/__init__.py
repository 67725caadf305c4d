"""A survey of faults: runs that are killed, or exit at a call, by the hundred.

It runs on demand, on Linux: `scripts/run.sh python -m tests.faults`, or a part of it with `--kills 20 --exits 0`.
`--help` lists the counts. `test_survey.py` runs a few cases of each part in the ordinary suite.
"""
