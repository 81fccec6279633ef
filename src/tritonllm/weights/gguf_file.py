"""The GGUF container: header, metadata and the place of each tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The header is read
here and not by the `gguf` package because that takes seconds for a vocabulary; dequantization is left to the package.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritonllm.errors import CheckpointError

if TYPE_CHECKING:
    import numpy

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# struct codes of the scalar value types, by their number in the format
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Place and form of one tensor.

    Fields:
        shape: row-major, as PyTorch counts (the file stores the dimensions in reverse).
        type_number: ggml type, e.g. 0 for F32, 3 for Q4_1.
        offset: first byte, counted from the start of the tensor data.
    """

    shape: tuple[int, ...]
    type_number: int
    offset: int


class GgufFile:
    """An open GGUF file; its bytes are mapped, so only what is used is read.

    Attributes:
        metadata: the key-value pairs.
        tensors: by their name in the file.

    Raises:
        CheckpointError: it is no GGUF file, is damaged, or is one part of several.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._position = 0
            magic, version = self._unpack("4sI")
            if magic != b"GGUF" or version not in VERSIONS:
                raise ValueError(f"it starts with {magic!r} and version {version}")
            num_tensors, num_pairs = self._unpack("QQ")
            self.metadata = {self._string(): self._value(*self._unpack("I")) for _ in range(num_pairs)}
            self.tensors = {self._string(): self._tensor() for _ in range(num_tensors)}
        except (OSError, ValueError, struct.error, KeyError) as error:
            raise CheckpointError(f"{path} is not a readable GGUF file ({error}); download it again.") from error
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        self._data_start = -(-self._position // alignment) * alignment
        if (parts := self.metadata.get("split.count", 1)) > 1:
            raise CheckpointError(f"{path} is one of {parts} parts; join them with `llama-gguf-split --merge` first.")

    def read(self, name: str) -> numpy.ndarray:
        """Dequantize one tensor to a float32 array of its own.

        Raises:
            CheckpointError: the data is cut off, or the `gguf` package cannot dequantize its type.
        """
        import gguf
        import numpy

        tensor = self.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(tensor.type_number)
            block_length, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            row_bytes = tensor.shape[-1] // block_length * block_bytes
            shape = (*tensor.shape[:-1], row_bytes)
            data = numpy.frombuffer(self._bytes, numpy.uint8, math.prod(shape), self._data_start + tensor.offset)
            return numpy.array(gguf.dequantize(data.reshape(shape), kind).reshape(tensor.shape), numpy.float32)
        except (ValueError, NotImplementedError) as error:
            raise CheckpointError(f"Tensor {name!r} of {self.path} cannot be read: {error}.") from error

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + codes, self._bytes, self._position)
        self._position += struct.calcsize("<" + codes)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        start, self._position = self._position, self._position + length
        if self._position > len(self._bytes):
            raise ValueError(f"a string of {length} bytes runs past the end")
        return self._bytes[start : self._position].decode("utf-8", errors="replace")

    def _value(self, type_number: int) -> Any:
        if type_number == STRING:
            return self._string()
        if type_number != ARRAY:
            return self._unpack(SCALARS[type_number])[0]
        item_type, length = self._unpack("IQ")
        if length > len(self._bytes):
            raise ValueError(f"an array of {length} items runs past the end")
        if item_type in SCALARS:
            return list(self._unpack(f"{length}{SCALARS[item_type]}"))
        return [self._value(item_type) for _ in range(length)]

    def _tensor(self) -> GgufTensor:
        (num_dimensions,) = self._unpack("I")
        dimensions = self._unpack(f"{num_dimensions}Q")
        type_number, offset = self._unpack("IQ")
        return GgufTensor(tuple(reversed(dimensions)), type_number, offset)
