"""Pictures with captions: found in folders, in buckets of one size, cut to these sizes."""
