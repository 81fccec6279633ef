"""Every parameter is filled exactly once from a safetensors folder, or loading fails with all the names."""

from __future__ import annotations

import json
import random
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from sharded_model import HIDDEN, TinyModel, checkpoint
from torch import nn

from tritonllm.errors import CheckpointError
from tritonllm.weights import load_weights, open_checkpoint


def write(folder, tensors, shards=1, **config):
    """A checkpoint folder: one file, or several with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["TinyModel"], **config}))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load(folder, model=None):
    model = model or TinyModel()
    return model, load_weights(model, open_checkpoint(folder).tensors())


def assert_holds(model, tensors):
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}"
        for leaf in ("weight", "bias"):
            stacked = [tensors[f"{prefix}.self_attn.{name}_proj.{leaf}"] for name in "qkv"]
            assert torch.equal(getattr(layer.self_attn.qkv_proj, leaf), torch.cat(stacked))
            assert torch.equal(getattr(layer.mlp.up_proj_norm, leaf), tensors[f"{prefix}.mlp.up_proj_norm.{leaf}"])
        stacked = [tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        assert torch.equal(layer.mlp.gate_up_proj.weight, torch.cat(stacked))
        assert torch.equal(layer.self_attn.q_norm.weight, tensors[f"{prefix}.self_attn.q_norm.weight"])
    assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("shards", [1, 3])
def test_every_parameter_is_filled(tmp_path, shards):
    tensors = checkpoint()
    model, report = load(write(tmp_path / "tiny", tensors, shards))
    assert_holds(model, tensors)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert sorted(report.loaded) == sorted(tensors)
    assert report.ignored == ()


def test_values_are_cast_to_the_dtype_of_the_model(tmp_path):
    tensors = checkpoint()
    model, _ = load(write(tmp_path / "tiny", tensors), TinyModel().to(torch.bfloat16))
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].bfloat16())


def test_two_ranks_hold_the_two_halves():
    tensors = checkpoint()
    ranks = [TinyModel(rank=rank, size=2) for rank in (0, 1)]
    for model in ranks:
        load_weights(model, tensors.items())
    key = [model.model.layers[1].self_attn.qkv_proj.bias[4:6] for model in ranks]
    assert torch.equal(torch.cat(key), tensors["model.layers.1.self_attn.k_proj.bias"])


def test_no_tensor_is_kept_when_the_next_is_asked_for():
    def stream():
        for name, tensor in checkpoint().items():
            handed_over = [tensor.clone()]
            watch = weakref.ref(handed_over[0])
            yield name, handed_over.pop()
            assert watch() is None, name

    load_weights(TinyModel(), stream())


class TestTiedHead:
    """Flag and file disagree in all combinations in the wild."""

    EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

    def with_head(self, head, first=False):
        """A checkpoint with this head, stored before everything else or after it."""
        return {self.HEAD: head, **checkpoint(tied=True)} if first else {**checkpoint(tied=True), self.HEAD: head}

    @pytest.mark.parametrize("head_first", [False, True])
    def test_tied_and_absent(self, head_first):
        tensors = checkpoint(tied=True)
        model = TinyModel(tied=True, head_first=head_first)
        assert load_weights(model, tensors.items()).ignored == ()
        assert_holds(model, tensors)

    @pytest.mark.parametrize("head_first", [False, True])
    @pytest.mark.parametrize("stored_first", [False, True])
    def test_tied_and_present_is_one_tensor_and_reports_the_head(self, head_first, stored_first):
        tensors = self.with_head(checkpoint(tied=True)[self.EMBEDDING].clone(), stored_first)
        model = TinyModel(tied=True, head_first=head_first)
        report = load_weights(model, tensors.items())
        assert report.ignored == (self.HEAD,)
        assert self.EMBEDDING in report.loaded
        assert_holds(model, tensors)

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("stored_first", [False, True])
    def test_tied_and_present_but_different_is_an_error(self, rank, stored_first):
        head = checkpoint(tied=True)[self.EMBEDDING].clone()
        head[rank * 8 + 3, 2] += 1
        model = TinyModel(tied=True, rank=rank, size=2)
        with pytest.raises(CheckpointError, match="set tie_word_embeddings to false in config.json") as caught:
            load_weights(model, self.with_head(head, stored_first).items())
        assert self.HEAD in str(caught.value)
        assert self.EMBEDDING in str(caught.value)
        assert "missing" not in str(caught.value)

    def test_tied_tensors_are_compared_in_the_dtype_of_the_model(self):
        head = checkpoint(tied=True)[self.EMBEDDING].bfloat16().float()
        load_weights(TinyModel(tied=True).bfloat16(), self.with_head(head).items())
        with pytest.raises(CheckpointError, match="tied but different"):
            load_weights(TinyModel(tied=True), self.with_head(head).items())

    def test_tied_and_present_in_another_shape_is_an_error(self):
        with pytest.raises(CheckpointError, match=r"wrong shape \(1\): lm_head.weight"):
            load_weights(TinyModel(tied=True), self.with_head(torch.zeros(2, HIDDEN)).items())

    def test_a_tied_head_alone_does_not_stand_for_the_embedding(self):
        tensors = self.with_head(checkpoint()[self.HEAD])
        del tensors[self.EMBEDDING]
        with pytest.raises(CheckpointError, match=r"missing \(1\): model.embed_tokens.weight"):
            load_weights(TinyModel(tied=True), tensors.items())

    def test_untied_and_absent_is_an_error(self):
        with pytest.raises(CheckpointError, match=r"missing \(1\): lm_head.weight"):
            load_weights(TinyModel(), checkpoint(tied=True).items())


class TestDamage:
    def test_all_problems_come_in_one_error(self):
        tensors = checkpoint()
        del tensors["model.layers.1.self_attn.v_proj.bias"]
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)
        tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, HIDDEN)
        stream = [*tensors.items(), ("lm_head.weight", tensors["lm_head.weight"])]
        with pytest.raises(CheckpointError) as caught:
            load_weights(TinyModel(), stream)
        message = str(caught.value)
        assert "missing (1): model.layers.1.self_attn.v_proj.bias" in message
        assert "unexpected (1): model.layers.2.mlp.up_proj.weight" in message
        assert "given twice (1): lm_head.weight" in message
        assert (
            "wrong shape (1): model.layers.0.self_attn.q_proj.weight is [4, 8], the config asks for [8, 8]" in message
        )

    @pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
    def test_a_tensor_that_is_not_floating_is_named_and_not_copied(self, dtype):
        name = "model.layers.0.self_attn.k_proj.weight"
        tensors = checkpoint()
        tensors[name] = tensors[name].to(dtype)
        model = TinyModel()
        with pytest.raises(CheckpointError, match=rf"wrong dtype \(1\): {name} is {dtype}, ") as caught:
            load_weights(model, tensors.items())
        assert "missing" not in str(caught.value)
        assert model.model.layers[0].self_attn.qkv_proj.weight[8:12].isnan().all()

    def test_a_parameter_of_integers_takes_integers(self):
        model = nn.Module()
        model.table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        load_weights(model, {"table": torch.tensor([1, 2, 3])}.items())
        assert model.table.tolist() == [1, 2, 3]

    @given(seed=st.integers(0, 10**6), count=st.integers(1, 4))
    def test_whatever_is_dropped_is_named(self, seed, count):
        tensors = checkpoint()
        dropped = random.Random(seed).sample(sorted(tensors), count)
        with pytest.raises(CheckpointError) as caught:
            load_weights(TinyModel(), [(name, tensor) for name, tensor in tensors.items() if name not in dropped])
        assert f"missing ({count})" in str(caught.value)
        assert all(name in str(caught.value) for name in dropped)

    def test_a_long_list_is_cut(self):
        with pytest.raises(CheckpointError, match="and 15 more"):
            load_weights(TinyModel(), [*checkpoint().items(), *((f"extra.{i}", torch.zeros(1)) for i in range(40))])

    def test_a_packed_name_is_matched_by_whole_segments(self):
        tensors = checkpoint()
        tensors["model.layers.0.self_attn.my_q_proj.weight"] = torch.zeros(8, HIDDEN)
        with pytest.raises(CheckpointError, match=r"unexpected \(1\): model.layers.0.self_attn.my_q_proj.weight"):
            load_weights(TinyModel(), tensors.items())

    def test_a_slot_without_an_entry_in_packed_is_explained(self):
        model = TinyModel()
        model.packed = {}
        with pytest.raises(CheckpointError, match=r"\('qkv_proj', 'q'\)"):
            load_weights(model, checkpoint().items())

    @pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", None])
    def test_an_unreadable_file_is_named(self, tmp_path, content):
        folder = write(tmp_path / "tiny", checkpoint())
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100] if content is None else content)
        with pytest.raises(CheckpointError, match="model.safetensors .* download it again"):
            load(folder)


class TestIgnored:
    EXTRA = "model.layers.0.self_attn.rotary_emb.inv_freq"

    def test_harmless_names_are_reported_and_left_out(self):
        tensors = {**checkpoint(), self.EXTRA: torch.zeros(2)}
        assert load_weights(TinyModel(), tensors.items()).ignored == (self.EXTRA,)

    def test_an_author_lists_more_by_whole_segments(self):
        tensors = {**checkpoint(), "vision.q_scale": torch.zeros(1), "model.unused": torch.zeros(1)}
        model = TinyModel()
        model.ignored_weights = ("q_scale", "unused")
        assert load_weights(model, tensors.items()).ignored == ("vision.q_scale", "model.unused")
        model.ignored_weights = ("scale",)
        with pytest.raises(CheckpointError, match=r"unexpected \(2\)"):
            load_weights(model, tensors.items())


class TestFolder:
    def test_adapters_and_strangers_are_ignored_beside_the_weights(self, tmp_path):
        for shards in (1, 2):
            folder = write(tmp_path / f"tiny{shards}", checkpoint(), shards)
            for stranger in ("adapter_model.safetensors", "other.safetensors"):
                save_file({"base_model.lora_A.weight": torch.zeros(1)}, folder / stranger)
            load(folder)

    def test_without_an_index_every_file_but_adapters_counts(self, tmp_path):
        tensors = checkpoint()
        folder = write(tmp_path / "tiny", tensors, 2)
        (folder / "model.safetensors.index.json").unlink()
        save_file({"base_model.lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")
        assert len(load(folder)[1].loaded) == len(tensors)

    def test_a_tensor_in_two_shards_is_read_where_the_index_says(self, tmp_path):
        tensors = checkpoint()
        folder = write(tmp_path / "tiny", tensors, 2)
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        other = next(shard for shard in weight_map.values() if shard != weight_map["lm_head.weight"])
        own = {name: tensors[name] for name, shard in weight_map.items() if shard == other}
        save_file({**own, "lm_head.weight": torch.zeros_like(tensors["lm_head.weight"])}, folder / other)
        assert torch.equal(load(folder)[0].lm_head.weight, tensors["lm_head.weight"])

    def test_a_shard_that_is_not_there_is_named(self, tmp_path):
        folder = write(tmp_path / "tiny", checkpoint(), 3)
        (folder / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(CheckpointError, match="lacks 1 of the 3 files .*model-00002-of-00003.safetensors"):
            open_checkpoint(folder)

    def test_no_files_is_an_error(self, tmp_path):
        folder = write(tmp_path / "tiny", checkpoint())
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").touch()
        with pytest.raises(CheckpointError, match="holds no weights"):
            open_checkpoint(folder)

    def test_an_index_without_a_map_is_an_error(self, tmp_path):
        folder = write(tmp_path / "tiny", checkpoint(), 2)
        (folder / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(CheckpointError, match="no weight_map"):
            open_checkpoint(folder)

    @pytest.mark.parametrize("shard", [5, None, ["a"], {"a": 1}])
    def test_an_index_that_names_no_file_is_an_error(self, tmp_path, shard):
        folder = write(tmp_path / "tiny", checkpoint(), 2)
        index = folder / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())["weight_map"]
        index.write_text(json.dumps({"weight_map": {**weight_map, "lm_head.weight": shard}}))
        with pytest.raises(CheckpointError, match=r"weight_map\['lm_head.weight'\]=.* is not valid") as caught:
            open_checkpoint(folder)
        assert repr(shard) in str(caught.value)
        assert str(index) in str(caught.value)


def test_a_plain_module_is_filled_by_its_own_names():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))
    tensors = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}
    load_weights(model, tensors.items())
    assert all(torch.equal(value, tensors[name]) for name, value in model.state_dict().items())
