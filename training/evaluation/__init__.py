"""Scores on the held-out split, and samples, between the steps of a run.

Read `held_out` first, then `samples`.
"""
