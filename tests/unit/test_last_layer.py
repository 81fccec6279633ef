"""A prefill's last layer works for the tokens that are sampled alone, and stores the keys and values of all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tritonllm import EngineConfig, ModelRunner
from tritonllm.engine.inputs import PrefillLayout, StepInputs, prefill_inputs
from tritonllm.engine.plan import PrefillChunk, StepPlan
from tritonllm.engine.prefill_graphs import TOKEN_BUCKETS, prefill_layouts
from tritonllm.engine.sequence import Choice, RowSampling
from tritonllm.kernels.decode_attention import DecodeWorkspace
from tritonllm.kernels.decode_splits import distinct_batches
from tritonllm.kernels.recording import GPU
from tritonllm.models import attention_metadata
from tritonllm.models.attention_metadata import LastTokensMetadata, PrefillMetadata
from tritonllm.models.decoder import DecoderLayer, DecoderLM
from tritonllm.models.layers import Attention, TPGroup
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

GREEDY = RowSampling(0.0, 0, 1.0, 0)
BLOCK_SIZE, TILE_ROWS = 8, 32
CPU = torch.device("cpu")


def chunk(length: int, start: int, table: list[int], sample: bool = True) -> PrefillChunk:
    ids = torch.randint(2, 512, (length,), generator=torch.Generator().manual_seed(length + start)).tolist()
    return PrefillChunk(ids, start, table, sample, GREEDY)


CASES = {
    "a prompt": [chunk(11, 0, [4, 1])],
    "one token": [chunk(1, 0, [2])],
    "the middle of a prompt": [chunk(9, 8, [3, 5, 6], sample=False)],
    "behind a cached prefix": [chunk(3, 16, [7, 2, 9])],
    "several prompts": [chunk(5, 0, [1]), chunk(12, 8, [2, 6, 3]), chunk(1, 0, [5])],
    "several, not all of which end": [
        chunk(4, 8, [1, 8], sample=False), chunk(5, 3, [2]), chunk(6, 0, [3], sample=False), chunk(2, 15, [7, 5, 4]),
    ],
    "one token each": [chunk(1, 4, [3]), chunk(1, 0, [1]), chunk(1, 9, [2, 6])],
}  # fmt: skip


@contextmanager
def runner_of(folder: Path, family: str, **fields: Any) -> Iterator[ModelRunner]:
    save_tiny_checkpoint(tiny_hf_config(family, **fields), folder)
    config = EngineConfig(
        model_name_or_path=str(folder), device="cpu", block_size=BLOCK_SIZE, max_model_length=32, max_num_sequences=4
    )
    runner = ModelRunner(config)
    yield runner
    runner.exit()


@pytest.fixture(scope="module", params=[1, 2], ids=["one layer", "two layers"])
def runner(request, _one_thread, tmp_path_factory):
    folder = tmp_path_factory.mktemp("last-layer") / "tiny"
    with runner_of(folder, "llama", num_hidden_layers=request.param) as runner:
        yield runner


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def fill_pool(runner: ModelRunner) -> None:
    """Keys and values of the prefixes, the same each time."""
    runner.pool.data.normal_(generator=torch.Generator().manual_seed(5))


def run(runner: ModelRunner, model: torch.nn.Module, inputs: StepInputs, attn) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states, and the pool behind them."""
    fill_pool(runner)
    hidden = model(inputs.input_ids, inputs.positions, runner.pool.layers, attn)
    return hidden, runner.pool.data.clone()


def exact(case: str) -> StepInputs:
    return prefill_inputs(CASES[case], BLOCK_SIZE, TILE_ROWS, CPU)


def padded(case: str) -> StepInputs:
    layout = prefill_layouts(64, 4, 4, TILE_ROWS)[1]
    assert layout.holds(PrefillLayout.for_chunks(CASES[case], BLOCK_SIZE, TILE_ROWS))
    return layout.inputs(torch.from_numpy(layout.pack(CASES[case], BLOCK_SIZE)), choice=Choice.PLAIN)


def subclass_of(runner: ModelRunner, model_class: type[DecoderLM]) -> DecoderLM:
    model = model_class(runner.resolved.config, TPGroup())
    model.load_state_dict(runner.model.state_dict())
    return model


