"""Streams, copies, memory and hooks: what all folders of the engine use, and the only folder that they all may use.

Read `registry` first (streams, events, signals), then `transfer` (copies), and `stream_checker`, which checks their
order on the CPU. `torch_internals` has every private name of torch.
"""
