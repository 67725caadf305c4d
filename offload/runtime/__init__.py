"""The lowest floor, which all folders of the engine use.

`streams` has streams, events and copies; `memory` host blocks, files and the slots of a device; `forward` what
surrounds a model's forward; `sharing` the processes that share memory. Read `streams.registry` first, then
`streams.transfer`. `torch_internals` has every private name of torch.
"""
