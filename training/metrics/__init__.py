"""The measurements of a run, and where they go: files, the terminal, wandb.

Read `names` first, the list of all metrics, then `files`.
"""
