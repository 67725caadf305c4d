"""Predicts the bytes and the time of a step by running it on tensors without values.

Read `dry_run` first, then `memory_tracker` (bytes), `simulated_streams` (times) and `cost_model` (the whole step).
"""
