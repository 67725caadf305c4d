"""The tasks: what a batch is, what the loss is, what a sample looks like."""
