"""A checkpoint on disk: a folder in the Hugging Face layout, and what is common to it and to a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tritonllm.config.checks import text
from tritonllm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class Checkpoint(Protocol):
    """Configuration, tokenizer and tensors of one model.

    Attributes:
        path: the folder, or the `.gguf` file.
        config: config.json as a plain dict; for a GGUF file the equivalent dict.
        generation_config: generation_config.json as a plain dict, empty if there is none.
    """

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def generation_config(self) -> dict[str, Any]: ...

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream every tensor with its Hugging Face name, whole, on the CPU; nothing is kept once it is yielded."""

    def load_tokenizer(self, tokenizer: str | None = None) -> Any:
        """The transformers tokenizer of the checkpoint, or of the folder or hub id given instead.

        None if the checkpoint has none and no other is given: token ids can still be served.
        """


class SafetensorsCheckpoint:
    """A folder with config.json and safetensors files.

    Which files count, in the order of transformers: `model.safetensors` alone; else exactly the shards that
    `model.safetensors.index.json` names; else every `.safetensors` file but adapters.

    Raises:
        CheckpointError: a file is missing or is not readable, or the folder holds no weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_json(path / CONFIG)
        generation_config = path / GENERATION_CONFIG
        self.generation_config = read_json(generation_config) if generation_config.is_file() else {}
        self._shard_of, self._files = _weight_files(path)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._read(lambda shard, name: shard.get_tensor(name))

    def slices(self) -> Iterator[tuple[str, Any]]:
        """Every tensor's name with a slice of safetensors, which knows its shape and type and has read nothing yet."""
        return self._read(lambda shard, name: shard.get_slice(name))

    def _read(self, read: Callable[[Any, str], Any]) -> Iterator[tuple[str, Any]]:
        from safetensors import SafetensorError, safe_open

        for file in self._files:
            try:
                with safe_open(file, framework="pt", device="cpu") as shard:
                    for name in shard.keys():  # noqa: SIM118 - not a mapping
                        # The index decides where a tensor that lies in two shards is read from.
                        if self._shard_of.get(name, file.name) == file.name:
                            yield name, read(shard, name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{file} ({file.stat().st_size} bytes) is not a readable safetensors file ({error}); "
                    "download it again."
                ) from error

    def load_tokenizer(self, tokenizer: str | None = None) -> Any:
        if tokenizer is None and not any((self.path / name).is_file() for name in TOKENIZER_FILES):
            return None
        return load_tokenizer(tokenizer or str(self.path))


def meta_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """The names of a checkpoint's tensors with their shapes, as meta tensors.

    Of safetensors files only the headers are read. A type that is not floating comes as uint8.
    """
    import torch

    if not isinstance(checkpoint, SafetensorsCheckpoint):
        yield from ((name, tensor.to("meta")) for name, tensor in checkpoint.tensors())
        return
    floating = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
    for name, shard in checkpoint.slices():
        dtype = floating.get(shard.get_dtype(), torch.uint8)
        yield name, torch.empty(shard.get_shape(), dtype=dtype, device="meta")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, is not JSON, or holds something else than an object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}, so it is not a checkpoint folder.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content


def load_tokenizer(source: str, gguf_file: str | None = None) -> Any:
    """The tokenizer of a folder or hub id, or of a GGUF file in the folder `source`.

    Raises:
        CheckpointError: there is no tokenizer that transformers can build.
    """
    import transformers

    try:
        if gguf_file is None:
            loaded = transformers.AutoTokenizer.from_pretrained(source)
        else:
            # The same tokenizer that AutoTokenizer gives; that one reads the whole file twice to choose a class.
            loaded = transformers.PreTrainedTokenizerFast.from_pretrained(source, gguf_file=gguf_file)
    except Exception as error:
        raise CheckpointError(
            f"No tokenizer can be built from {gguf_file or source}: {type(error).__name__}: {error}. "
            "Name another folder or hub id with `tokenizer`."
        ) from error
    # It would take spaces out of the text; newer versions ignore it and warn.
    loaded.clean_up_tokenization_spaces = False
    return loaded


def _weight_files(path: Path) -> tuple[dict[str, str], list[Path]]:
    """The shard of each tensor where an index tells it, and the files to read, all of which exist."""
    if (path / SINGLE_FILE).is_file():
        return {}, [path / SINGLE_FILE]
    if (path / INDEX).is_file():
        shard_of = read_json(path / INDEX).get("weight_map")
        if not isinstance(shard_of, dict) or not shard_of:
            raise CheckpointError(f"{path / INDEX} has no weight_map; download it again.")
        for name, shard in shard_of.items():
            text().check(f"{path / INDEX}: weight_map[{name!r}]", shard, CheckpointError)
        shards = sorted(set(shard_of.values()))
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing:
            raise CheckpointError(
                f"{path} lacks {len(missing)} of the {len(shards)} files that {INDEX} names: {', '.join(missing)}; "
                "download the checkpoint again."
            )
        return shard_of, [path / shard for shard in shards]
    files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith(ADAPTER))
    if not files:
        raise CheckpointError(
            f"{path} holds no weights: tritonllm reads .safetensors and .gguf files; "
            "convert other formats with save_pretrained of transformers."
        )
    return {}, files
