"""Weights that live on the host, are on the device only while in use, and send their gradients home.

Read `units` first, with its note on the life of a unit's tensor, then `partition`, `prefetcher`, `gradients`, and
`streamer`, which joins them. `updates` is the interface to an optimizer that updates weights beside the step.
"""
