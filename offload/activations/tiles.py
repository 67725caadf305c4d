"""Computes MLPs and norms in tiles along the sequence, so that what is inside them takes memory for one tile.

Of a module that treats each position by itself, forward keeps the input alone. Backward takes the tiles one after
another: it computes a tile again, then its gradients (TiledMLP of ALST, Bekman et al. 2025). So the width of an MLP and
the float32 copies of a norm do not grow with the sequence. A linear layer, with an adapter or without, keeps its input
alone anyway, and stays whole: in tiles its product would be computed once more for nothing.

Rows of a tile are the rows of the whole: outputs and gradients of inputs are those of the module itself, as far as the
kernels of a device compute a row alike in matrices of any height. Gradients of weights are sums over tiles, added up in
float32, so they differ from one product over all rows in the last bits.

Inside a block that is computed again (`recompute`), the MLP at its end is not computed a third time: the recompute of
the block ends where the last input is saved.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from offload.torch_private.module_contexts import ReplacedForward
from offload.torch_private.recomputed_blocks import RandomState
from offload.torch_private.torch_internals import NO_CONTEXT, without_tensor_hooks

# Parts of a tiled module: products, and functions of one element.
_LINEAR = {"Linear", "Conv1D"}
_OF_ELEMENTS = {"torch.nn.modules.activation", "torch.nn.modules.dropout", "transformers.activations"}
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.ParameterList)
# Of a trial: half as many positions, and the share of the largest result by which halves may differ from the whole.
_TRIAL_POSITIONS, _TRIAL_TOLERANCE = 32, 0.02


def compute_in_tiles(blocks: Iterable[nn.Module], tokens: int) -> Callable[[], None]:
    """Makes modules inside `blocks` compute at most `tokens` positions at a time, whatever their class.

    They are the outermost that consist of linear layers, norms and functions of single elements, take one tensor, and
    are not attention: MLPs, and norms but those that torch fuses. The sequence is dimension 1 of what they take, or
    dimension 0 of a matrix; `tokens` counts the rows of a batch too. The first time, a module of each class is tried on
    a few positions: RuntimeError in one line if others change its results.

    Hooks on a module in tiles run once a call, as before; hooks on modules inside it run for each tile, in forward and
    again in backward. Call this before an offload mode attaches, and `recompute` afterwards. The function that is
    returned restores every `forward`. Raises ValueError if `tokens` is below 1, and if nothing inside the blocks can be
    tiled.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: must be at least 1")
    tried: set[type] = set()
    found = dict.fromkeys(module for block in blocks for module in _by_position(block))
    if not found:
        raise ValueError("nothing in the blocks computes each position by itself: no MLP, no norm of its own")
    tiled = [_Tiled(module, tokens, tried) for module in found]

    def undo() -> None:
        for forward in tiled:
            forward.remove()

    return undo


