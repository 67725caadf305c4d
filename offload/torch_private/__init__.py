"""Every private name of torch, and what surrounds a model's forward: contexts, saved tensors, the state it may change.

Read `torch_internals` first, then `module_contexts` and `saved_tensor_hooks`. A block that is computed again is
in `recomputed_blocks`.
"""
