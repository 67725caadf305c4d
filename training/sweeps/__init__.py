"""Sweeps: a fresh process for each job, here or on a cluster. Read `launcher` first, then `job`."""
