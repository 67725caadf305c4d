"""The offload engine: training with weights, gradients and activations that live in host memory.

Each folder is on a floor and imports from itself and from lower floors only, from the lowest up: `runtime` (streams,
copies, memory, hooks); `weights`, `activations` and `microbatches` (one mechanism each); `optimizer` (updates on the
host, beside the step); `modes` (one file a mode); `planning` (a step predicted by running it without values).

Two orders keep streaming right:

1. Compute reads a slot of the device after the copy that fills it. The event `ready` of the slot ends that copy.
2. A copy overwrites memory after all streams that read it: a slot after its event `free`, other device memory after
   compute was made to wait for the copy that reads it, a unit's home on the host after the copy in that reads it.

On the CPU, `runtime.stream_checker` checks both for every declared access, in every test.

Read `modes.mode` first, the contract of a mode. Then `weights.units`, whose note tells the life of a weight in a step,
`weights.streamer`, which joins the parts, and `modes.layer_stream`, a whole mode in forty lines.
"""
