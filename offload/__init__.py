"""The offload engine: training with weights, gradients and activations that live in host memory.

A mode attaches to any torch model, in any training loop:

    import torch
    from offload import LayerStream, acquire, release

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    streams = acquire("cuda" if torch.cuda.is_available() else "cpu")
    attached = LayerStream(slots=2).attach(model, streams)  # the blocks go to host memory, the rest to the device
    for _ in range(3):
        batch = torch.randn(16, 64, device=streams.device)
        with attached.step():  # around forward and backward
            model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"{attached.counters().h2d_bytes} bytes copied to the device")
    attached.detach()  # the model as it was found
    release(streams)

The names in `__all__` are the public face, all that a training loop needs. Three faces stand beside it:
`offload.sharing` for processes that share the homes of weights, `offload.planning` for plans, `offload.knobs` for modes
of your own and for sizes in bytes. Every other module may change without notice.

- `acquire`, `release`: the streams of a device (`Streams`). `upload` copies a batch there without waiting.
- `Mode`: describes a mode by its knobs, with `footprint` and `attach`, which take `AttachOptions` (`NO_OPTIONS`).
- `Attached`: a model under a mode, which `attach` returns, with `step`, `accumulate`, `counters`, `detach` and more.
  `with attached.inference():` surrounds forwards without gradients, between which no weight changes.
- `Resident` (none) leaves all on the device. `BounceLinear`, `LayerStream` and `ShardOffload` stream weights
  (`WeightMode`). `TensorSwap` and `SaveOnCpu` move activations (`ActivationMode`) and stand on a mode for the weights:
  `TensorSwap(LayerStream())`. Their knobs are their arguments.
- `HostAdamW`: AdamW for weights in host memory; `attached.overlap` hides its updates behind the steps. With a
  `Speculation` they begin inside backward also where gradients are clipped, and are undone exactly if they were.
- `recompute`: activation checkpointing, called after `attach`, for blocks such as those of `find_blocks`.
  `compute_in_tiles`, called before `attach`: their MLPs and norms take long sequences in tiles.
- `l2_norm`: that of a gradient, right for any number of elements on the CPU too.
- `Counters`: bytes copied and times waited, from `attached.counters()`. `Footprint`: bytes of a mode before it is
  attached.
- `KnobError`: a knob has a value that it cannot have. Other errors name the remedy, too, and need no class.
- `FileSpan`: bytes of a file. `AttachOptions.spans` has those of frozen weights, which `source=mapped` reads from
  there in every step; `lies_in_file` tells whether a tensor is a view of such a file.
- `OwnOptimizer`: what a mode returns whose system updates by itself. The knobs of a mode of your own are fields by
  `offload.knobs`.
- `allocator_pinned_bytes`: page-locked memory of torch's own allocator, for a mode whose copies torch or another system
  makes.

Each folder is on a floor and imports from itself and from lower floors only, from the lowest up: `torch_private`;
`streams` (and copies); `memory`; `weights`, `activations` and `microbatches` (one mechanism each); `sharing` and
`files` (extensions of `weights`); `optimizer` (updates on the host, beside the step); `speculation` (the same before
the norm is known); `modes` (one file a mode); `planning` (a step predicted by running it without values).

Two orders keep streaming right:

1. Compute reads a slot of the device after the copy that fills it. The event `ready` of the slot ends that copy.
2. A copy overwrites memory after all streams that read it: a slot after its event `free`, other device memory after
   compute was made to wait for the copy that reads it, a unit's home on the host after the copy in that reads it.

On the CPU, `streams.stream_checker` checks both for every declared access, in every test.

Read `modes.mode` first, the contract of a mode. Then `weights.units.unit`, whose note tells the life of a weight in a
step, `weights.streamer`, which joins the parts, and `modes.layer_stream`, a whole mode in forty lines.
"""

from offload.activations.checkpointing import recompute
from offload.activations.tiles import compute_in_tiles
from offload.blocks import find_blocks
from offload.files.mapped_files import FileSpan, lies_in_file
from offload.knobs import KnobError
from offload.memory.host_memory import allocator_pinned_bytes
from offload.modes.activation_mode import ActivationMode
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import NO_OPTIONS, Attached, AttachOptions, Mode, OwnOptimizer
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.modes.weight_mode import WeightMode
from offload.optimizer.adamw import HostAdamW
from offload.speculation.trials import Speculation
from offload.streams.registry import Streams, acquire, release
from offload.streams.transfer import Counters, upload
from offload.weights.footprint import Footprint
from offload.weights.gradients.offloader import l2_norm

__version__ = "0.1.0"

__all__ = [
    "NO_OPTIONS",
    "ActivationMode",
    "AttachOptions",
    "Attached",
    "BounceLinear",
    "Counters",
    "FileSpan",
    "Footprint",
    "HostAdamW",
    "KnobError",
    "LayerStream",
    "Mode",
    "OwnOptimizer",
    "Resident",
    "SaveOnCpu",
    "ShardOffload",
    "Speculation",
    "Streams",
    "TensorSwap",
    "WeightMode",
    "acquire",
    "allocator_pinned_bytes",
    "compute_in_tiles",
    "find_blocks",
    "l2_norm",
    "lies_in_file",
    "recompute",
    "release",
    "upload",
]
