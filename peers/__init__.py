"""Other systems as options of `offload`, to compare with: same model, data, batches and metrics.

Each file adapts one installed package, as its documentation recommends to use it. docs/peers.md has versions,
settings, and what each can and cannot do.
"""
