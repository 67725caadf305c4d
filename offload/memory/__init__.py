"""Memory of the host and of the device: blocks, page locks, slots, and what the machine has.

Read `host_memory` first, then `device_slots`.
"""