def _by_position(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules inside `module` that are worth tiling."""
    for child in module.children():
        is_fused = type(child).__module__.startswith("torch.")
        worth = (_parts(child) > 1 and not isinstance(child, _CONTAINERS)) or (_is_norm(child) and not is_fused)
        if worth and _treats_positions_alike(child) and _takes_one(child):
            yield child
        else:
            yield from _by_position(child)


def _parts(module: nn.Module) -> int:
    """Counts the linear layers, adapted or not, norms and functions inside; a router has one."""
    children = () if "Linear" in type(module).__name__ else module.children()
    return sum(map(_parts, children)) or 1


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("LayerNorm", "RMSNorm")) and not any(True for _ in module.buffers())


def _treats_positions_alike(module: nn.Module) -> bool:
    name = type(module).__name__
    if "attention" in name.lower() or "attn" in name.lower():
        return False
    if isinstance(module, nn.Linear) or name in _LINEAR or _is_norm(module) or isinstance(module, nn.Identity):
        return True
    children = list(module.children())
    if not children:
        return type(module).__module__ in _OF_ELEMENTS or (isinstance(module, _CONTAINERS) and not len(module))
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not own and all(map(_treats_positions_alike, children))


def _takes_one(module: nn.Module) -> bool:
    """Tells whether forward can be called with one tensor."""
    arguments = list(inspect.signature(module.forward).parameters.values())
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in arguments if each.default is each.empty and each.kind in named]
    return len(needed) == 1 and needed[0] is arguments[0]


NOT_WHOLE = (
    "a tile has no gradient of a weight or of its input: recompute.tile needs modules that use all their weights, and a"
    " mode whose units are whole blocks (layer_stream, shard_offload), attached after compute_in_tiles"
)


class _Tiled(ReplacedForward):
    """Computes `module` in tiles of `tokens`; `tried` are the classes of modules of which it is known to be right."""

    def __init__(self, module: nn.Module, tokens: int, tried: set[type]):
        super().__init__(module)
        self._tokens = tokens
        self._tried = tried

    def run(self, *arguments: object, **keywords: object) -> object:
        if len(arguments) == 1 and isinstance(arguments[0], _Backward):
            return arguments[0].run(self._forward, _trained(self._module))
        x = arguments[0] if len(arguments) == 1 and not keywords else None
        is_sequence = isinstance(x, Tensor) and x.dim() > 1 and x.is_floating_point()
        tiles = Tiles.of(x, self._tokens) if is_sequence else None
        if tiles is None or tiles.count == 1:
            return self._forward(*arguments, **keywords)
        self._try(x, tiles)
        parameters = _trained(self._module)
        if not torch.is_grad_enabled() or not (x.requires_grad or parameters):
            return tiles.computed(self._forward, x)
        held = None
        if x.requires_grad:
            x = _Held.apply(x)
            held = x.grad_fn
        return _InTiles.apply(self._module, self._forward, tiles, held, x, *parameters)

    def _try(self, x: Tensor, tiles: Tiles) -> None:
        kind = type(self._module)
        if kind in self._tried or x.is_meta:
            return
        self._tried.add(kind)
        positions = min(_TRIAL_POSITIONS, x.shape[tiles.dim] // 2)
        start = tiles.cut(x, 0, 2 * positions)
        with torch.no_grad(), _in_eval(self._module):
            whole = self._forward(start)
            parts = [self._forward(half.contiguous()) for half in start.split(positions, tiles.dim)]
        fits = isinstance(whole, Tensor) and whole.dim() > tiles.dim and parts[0].shape[tiles.dim] == positions
        if fits:
            difference = (torch.cat(parts, tiles.dim).double() - whole.double()).abs().max()
            fits = not difference > _TRIAL_TOLERANCE * whole.double().abs().max()
        if not fits:
            raise RuntimeError(
                f"a {kind.__name__} does not compute each position by itself, as tiles need: take recompute.tile=null"
                " (in a loop of your own, leave compute_in_tiles out)"
            )


def _trained(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that train, as the modules hold them now; to read one opens a window on its unit."""
    held = (inner._parameters[name] for inner in module.modules() for name in inner._parameters)
    return list(dict.fromkeys(tensor for tensor in held if tensor is not None and tensor.requires_grad))


@contextmanager
def _in_eval(module: nn.Module) -> Iterator[None]:
    """Switches dropout off, without the code that modules run in `eval()`."""
    flags = [(inner, inner.training) for inner in module.modules()]
    for inner, _ in flags:
        inner.training = False
    try:
        yield
    finally:
        for inner, training in flags:
            inner.training = training


class _Counted(threading.local):
    times = 1


counted = _Counted()
"""`times`: for how many equal operations one of this thread stands, where a dry run computes a tile for all like it"""


@contextmanager
def _standing_for(times: int) -> Iterator[None]:
    before, counted.times = counted.times, times
    try:
        yield
    finally:
        counted.times = before


class Tiles:
    """Cuts a tensor along `dim`, into `count` tiles of `positions`, the last of which may be shorter."""

    def __init__(self, dim: int, positions: int, length: int, without_values: bool):
        self.dim, self.positions = dim, positions
        self._length, self._without_values = length, without_values
        self.count = -(-length // positions)

    @classmethod
    def of(cls, x: Tensor, tokens: int) -> Tiles:
        """Cuts `x`, [batch, sequence, ..., features] or [rows, features], into tiles of at most `tokens` rows."""
        dim = 1 if x.dim() > 2 else 0
        batch = max(x.shape[0], 1) if dim else 1
        return cls(dim, max(tokens // batch, 1), max(x.shape[dim], 1), x.is_meta)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yields the start and the length of each tile, and for how many it stands.

        That is 1, but without values for the second tile, which stands for those between it and a shorter last one.
        """
        whole = self._length // self.positions
        between = range(2, whole) if self._without_values else ()
        for index in range(self.count):
            if index not in between:
                start = index * self.positions
                yield start, min(self.positions, self._length - start), 1 + (len(between) if index == 1 else 0)

    def computed(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns the result of `forward`, tile by tile, without a graph."""
        result = None
        with torch.no_grad():
            for start, length, times in self:
                with _standing_for(times):
                    part = forward(self.cut(x, start, length))
                    if result is None:
                        shape = list(part.shape)
                        shape[self.dim] = self._length
                        result = part.new_empty(shape)
                    result.narrow(self.dim, start, length).copy_(part)
                    # Freed before the next one is made.
                    del part
        return result

    def cut(self, x: Tensor, start: int, length: int) -> Tensor:
        """Returns a tile of `x`, detached."""
        return x.detach().narrow(self.dim, start, length).contiguous()


class _Held(torch.autograd.Function):
    """The identity. Its node saves the input of a tiled module, before the module computes.

    So a checkpoint around it, which ends its recompute where the last tensor is saved, ends it before.
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class _InTiles(torch.autograd.Function):
    """Computes a module in tiles. `held` is the node that has saved `x`, or None: then this one does."""

    @staticmethod
    def forward(
        ctx, module: nn.Module, forward: Callable, tiles: Tiles, held: object, x: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.module, ctx.tiles, ctx.held = module, tiles, held
        # A method of it: a mode that streams looks for weights in what a node holds, and there are 625 numbers.
        ctx.restore_random, ctx.autocast = RandomState.of(x.device).restore, _autocast_now(x.device.type)
        if held is None:
            ctx.save_for_backward(x)
        with ctx.autocast():
            return tiles.computed(forward, x)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        # The recompute of a block around it runs here, before the windows of this module open.
        (x,) = (ctx.held or ctx).saved_tensors
        work = _Backward(ctx.tiles, x, gradient, ctx.needs_input_grad[4], sum(ctx.needs_input_grad[5:]))
        here = RandomState.of(x.device)
        ctx.restore_random()
        try:
            with ctx.autocast():
                # By the forward that the module has now: that of a mode opens windows on what streams.
                ctx.module.forward(work)
        finally:
            here.restore()
        return None, None, None, None, work.of_input, *work.of_parameters


class _Backward:
    """The backward of a tiled module, which its forward runs in place of a call. Results are in the attributes."""

    def __init__(self, tiles: Tiles, x: Tensor, gradient: Tensor, x_needs: bool, trained: int):
        self._tiles, self._x, self._gradient, self._trained = tiles, x, gradient, trained
        self.of_input = torch.empty_like(x) if x_needs else None
        self.of_parameters: list[Tensor] = []

    def run(self, forward: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> None:
        """Computes tile by tile again, with the gradients of the input and of `parameters`.

        Raises RuntimeError for a parameter without a gradient.
        """
        if len(parameters) != self._trained:
            raise RuntimeError(NOT_WHOLE)
        sums: list[Tensor | None] = [None] * len(parameters)
        # Hooks on a parameter's gradient wait for the sum, which the caller's backward hands them.
        with without_tensor_hooks(parameters):
            for start, length, times in self._tiles:
                with _standing_for(times):
                    self._run_tile(forward, parameters, start, length, sums)
        self.of_parameters = [total.to(one.dtype) for total, one in zip(sums, parameters, strict=True)]

    def _run_tile(
        self, forward: Callable, parameters: list[nn.Parameter], start: int, length: int, sums: list[Tensor | None]
    ) -> None:
        part = self._tiles.cut(self._x, start, length).requires_grad_(self.of_input is not None)
        with torch.enable_grad():
            result = forward(part)
        asked = parameters if self.of_input is None else [part, *parameters]
        gradient = self._gradient.narrow(self._tiles.dim, start, length)
        found = list(torch.autograd.grad(result, asked, gradient, allow_unused=True))
        if any(each is None for each in found):
            raise RuntimeError(NOT_WHOLE)
        if self.of_input is not None:
            self.of_input.narrow(self._tiles.dim, start, length).copy_(found.pop(0))
        for index, each in enumerate(found):
            wide = torch.promote_types(each.dtype, torch.float32)
            sums[index] = each.to(wide, copy=True) if sums[index] is None else sums[index].add_(each)


def _autocast_now(device_type: str) -> Callable[[], AbstractContextManager]:
    """Returns what makes a context with the autocast of now, without its cache, whose casts have no graph here."""
    if not torch.amp.is_autocast_available(device_type):
        return lambda: NO_CONTEXT
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)
