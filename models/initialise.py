"""Random initial parameters as a pure function of (seed, parameter name, element index).

A stateful generator gives different numbers on different devices, and requires a fixed order of filling. Here each
element is the hash of its own position. So a model starts from the same bits on every device, in every order and with
every number of threads. All arithmetic is on integers, except for one IEEE multiplication and one rounding to the
parameter's dtype, which give the same result on CPU and GPU.
"""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from models.quantise import values_of

STD = 0.02
EMBEDDING_STD = 1.0
# The layers whose output is added to the residual stream; see `initialise`.
RESIDUAL_PROJECTIONS = ("o_proj", "down_proj")

# Elements that a CPU thread fills at once. Its scratch arrays, 2 MiB, then stay in the caches; with fewer elements the
# calls of some 25 operations take a third of the time.
CPU_CHUNK_ELEMENTS_PER_THREAD = 2**16
GPU_CHUNK_ELEMENTS = 2**22


def initialise(model: nn.Module, seed: int, device: torch.device | str | None = None) -> None:
    """Fills every parameter in place, on its own device.

    * The weight of a norm (a module class with "Norm" in its name): ones.
    * Any other parameter of two or more dimensions: approximately normal, mean 0, standard deviation 0.02 (GPT-2,
      Llama). For projections into the residual stream it is divided by the root of their number, so that the stream's
      variance does not grow with depth (Radford et al. 2019).
    * The weight of an embedding that is nothing else: standard deviation 1 (PaLM, Chowdhery et al. 2022). With 0.02 the
      first norm multiplies the gradients by 50, and the loss of a deep model rises in its first steps (Takase et al.
      2023). One that is also the output layer keeps 0.02.
    * The bias of any module: zeros. Any other vector or scalar: ones, because it is a scale.

    A tied parameter is filled once, under its first name. Running statistics of batch norms are reset; other buffers
    are not changed. Scratch memory is one chunk: some MiB on the CPU, about 150 MiB on a GPU.

    Args:
        seed: any integer.
        device: where the numbers are computed before they are copied; by default the parameter's own device.

    Raises ValueError if a parameter or buffer is on the meta device, or a parameter has no floating-point dtype.
    Nothing has been written then.
    """
    check_initialisable((*model.named_buffers(), *model.named_parameters()))
    residual_projections = sum(name.endswith(RESIDUAL_PROJECTIONS) for name, _ in model.named_modules())
    uses = Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))
    draws = Draws(seed, device)
    filled = set()
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter in filled:
                continue
            filled.add(parameter)
            constant = _constant(module, parameter_name, parameter)
            if constant is not None:
                with values_of(parameter) as values:
                    values.fill_(constant)
                continue
            name = f"{module_name}.{parameter_name}" if module_name else parameter_name
            std = STD
            if module_name.endswith(RESIDUAL_PROJECTIONS):
                std /= residual_projections**0.5
            elif isinstance(module, nn.Embedding) and uses[parameter] == 1:
                std = EMBEDDING_STD
            with values_of(parameter) as values:
                draws.normal(values, name, std)
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()


