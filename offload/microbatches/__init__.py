"""The order of several microbatches in one step.

Read `layer_major` first, then `lockstep`, which runs the microbatches in turns.
"""
