"""The weights of a run: read `source` and `files` first (what the two keys lead to), then `filling`."""
