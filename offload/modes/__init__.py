"""The offload modes, one file each. A mode chooses where a model is cut and what moves at the cuts.

Read `mode` first, the contract, then the base class `weight_mode` with `layer_stream`, or `activation_mode` with
`tensor_swap`. CONTRIBUTING.md shows a complete new mode.
"""
