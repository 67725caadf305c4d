"""Activations that wait on the host for backward, or that backward computes again.

Read `swapped_span` first, with the lifecycle of a swapped span and its copies, then `swapper`. `policy` chooses which
spans are worth a copy; `checkpointing` recomputes blocks.
"""
