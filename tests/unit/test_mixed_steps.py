"""Steps that decode rows and compute prompts: one forward pass over both gives what a pass for each gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tritonllm import LLMEngine, SamplingParams
from tritonllm.bench.target import model_shape
from tritonllm.engine.mixed_steps import MixedSteps, one_pass_pays
from tritonllm.engine.plan import StepPlan
from tritonllm.kernels.decode_splits import distinct_batches
from tritonllm.kernels.longest_first import FEW_ROWS
from tritonllm.models.attention_metadata import DecodeMetadata, MixedLastMetadata, MixedMetadata, PrefillMetadata
from tritonllm.models.decoder import DecoderLayer, DecoderLM
from tritonllm.models.layers import TPGroup
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

PROMPTS = [[2, 3, 4], [9] * 20, [7], [11, 12], list(range(40, 73)), [14], [15] * 17, [16] * 16, [2, 3, 4, 5]]
CONTROLS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"allowed_token_ids": range(0, 90, 3), "presence_penalty": 1.0},
]
FORMS = ["one pass", "two passes", "two padded passes"]


def choose_form(engine: LLMEngine, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine.runner
    if form == "two passes":
        monkeypatch.setattr(runner._steps.mixed, "possible", False)
    if form == "two padded passes":  # as on a GPU, where these sizes are captured
        runner.prefill_graphs = runner.make_prefill_graphs(True)


def params_of(index: int, **more: Any) -> SamplingParams:
    kind = {"temperature": index % 2, "top_k": 9 * (index % 3 == 1), "max_tokens": 12 - index, "seed": index}
    return SamplingParams(**{**kind, "ignore_eos": True, **more})


def arriving(engine: LLMEngine, params: list[SamplingParams]) -> list[tuple[list[int], Any]]:
    """Prompts that come one every other step; completions with their log probabilities."""
    completions = []
    for prompt, param in zip(PROMPTS, params, strict=True):
        completions += engine.queue_prompt(prompt, param)
        engine.step_loop.advance()
        engine.step_loop.advance()
    while not engine.scheduler.is_finished():
        engine.step_loop.advance()
    return [(it.seq.completion_token_ids, (it.seq.logprobs, it.seq.prompt_logprobs)) for it in completions]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The metadata of every forward pass."""
    seen: list[Any] = []
    forward = DecoderLM.forward
    monkeypatch.setattr(DecoderLM, "forward", lambda self, *args: seen.append(args[-1]) or forward(self, *args))
    return seen


class TestTheRule:
    @pytest.mark.parametrize(("tokens", "pays"), [(1, False), (512, False), (2048, False), (4096, True)])
    def test_chunks_that_have_a_graph_take_one_pass_where_the_gpu_hides_the_host(self, tokens: int, pays: bool) -> None:
        assert one_pass_pays(tokens, weights_of("Qwen3-0.6B"), captured=True) is pays

    def test_large_layers_hide_it_behind_fewer_tokens(self) -> None:
        assert not one_pass_pays(128, weights_of("Qwen3-8B"), captured=True)
        assert one_pass_pays(256, weights_of("Qwen3-8B"), captured=True)

    def test_chunks_without_a_graph_always_take_one_pass(self) -> None:
        assert one_pass_pays(1, weights_of("Qwen3-0.6B"), captured=False)

    def test_the_weights_are_those_of_a_layer(self, make_engine) -> None:
        model = make_engine().runner.model
        layers = sum(weight.numel() for weight in model.model.layers.parameters())
        assert 2 * MixedSteps(model)._layer_weights == layers


def weights_of(name: str) -> int:
    shape = model_shape(name)
    heads = shape.num_heads + shape.num_kv_heads
    return shape.hidden_size * (2 * heads * shape.head_dim + 3 * shape.intermediate_size)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_runs_the_passes_that_it_says(make_engine, monkeypatch, forwards: list[Any], form: str) -> None:
    engine = make_engine()
    choose_form(engine, form, monkeypatch)
    launch, steps = engine.runner.launch, []

    def launched(plan: StepPlan) -> None:
        del forwards[:]
        launch(plan)
        steps.append((bool(plan.num_decode_rows), bool(plan.chunks), [type(attn) for attn in forwards]))

    monkeypatch.setattr(engine.runner, "launch", launched)
    arriving(engine, [params_of(index) for index in range(len(PROMPTS))])
    mixed = [MixedMetadata] if form == "one pass" else [DecodeMetadata, PrefillMetadata]
    expected = {(True, False): [DecodeMetadata], (False, True): [PrefillMetadata], (True, True): mixed}
    assert {(decodes, prefills) for decodes, prefills, _ in steps} == expected.keys()
    for decodes, prefills, passes in steps:
        assert passes == expected[decodes, prefills]