WINDOWED = {"sliding_window": 9, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "fields"),
    [("mistral", WINDOWED), ("gemma2", WINDOWED), ("gemma3_text", {**WINDOWED, "layer_types": None}), ("olmo2", {})],
)
def test_layers_of_every_kind_work_for_the_wanted_tokens(tmp_path, family: str, fields: dict[str, Any]) -> None:
    """With a window in the last layer, behind which tokens of the prefix lie."""
    with runner_of(tmp_path / "tiny", family, **fields) as runner:
        seen = []
        runner.model.model.layers[-1].mlp.register_forward_hook(lambda mlp, args, out: seen.append(len(out)))
        for case in CASES:
            inputs = exact(case)
            whole, pool = run(runner, runner.model, inputs, inputs.attn)
            wanted, pool_of_wanted = run(runner, runner.model, inputs, inputs.attn_of_last(runner.workspace))
            torch.testing.assert_close(wanted, whole[inputs.last_tokens.long()], atol=1e-5, rtol=1e-5)
            assert torch.equal(pool_of_wanted, pool)
            assert seen[-2:] == [len(whole), len(inputs.last_tokens)]


class TestHiddenStates:
    @pytest.mark.parametrize("case", CASES)
    def test_they_are_those_of_the_wanted_tokens(self, runner, case: str) -> None:
        inputs = exact(case)
        whole, pool = run(runner, runner.model, inputs, inputs.attn)
        wanted, pool_of_wanted = run(runner, runner.model, inputs, inputs.attn_of_last(runner.workspace))
        assert len(whole) == sum(len(chunk.token_ids) for chunk in CASES[case])
        assert wanted.shape == (sum(chunk.sample for chunk in CASES[case]), whole.shape[1])
        torch.testing.assert_close(wanted, whole[inputs.last_tokens.long()], atol=1e-5, rtol=1e-5)
        assert torch.equal(pool_of_wanted, pool)

    @pytest.mark.parametrize("case", CASES)
    def test_padding_changes_none(self, runner, case: str) -> None:
        inputs, some = exact(case), padded(case)
        expected, pool = run(runner, runner.model, inputs, inputs.attn)
        wanted, pool_of_wanted = run(runner, runner.model, some, some.attn_of_last(runner.workspace))
        assert len(wanted) == 4
        torch.testing.assert_close(
            wanted[: len(inputs.last_tokens)], expected[inputs.last_tokens.long()], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(pool_of_wanted, pool, atol=1e-5, rtol=1e-5)

    def test_padding_rows_read_no_block(self, runner) -> None:
        inputs = padded("one token")
        runner.pool.data.fill_(float("nan"))
        attn = inputs.attn_of_last(runner.workspace)
        assert runner.model(inputs.input_ids, inputs.positions, runner.pool.layers, attn).isfinite().all()

    def test_metadata_made_once_serves_what_the_buffer_holds_later(self, runner) -> None:
        """As in a captured graph, which knows addresses alone."""
        layout = prefill_layouts(64, 4, 4, TILE_ROWS)[1]
        buffer = torch.from_numpy(layout.pack([], BLOCK_SIZE))
        inputs = layout.inputs(buffer, choice=Choice.PLAIN)
        attn = inputs.attn_of_last(runner.workspace)
        for case in CASES:
            buffer.copy_(torch.from_numpy(layout.pack(CASES[case], BLOCK_SIZE)))
            fresh = padded(case)
            expected, _ = run(runner, runner.model, fresh, fresh.attn_of_last(runner.workspace))
            assert torch.equal(run(runner, runner.model, inputs, attn)[0], expected)


class TestWork:
    @pytest.mark.parametrize("case", CASES)
    def test_the_last_mlp_sees_the_wanted_tokens_alone(self, runner, case: str) -> None:
        inputs = exact(case)
        rows: list[int] = []
        hooks = [
            layer.mlp.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
            for layer in runner.model.model.layers
        ]
        run(runner, runner.model, inputs, inputs.attn_of_last(runner.workspace))
        for hook in hooks:
            hook.remove()
        num_tokens = len(inputs.input_ids)
        assert rows == [num_tokens] * (len(hooks) - 1) + [len(inputs.last_tokens)]

    def test_a_launched_step_names_them_and_a_prepared_one_does_not(self, runner, monkeypatch) -> None:
        seen = []
        forward = DecoderLM.forward
        monkeypatch.setattr(DecoderLM, "forward", lambda self, *args: seen.append(args[-1]) or forward(self, *args))
        runner.launch(StepPlan(chunks=CASES["several prompts"]))
        runner.collect()
        (attn,) = seen
        assert isinstance(attn.last, LastTokensMetadata)
        assert attn.last.last_tokens.tolist() == [4, 16, 17]
        assert attn.last.sequences.tolist() == [0, 1, 2]
        assert attn.last.context_lens.tolist() == [5, 20, 1]
        assert exact("several prompts").attn.last is None

    def test_warm_up_runs_every_batch_that_compiles_a_kernel(self, llama, monkeypatch) -> None:
        for name in ("reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        for name in ("memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
        # Of a small GPU: tiny heads would leave a large one idle, whatever the batch.
        small = GPU(capability=(0, 0), shared_memory=64 * 1024, num_sms=4)
        monkeypatch.setattr(sys.modules[DecodeWorkspace.__module__], "gpu_of", lambda device: small)
        batches = []
        attend = attention_metadata.decode_attention
        monkeypatch.setattr(
            attention_metadata,
            "decode_attention",
            lambda q, *args, **kw: batches.append(len(q)) or attend(q, *args, **kw),
        )
        for max_num_sequences, budget, most in ((40, 64, 40), (200, 20, 20)):
            config = EngineConfig(
                model_name_or_path=llama, device="cpu", max_model_length=16, max_num_sequences=max_num_sequences,
                max_num_batched_tokens=budget,
            )  # fmt: skip
            runner = ModelRunner(config)
            batches.clear()
            runner.warmup_model()
            expected = distinct_batches(
                most, runner.num_kv_heads, runner.resolved.config.head_dim, runner.workspace.num_sms
            )
            assert len(expected) > 3
            assert set(batches) >= set(expected)
            assert max(batches) <= most
            runner.exit()


class OwnLayer(DecoderLayer):
    """Looks at every token's result before it hands it on."""

    def forward(self, hidden, residual, positions, cache, attn):
        assert isinstance(attn, PrefillMetadata)
        tokens = len(hidden)
        hidden, residual = super().forward(hidden, residual, positions, cache, attn)
        assert len(hidden) == len(residual) == tokens
        return hidden, residual


class OwnAttention(Attention):
    """Calls the attention by itself."""

    def forward(self, hidden, positions, cache, attn):
        assert isinstance(attn, PrefillMetadata)
        return super().forward(hidden, positions, cache, attn)


class LayerOfOwnAttention(DecoderLayer):
    def __init__(self, config, rotary, tp) -> None:
        super().__init__(config, rotary, tp)
        self.self_attn = OwnAttention(config, rotary, tp)


class OwnLayerLM(DecoderLM):
    layer_class = OwnLayer


class OwnAttentionLM(DecoderLM):
    layer_class = LayerOfOwnAttention


class OwnForwardLM(DecoderLM):
    """Goes on with every token, by its id: one wanted token would be broadcast silently."""

    def forward(self, input_ids, positions, kv_cache, attn):
        return self.model(input_ids, positions, kv_cache, attn) + 0 * input_ids[:, None]


@pytest.mark.parametrize("model_class", [OwnLayerLM, OwnAttentionLM, OwnForwardLM])
@pytest.mark.parametrize("case", CASES)
def test_a_class_with_a_forward_of_its_own_gets_every_token(runner, monkeypatch, model_class, case: str) -> None:
    def tokens() -> list[int]:
        fill_pool(runner)
        runner.launch(StepPlan(chunks=CASES[case]))
        return runner.collect()

    inputs, expected = exact(case), tokens()
    model = subclass_of(runner, model_class)
    whole, _ = run(runner, runner.model, inputs, inputs.attn)
    assert torch.equal(run(runner, model, inputs, inputs.attn_of_last(runner.workspace))[0], whole)
    monkeypatch.setattr(runner, "model", model)
    assert tokens() == expected


def test_a_captured_layout_has_more_tokens_than_rows() -> None:
    """So that the number of hidden states says whether a model has selected."""
    layouts = prefill_layouts(2**20, 2**20, 2**20, TILE_ROWS)
    assert len(layouts) == len(TOKEN_BUCKETS)
    assert all(layout.num_tokens > layout.num_sampled for layout in layouts)
