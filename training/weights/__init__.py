"""The weights of a run: where they come from, how they are quantised, and how the model gets them.

Read `source` and `files` first (what `model.source` and `model.weights` lead to), then `filling`.
"""
