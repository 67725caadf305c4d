"""Datasets: text to tokens, and tokens to batches that depend on the step's number alone.

Read `datasets` first, then `packing`. `corpus` reads local text, `hub` streams it.
"""
