"""Windows: the times in which a module's forward runs and holds its weights on the device.

Read `windows` first, then `stand_ins` (what modules hold in a window) and `saved_weights` (what backward gets).
"""
