"""Sweeps: a fresh process for each job, one after another here, or all through submitit on a cluster.

Read `launcher` first, then `job`. `cluster` submits the same jobs.
"""
