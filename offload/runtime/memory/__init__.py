"""Memory of the host and of the device: blocks, page locks, mapped files, slots.

Read `host_memory` first, then `device_slots`. `bandwidth` measures the copies between the two.
"""
