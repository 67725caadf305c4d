"""Models in plain PyTorch, the initial values of their parameters, and their weight files."""
