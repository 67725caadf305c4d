"""Checkpoints: the whole state of a run on disk, from which it resumes as if it had never stopped.

Read `saving` first, then `resuming`. Both, with `training.runs.checkpoint_files`, make a checkpoint complete or absent.
"""
