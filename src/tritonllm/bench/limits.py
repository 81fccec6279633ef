"""What the hardware allows: the least time that a workload can take, from bytes and operations alone.

A floor is max(bytes / memory rate, operations / matrix rate): perfect overlap of both, no launch, no host. Counted is
what no implementation can leave out: each weight of the linear layers and the head (a tied head is the same bytes, read
once), each cached key and value that a step attends to, and the multiplications of the linear layers and of attention.
A layer with a sliding window attends to no more keys than that.
Not counted, since they are small: rows of the embedding, norms, writes to the cache, activations, sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from tritonllm.config import ModelConfig
from tritonllm.errors import ConfigError


@dataclass(frozen=True)
class Rates:
    """What a device reaches, not what its data sheet says.

    Attributes:
        memory: bytes a second of a large copy, reads and writes counted.
        matrix: multiplications and additions a second of a large matrix product in bfloat16.
    """

    memory: float
    matrix: float

    def together(self, devices: int) -> Rates:
        """Of so many devices that share a model; what they say to each other is not counted."""
        return Rates(self.memory * devices, self.matrix * devices)


MEASURED = {"H200": Rates(memory=4.3e12, matrix=700e12)}
"""By a part of the device's name."""

_ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


def find_rates(
    device_name: str | None, dtype: str, memory_rate: float | None = None, matrix_rate: float | None = None
) -> Rates | None:
    """The rates to take floors at, None if they are not known; those given come before those measured.

    Args:
        device_name: as torch names it, None for a CPU.
        dtype: of weights and activations; the table knows matrix products of two-byte types only.
        memory_rate: in TB/s.
        matrix_rate: in TFLOP/s.

    Raises:
        ConfigError: one rate was given and the other is not known.
    """
    measured = next((rates for name, rates in MEASURED.items() if name in (device_name or "")), None)
    memory = None if memory_rate is None else memory_rate * 1e12
    matrix = None if matrix_rate is None else matrix_rate * 1e12
    if measured is not None:
        memory = memory or measured.memory
        matrix = matrix or (measured.matrix if _ITEM_SIZES[dtype] == 2 else None)
    if memory is not None and matrix is not None:
        return Rates(memory, matrix)
    if memory_rate is not None or matrix_rate is not None:
        missing = "matrix" if matrix is None else "memory"
        raise ConfigError(
            f"The {missing} rate of {device_name or 'this device'} in {dtype} is not known: "
            f"give --{missing}-rate as well, or neither."
        )
    return None


