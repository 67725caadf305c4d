"""Plans a run before it starts: bytes, time, and whether it fits.

Read `plan` first, then `machine` (the speeds that it takes) and `report` (the finished plan).
"""