def check_initialisable(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError for a named tensor on the meta device, and for a parameter without a floating-point dtype."""
    for name, tensor in tensors:
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: allocate its memory before initialising it")
        if isinstance(tensor, nn.Parameter) and not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}: only floating-point parameters can be initialised")


def _constant(module: nn.Module, name: str, parameter: Tensor) -> float | None:
    """Returns the value that fills the whole parameter, or None if it is random."""
    if "Norm" in type(module).__name__:
        return 1.0 if name == "weight" else 0.0
    if parameter.ndim >= 2:
        return None
    return 0.0 if "bias" in name else 1.0


def _signed(value: int) -> int:
    """Returns the int64 with the same low 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


class _HashNumbers(ABC):
    """Fills tensors with random numbers from the hash of (key, index), chunk by chunk on one device.

    The hash is SplitMix64 (Steele, Lea, Flood 2014): element `index` is output number `index` of the generator whose
    state starts at the key's digest. `_whole` makes a whole number of each hash, below 2^24 in size, which is exact in
    float32; one multiplication and one rounding follow. UNIT is the `scale` of these whole numbers.
    """

    UNIT: float
    GAMMA = 0x9E3779B97F4A7C15
    MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
    MULTIPLIER_2 = _signed(0x94D049BB133111EB)

    def __init__(self, device: torch.device, chunk_elements: int | None = None):
        if chunk_elements is None:
            cpu_elements = CPU_CHUNK_ELEMENTS_PER_THREAD * torch.get_num_threads()
            chunk_elements = cpu_elements if device.type == "cpu" else GPU_CHUNK_ELEMENTS
        self._steps = torch.arange(1, chunk_elements + 1, device=device).mul_(_signed(self.GAMMA))
        self._hash = torch.empty_like(self._steps)
        self._scratch = torch.empty_like(self._steps)
        self._values = torch.empty(chunk_elements, device=device, dtype=torch.float32)

    def fill(self, target: Tensor, key: str, scale: float, first_index: int = 0) -> None:
        """Writes numbers into `target`, whose elements have the indices from `first_index` in row-major order.

        `scale` is the standard deviation of normal numbers, and the bound of uniform ones.
        """
        if not target.is_contiguous():
            for position, row in enumerate(target):
                self.fill(row, key, scale, first_index + position * row.numel())
            return
        digest = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
        # Rounded to float32 here, so that every device multiplies by the same digits.
        factor = torch.tensor(scale / self.UNIT, dtype=torch.float32).item()
        for offset, piece in self._pieces(target):
            start = _signed(digest + (first_index + offset) * self.GAMMA)
            piece.copy_(self._chunk(start, piece.numel(), factor).to(target.dtype))

    def _pieces(self, target: Tensor):
        flat = target.view(-1)
        for offset in range(0, flat.numel(), self._values.numel()):
            yield offset, flat[offset : offset + self._values.numel()]

    def _chunk(self, start: int, count: int, factor: float) -> Tensor:
        hashed, scratch, values = self._hash[:count], self._scratch[:count], self._values[:count]
        torch.add(self._steps[:count], start, out=hashed)
        self._xor_shifted(hashed, scratch, 30).mul_(self.MULTIPLIER_1)
        self._xor_shifted(hashed, scratch, 27).mul_(self.MULTIPLIER_2)
        self._xor_shifted(hashed, scratch, 31)
        self._whole(hashed, scratch, values)
        return values.mul_(factor)

    @abstractmethod
    def _whole(self, hashed: Tensor, scratch: Tensor, values: Tensor) -> None:
        """Writes a whole number for each hash into `values`; may overwrite `hashed` and `scratch`, both int64."""

    @staticmethod
    def _xor_shifted(hashed: Tensor, scratch: Tensor, bits: int) -> Tensor:
        """Computes hashed ^= hashed >> bits; the mask clears the sign bits of torch's arithmetic shift."""
        torch.bitwise_right_shift(hashed, bits, out=scratch)
        return hashed.bitwise_xor_(scratch.bitwise_and_((1 << (64 - bits)) - 1))


class HashNormal(_HashNumbers):
    """Fills tensors with approximately normal numbers.

    The four 16-bit fields of a hash are independent and uniform. Their sum (Irwin-Hall, n = 4) has mean 131,070, excess
    kurtosis -0.3, and no value beyond 3.5 standard deviations.
    """

    MEAN = 4 * (2**16 - 1) // 2
    UNIT = (4 * (2**32 - 1) / 12) ** 0.5
    EVEN_FIELDS = 0x0000FFFF0000FFFF
    LOW_HALF = 0xFFFFFFFF

    def _whole(self, hashed: Tensor, scratch: Tensor, values: Tensor) -> None:
        # Add the fields in place: odd ones to even ones, then the upper pair to the lower.
        torch.bitwise_right_shift(hashed, 16, out=scratch)
        hashed.bitwise_and_(self.EVEN_FIELDS).add_(scratch.bitwise_and_(self.EVEN_FIELDS))
        torch.bitwise_right_shift(hashed, 32, out=scratch)
        hashed.add_(scratch).bitwise_and_(self.LOW_HALF)
        values.copy_(hashed).sub_(self.MEAN)


class HashUniform(_HashNumbers):
    """Fills tensors with uniform numbers: the odd multiples of bound / 2^24 in (-bound, bound), all equally likely."""

    UNIT = 2**24

    def _whole(self, hashed: Tensor, scratch: Tensor, values: Tensor) -> None:
        # The lower bits, since the shift of a negative number fills in ones.
        values.copy_(hashed.bitwise_and_(self.UNIT - 1).mul_(2).add_(1 - self.UNIT))


class Draws:
    """Fills tensors with random numbers that depend on the seed, a name and the element's index alone.

    Args:
        seed: any integer.
        device: where numbers are computed before they are copied; by default the tensor's own device.
    """

    def __init__(self, seed: int, device: torch.device | str | None = None):
        self._seed = seed
        self._device = None if device is None else torch.device(device)
        self._numbers: dict[tuple[type, torch.device], HashNormal | HashUniform] = {}

    def normal(self, target: Tensor, name: str, std: float) -> None:
        """Writes normal(0, std) into `target`, of any shape, floating-point dtype and device."""
        self._on_device_of(target, HashNormal).fill(target, f"{self._seed}/{name}", std)

    def uniform(self, target: Tensor, name: str, bound: float) -> None:
        """Writes uniform(-bound, bound) into `target`, of any shape, floating-point dtype and device."""
        self._on_device_of(target, HashUniform).fill(target, f"{self._seed}/{name}", bound)

    def _on_device_of(self, target: Tensor, kind: type) -> HashNormal | HashUniform:
        device = target.device if self._device is None else self._device
        if (kind, device) not in self._numbers:
            self._numbers[kind, device] = kind(device)
        return self._numbers[kind, device]