FAMILIES: list[Any] = [
    ("llama", {}),
    ("mistral", {"sliding_window": 9}),
    pytest.param("gemma2", {"sliding_window": 9}, id="gemma2-windows and softcaps"),
    ("olmo2", {}),
    pytest.param("qwen3", {"heads": "8/1x80"}, marks=pytest.mark.slow),
    pytest.param("gemma3_text", {"sliding_window": 9}, marks=pytest.mark.slow),
    pytest.param("phi3", {"heads": "9/3x64"}, marks=pytest.mark.slow),
]


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("controlled", [False, True], ids=["plain", "controls"])
@pytest.mark.parametrize(("family", "fields"), FAMILIES)
def test_all_forms_give_the_same(
    tmp_path: Path, monkeypatch, forwards: list[Any], family: str, fields: dict[str, Any], controlled: bool
) -> None:
    """Tokens, log probabilities of both kinds, and all keys and values, in chunks beside rows with and without ends."""
    save_tiny_checkpoint(tiny_hf_config(family, **fields), tmp_path / "tiny", tokenizer=False)
    kinds = CONTROLS if controlled else [{}]
    params = [params_of(index, **kinds[index % len(kinds)]) for index in range(len(PROMPTS))]
    keys = {"block_size": 8, "max_model_length": 96, "max_num_sequences": 6, "max_cached_blocks": 60}
    results = []
    for form in FORMS:
        with (
            LLMEngine(str(tmp_path / "tiny"), device="cpu", max_prefill_tokens_beside_decode=7, **keys) as engine,
            monkeypatch.context() as patch,
        ):
            choose_form(engine, form, patch)
            del forwards[:]
            engine.runner.pool.data.zero_()
            results.append((arriving(engine, params), engine.runner.pool.data.clone()))
            # Prompts with controls have no graph, so they take one pass beside others that have one.
            expected_form = form == "one pass" or (controlled and form == "two padded passes")
            assert any(isinstance(attn, MixedMetadata) for attn in forwards) == expected_form
    (expected, expected_pool), *others = results
    for found, pool in others:
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        torch.testing.assert_close(pool, expected_pool, atol=1e-5, rtol=1e-4)
        for (_, ours), (_, theirs) in zip(found, expected, strict=True):
            for kind, other_kind in zip(ours, theirs, strict=True):
                told, others_told = ([entry for entry in entries if entry] for entries in (kind, other_kind))
                assert [entry.token_id for entry in told] == [entry.token_id for entry in others_told]
                wanted = pytest.approx([entry.logprob for entry in others_told], abs=1e-4)
                assert [entry.logprob for entry in told] == wanted


def test_more_rows_than_need_an_order(make_engine, monkeypatch) -> None:
    count = FEW_ROWS + 4
    results = []
    for form in FORMS[:2]:
        engine = make_engine(max_num_sequences=count + 1, max_num_batched_tokens=256)
        choose_form(engine, form, monkeypatch)
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        completions = [engine.queue_prompt([2 + index] * (1 + index), params)[0] for index in range(count)]
        for _ in range(3):
            engine.step_loop.advance()
        completions += engine.queue_prompt(list(range(50)), params)
        while not engine.scheduler.is_finished():
            engine.step_loop.advance()
        results.append([completion.seq.completion_token_ids for completion in completions])
    assert results[0] == results[1]


def test_the_last_layer_works_for_rows_and_wanted_tokens_alone(make_engine, monkeypatch) -> None:
    engine = make_engine(max_prefill_tokens_beside_decode=7)
    rows: list[int] = []
    engine.runner.model.model.layers[-1].mlp.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for token in (2, 3):
        engine.add_prompt([token], params)
    engine.step()
    engine.add_prompt(list(range(20)), params)
    del rows[:]
    for _ in range(3):
        engine.step()
    assert rows == [2, 2, 3]


def test_what_the_last_layer_is_asked_for() -> None:
    last = MixedLastMetadata.wanted
    x = torch.arange(10)[:, None]

    class Wanted:
        num_rows = 2
        wanted = staticmethod(lambda tensor: tensor.index_select(0, torch.tensor([4, 9])))

    class Both:
        decode = prefill = Wanted

    assert last(Both, x).flatten().tolist() == [0, 1, 4, 9]  # type: ignore[arg-type]


class OwnLayer(DecoderLayer):
    """Knows prompts and decode rows, and nothing of mixed steps."""

    def forward(self, hidden, residual, positions, cache, attn):
        assert isinstance(attn, DecodeMetadata | PrefillMetadata)
        return super().forward(hidden, residual, positions, cache, attn)


class OwnLayerLM(DecoderLM):
    layer_class = OwnLayer


class OwnForwardLM(DecoderLM):
    def forward(self, input_ids, positions, kv_cache, attn):
        assert isinstance(attn, DecodeMetadata | PrefillMetadata)
        return super().forward(input_ids, positions, kv_cache, attn)


@pytest.mark.parametrize("model_class", [OwnLayerLM, OwnForwardLM])
def test_a_class_of_one_s_own_never_sees_a_mixed_step(make_engine, monkeypatch, model_class: type[DecoderLM]) -> None:
    params = [params_of(index) for index in range(len(PROMPTS))]
    expected = arriving(make_engine(), params)
    engine = make_engine()
    runner = engine.runner
    model = model_class(runner.resolved.config, TPGroup())
    model.load_state_dict(runner.model.state_dict())
    monkeypatch.setattr(runner._steps, "_model", model)
    monkeypatch.setattr(runner._steps, "mixed", MixedSteps(model))
    assert arriving(engine, params) == expected


def test_warm_up_runs_mixed_steps_and_writes_nothing(make_engine, monkeypatch, forwards: list[Any]) -> None:
    runner = make_engine(max_num_sequences=40).runner
    runner.pool.data.fill_(7.0)
    with torch.inference_mode():
        runner._prefill_every_kernel()
    assert (runner.pool.data == 7.0).all()
    rows = [attn.decode.num_rows for attn in forwards if isinstance(attn, MixedMetadata)]
    head_dim = runner.resolved.config.head_dim
    assert rows == distinct_batches(40, runner.num_kv_heads, head_dim, runner.workspace.num_sms)
    assert rows[0] == 1
    assert len(rows) > 2
