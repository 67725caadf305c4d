"""A model's forward, from outside: contexts around it, the tensors that it saves, the state that it may change.

Read `module_contexts` first, then `saved_tensor_hooks`. A block that is computed again begins with `block_buffers` and
`block_attributes`.
"""
