"""Checkpoints: the whole state of a run on disk. Read `saving` first, then `resuming`."""
