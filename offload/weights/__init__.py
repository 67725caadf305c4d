"""Weights that live on the host, are on the device only while in use, and send their gradients home.

The folders in the order in which they import each other: `units` (what moves together), `gradients` (where they go),
`prefetching` (copies in, ahead of use), `windows` (what modules hold meanwhile). `streamer` joins them: read it first.
"""
