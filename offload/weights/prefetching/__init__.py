"""Units come into the slots of the device ahead of their use.

Read `prefetcher` first, then `access_order`, the order in which it fetches.
"""
