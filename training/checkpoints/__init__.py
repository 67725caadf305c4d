"""Checkpoints: a run's whole state on disk, from which it goes on as if it had never stopped."""
