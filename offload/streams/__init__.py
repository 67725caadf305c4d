"""The streams of a device, and every copy on them. On the CPU, their order is checked.

Read `registry` first (streams, events, signals), then `transfer` (copies), and `stream_checker`.
"""
