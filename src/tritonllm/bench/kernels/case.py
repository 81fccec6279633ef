"""One op at one shape: what it must move and compute, its tensors on a device, and how wrong its result is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch

from tritonllm.bench.graph_timing import ROTATED_BYTES
from tritonllm.bench.limits import Rates
from tritonllm.errors import ConfigError

MAX_CALLS = 512
"""Most sets of tensors that calls rotate over. Where these fit into the L2 cache, a layer finds its own there, too."""

EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """Head shape of a model, written 16/8x128: query heads, KV heads and the size of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        """The heads of that name.

        Raises:
            ConfigError: they are written in another way, or cannot be shared out.
        """
        heads, _, head_dim = text.partition("x")
        words = [*heads.partition("/")[::2], head_dim]
        if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
            raise ConfigError(f"heads {text!r} are not written like 16/8x128: query heads, KV heads, size of a head.")
        parsed = cls(*map(int, words))
        if parsed.num_heads % parsed.num_kv_heads:
            raise ConfigError(f"heads {text!r}: {words[0]} query heads are no multiple of {words[1]} KV heads.")
        return parsed

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads}x{self.head_dim}"

    @property
    def width(self) -> int:
        """Columns of a fused q, k and v."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def kv_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Bytes of keys and values of so many tokens."""
        return tokens * self.num_kv_heads * self.head_dim * 2 * itemsize


@dataclass(frozen=True)
class Work:
    """What no implementation can leave out: bytes of inputs and outputs, operations of matrix products.

    Additions and exponentials outside of products are not counted: of memory's time they take next to nothing.
    """

    bytes: float
    operations: float = 0.0

    def seconds(self, rates: Rates) -> float:
        """The floor: the larger of both times."""
        return max(self.bytes / rates.memory, self.operations / rates.matrix)

    def bound(self, rates: Rates) -> str:
        """`memory` or `matrix`, whichever takes longer."""
        return "memory" if self.bytes / rates.memory >= self.operations / rates.matrix else "matrix"


@dataclass(frozen=True)
class Place:
    """Where and in which type a case is measured.

    Attributes:
        device, dtype: of activations, weights and caches.
        rotated_bytes: what the calls of a case read in turn, many times the L2 cache.
    """

    device: torch.device
    dtype: torch.dtype
    rotated_bytes: int = ROTATED_BYTES

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal values of that standard deviation."""
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(0.0, scale)

    def copies(self, num_bytes: float, fewest: int = 2) -> int:
        """Sets of tensors to rotate over, if a call reads so many bytes of its own."""
        return max(fewest, min(MAX_CALLS, math.ceil(self.rotated_bytes / num_bytes)))

    def synchronize(self) -> None:
        """Wait for the device. Some ops read weights before the kernel ahead of them has ended."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def bound(self) -> float:
        """Of `worst_error`: some roundings to a type of two bytes, or a sum in another order in four."""
        return 6 * torch.finfo(self.dtype).eps if self.dtype.itemsize == 2 else 1e-4


@dataclass(frozen=True)
class Timed:
    """Something to be timed once it was found right.

    Attributes:
        calls: the same work on each set of tensors.
        error: makes the first call and says how wrong its result is; NaN counts as wrong.
        bound: the largest error of a right one.
    """

    calls: Sequence[Callable[[], object]]
    error: Callable[[], float]
    bound: float


@dataclass(frozen=True)
class Prepared:
    """A case's op with its tensors, and what others have for the same work, by name."""

    op: Timed
    rivals: Mapping[str, Timed] = field(default_factory=dict)


class Case(ABC):
    """One op at one shape. Subclasses are frozen dataclasses whose fields are the shape."""

    op: ClassVar[str]

    @property
    def shape(self) -> str:
        """For a table: `16/8x128 batch 1 context 1024`. What is as usual is left out."""
        words = []
        for it in fields(self):  # type: ignore[arg-type]
            value = getattr(self, it.name)
            if isinstance(value, (str, Heads)):
                words.append(str(value))
            elif value is True:
                words.append(it.name)
            elif value != it.default:
                words.append(f"{it.name} {value}")
        return " ".join(words)

    @abstractmethod
    def work(self, itemsize: int) -> Work:
        """Bytes and operations, with elements of so many bytes."""

    @abstractmethod
    def prepare(self, place: Place) -> Prepared:
        """The tensors, allocated now, and the calls."""

    def unsupported(self, place: Place) -> str | None:
        """Why the op is not there on this device, None if it is."""
        return None


def worst_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of an element, relative to itself plus the root mean square of its row.

    So one wrong element shows among millions, and the rounding of a large or of a tiny one does not.
    """
    if out.shape != exact.shape:
        return math.inf
    wide = exact.float()
    scale = wide.abs() + wide.square().mean(-1, keepdim=True).sqrt()
    error = ((out.float() - wide).abs() / scale.clamp_(min=1e-30)).max().item()
    return error if error == error else math.inf


def different(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """0 if both of each pair hold the same bits, else infinite."""
    return 0.0 if all(torch.equal(ours, theirs) for ours, theirs in pairs) else math.inf
