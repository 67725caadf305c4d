"""Streams, copies, memory and hooks: the lowest floor, which all folders of the engine use.

Read `registry` first (streams, events, signals), then `transfer` (copies), and `stream_checker`, which checks their
order on the CPU. `torch_internals` has every private name of torch.
"""