@dataclass(frozen=True)
class Limits:
    """Bytes, operations and floors of one model on one device.

    Args:
        model: the model.
        dtype: of weights, activations and cache.
        rates: of the device; floors are None without.
    """

    model: ModelConfig
    dtype: str
    rates: Rates | None

    @property
    def linear_parameters(self) -> int:
        """Weights of all linear layers but the head; biases are left out."""
        model = self.model
        heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim  # Q, K, V and O
        return model.num_layers * model.hidden_size * (heads + 3 * model.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Weights of the LM head."""
        return self.model.vocab_size * self.model.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that each step reads."""
        return (self.linear_parameters + self.head_parameters) * _ITEM_SIZES[self.dtype]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one cached token takes."""
        model = self.model
        return 2 * model.num_layers * model.num_kv_heads * model.head_dim * _ITEM_SIZES[self.dtype]

    @cached_property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer: the keys that a query sees at most, None for all."""
        return tuple(self.model.of_layer(index).sliding_window for index in range(self.model.num_layers))

    def keys_seen(self, context: float) -> float:
        """Keys that the query at the end of a context attends to, all layers together."""
        return sum(count * seen(context, window) for window, count in Counter(self.windows).items())

    def kv_bytes(self, keys: float) -> float:
        """Bytes of so many keys of one layer and their values, in all its heads."""
        return self.kv_bytes_per_token / self.model.num_layers * keys

    def attention_operations(self, pairs: float) -> float:
        """Multiplications and additions of a layer for so many pairs of a query and a key it sees: q @ k and p @ v."""
        return 4 * self.model.num_heads * self.model.head_dim * pairs

    def prefill_operations(self, length: int) -> float:
        """Of a prompt, for the last token of which alone the head is wanted.

        So the last layer owes the others their keys and values and nothing else; all layers before it run in full.
        """
        model = self.model
        keys_and_values = 2 * model.hidden_size * model.num_kv_heads * model.head_dim  # weights of a layer's K and V
        layer = self.linear_parameters // model.num_layers
        for_all = self.linear_parameters - layer + keys_and_values
        weights = for_all * length + layer - keys_and_values + self.head_parameters
        *before, last = self.windows
        pairs = sum(seen_pairs(length, window) for window in before) + seen(length, last)
        return 2 * weights + self.attention_operations(pairs)

    def prefill_seconds(self, length: int) -> float | None:
        """Floor of the time to the first token of one prompt: all weights read once, or its operations."""
        return self._seconds(self.weight_bytes, self.prefill_operations(length))

    def decode_bytes(self, batch: int, context: float) -> float:
        """Bytes that one decode step of `batch` sequences of `context` tokens each reads."""
        return self.weight_bytes + self.kv_bytes(batch * self.keys_seen(context))

    def decode_seconds(self, batch: int, context: float) -> float | None:
        """Floor of one decode step of `batch` sequences of `context` tokens each, the new ones counted."""
        weights = self.linear_parameters + self.head_parameters
        operations = 2 * batch * weights + self.attention_operations(batch * self.keys_seen(context))
        return self._seconds(self.decode_bytes(batch, context), operations)

    def decoding_seconds(self, batch: int, prompt: int, output: int) -> float | None:
        """Mean floor of the decode steps of a batch; step i of `output` - 1 attends to `prompt` + i tokens."""
        floors = [self.decode_seconds(batch, prompt + step) for step in range(1, output)]
        return None if self.rates is None else fmean(floor or 0.0 for floor in floors)

    def workload_seconds(self, lengths: Sequence[tuple[int, int]]) -> float | None:
        """Floor of requests that are all there at the start, `(prompt tokens, output tokens)` each.

        The operations of all prompts, plus the bytes of all decode steps with the best possible batching: a prompt
        gives its first token, so no fewer than `max(output tokens) - 1` steps read the weights once each, and a request
        of n and m tokens reads n + 1, n + 2, ..., n + m - 1 cached tokens, a window at most. Prompts and decode steps
        are added, since they take turns in nearly every engine; a perfect overlap of the two could go below by the
        smaller share.
        """
        steps = max(output for _, output in lengths) - 1
        keys = sum(
            count * (seen_pairs(prompt + output - 1, window) - seen_pairs(prompt, window))
            for window, count in Counter(self.windows).items()
            for prompt, output in lengths
        )
        operations = sum(self.prefill_operations(prompt) for prompt, _ in lengths)
        decode = self._seconds(steps * self.weight_bytes + self.kv_bytes(keys), 0)
        prefill = self._seconds(0, operations)
        return None if decode is None or prefill is None else decode + prefill

    def _seconds(self, num_bytes: float, operations: float) -> float | None:
        if self.rates is None:
            return None
        return max(num_bytes / self.rates.memory, operations / self.rates.matrix)


def seen(context: float, window: int | None) -> float:
    """Keys that the last of `context` tokens attends to."""
    return context if window is None else min(context, window)


def seen_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key it sees in a text of that length: 1 + 2 + ... up to the window, and then that."""
    rising = length if window is None else min(length, window)
    return rising * (rising + 1) // 2 + (length - rising) * rising


def fraction(floor: float | None, measured: float) -> float | None:
    """Share of the measured time that the hardware needs."""
    return None if floor is None or measured <= 0 else floor / measured
