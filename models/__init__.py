"""Models in plain PyTorch, the initial values of their parameters, and their weight files.

Read `llama` first, then `loss`. `initialise` and `weights` fill a model that is on any device.
"""
