"""Units: parameters and buffers that move together, and how a model is cut into them.

Read `unit` first, with its note on the life of a unit's tensor, then `partition`.
"""
