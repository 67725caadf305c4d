"""The weights of a run. Read `source` (model.source) and `files` (model.weights) first, then `filling`."""
