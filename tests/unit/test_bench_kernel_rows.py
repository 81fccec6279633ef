"""Which rows `tritonllm kernels bench` measures: those of a model, of the shipped list, and of a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tritonllm.bench.kernels.attention import DecodeAttention, PrefillAttention
from tritonllm.bench.kernels.case import Heads, Place
from tritonllm.bench.kernels.catalog import CASES, model_rows, read_rows, shipped_rows
from tritonllm.bench.kernels.linears import SkinnyLinear
from tritonllm.bench.target import model_shape, norms_heads
from tritonllm.config.model import FULL, SLIDING
from tritonllm.errors import ConfigError
from tritonllm.kernels import reference
from tritonllm.kernels.recording import GPU, recording


class TestRows:
    def test_a_model_has_every_op(self) -> None:
        model = model_shape("Qwen3-0.6B")
        rows = model_rows(model, norms_heads("Qwen3-0.6B", model), [1, 64], 1024, 8192, 256)
        assert {row.case.op for row in rows} == set(CASES) == set(reference.__all__)
        cases = [row.case for row in rows]
        assert len(set(cases)) == len(cases)
        assert DecodeAttention(Heads(16, 8, 128), 64, 1024) in cases
        assert CASES["fused_decode_attention"](Heads(16, 8, 128), 1, 1024, True) in cases
        assert SkinnyLinear(1, 1024, 6144, normed=True, gated=True) in cases
        assert not any(isinstance(case, SkinnyLinear) and case.tokens == 64 for case in cases)
        assert CASES["hopper_linear_parts"](64, 3072, 1024) in cases
        assert PrefillAttention("hopper", Heads(16, 8, 128), 1, 8192) in cases

    def test_a_model_whose_layers_differ_has_attention_of_each_kind(self) -> None:
        model = model_shape("SmolLM2-135M")
        model = replace(model, sliding_window=512, layer_types=(SLIDING, FULL) * (model.num_layers // 2))
        cases = [row.case for row in model_rows(model, False, [8], 1024, 500, 256)]
        decode = [case.window for case in cases if isinstance(case, DecodeAttention)]
        prefill = [(case.form, case.window) for case in cases if isinstance(case, PrefillAttention)]
        assert decode == [512, None]
        assert prefill == [("portable", None), ("hopper", None)]  # which 500 tokens do not outgrow
        cases = [row.case for row in model_rows(model, False, [8], 512, 600, 256)]
        prefill = [(case.form, case.window) for case in cases if isinstance(case, PrefillAttention)]
        assert prefill == [("portable", 512), ("portable", None), ("hopper", None)]
        assert [case.window for case in cases if isinstance(case, DecodeAttention)] == [None]

    def test_only_qwen3_norms_its_heads(self) -> None:
        assert norms_heads("Qwen3-8B", model_shape("Qwen3-8B"))
        assert not norms_heads("Llama-3.2-1B", model_shape("Llama-3.2-1B"))

    def test_the_shipped_list(self) -> None:
        assert shipped_rows() == ["h200"]
        rows = read_rows("h200")
        prefill = {
            (row.case.form, str(row.case.heads), row.case.batch, row.case.length): row.bar.tflops
            for row in rows
            if isinstance(row.case, PrefillAttention) and row.bar
        }
        assert prefill == {
            ("hopper", "32/8x128", 2, 8192): 600, ("portable", "32/8x128", 2, 8192): 460,
            ("hopper", "32/8x128", 1, 32768): 580, ("portable", "32/8x128", 1, 32768): 470,
            ("hopper", "32/8x128", 16, 1024): 440, ("portable", "32/8x128", 16, 1024): 310,
            ("hopper", "32/8x64", 2, 8192): 470, ("portable", "32/8x64", 2, 8192): 410,
        }  # fmt: skip
        decode = {
            (row.case.op, str(row.case.heads), row.case.batch, row.case.context): row.bar.us
            for row in rows
            if "decode" in row.case.op and row.bar
        }
        assert decode == {
            ("decode_attention", "16/8x128", 1, 1024): 6.5, ("fused_decode_attention", "16/8x128", 1, 1024): 7.5,
            ("decode_attention", "16/8x128", 8, 1024): 13, ("decode_attention", "16/8x128", 8, 8192): 70,
            ("decode_attention", "16/8x128", 64, 1024): 70, ("decode_attention", "16/8x128", 256, 1024): 250,
            ("decode_attention", "32/8x64", 1, 1024): 6, ("decode_attention", "32/8x64", 64, 1024): 42,
            ("decode_attention", "32/8x64", 256, 1024): 140, ("decode_attention", "9/3x64", 256, 1024): 58,
        }  # fmt: skip
        choice = {
            (row.case.batch, row.case.logits, row.case.float32): row.bar.us
            for row in rows
            if row.case.op == "sample_tokens" and row.bar
        }
        bars = {1: 15, 64: 65, 256: 240}
        assert choice == {
            (batch, logits, wide): us * factor
            for batch, us in bars.items()
            for logits, factor in (("peaked", 1), ("flat", 2))
            for wide in (False, True)
        }
        linears = [row for row in rows if row.case.op == "skinny_linear" and row.bar]
        assert [row.bar.us for row in linears] == [2.8, 2.2, 4.0, 2.7, 3.3, 2.7, 5.0, 3.5]
        assert {row.bar.rival for row in linears} == {"cuBLAS"}

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("[", "is not readable as JSON"),
            ("{}", "must hold a list of objects, one for each row"),
            ("[]", "must hold a list of objects"),
            ('[{"op": "norm"}]', "op is 'norm', which must be one of add_rms_norm, "),
            ('[{"op": "rms_norm", "tokens": 3}]', "row 1 of .* has no 'columns'"),
            (
                '[{"op": "rms_norm", "tokens": 3, "columns": 8, "rows": 1}]',
                "has 'rows', which is none of tokens, columns",
            ),
            ('[{"op": "rms_norm", "tokens": true, "columns": 8}]', "tokens is True, which is no int"),
            ('[{"op": "rms_norm", "tokens": 0, "columns": 8}]', "tokens is 0, which is too small"),
            ('[{"op": "rms_norm", "tokens": 3, "columns": 8, "bar": 2}]', "bar must be an object, not 2"),
            ('[{"op": "rms_norm", "tokens": 3, "columns": 8, "bar": {"ms": 2}}]', "has 'ms', which is none of us"),
            ('[{"op": "rms_norm", "tokens": 3, "columns": 8, "bar": {"us": "2"}}]', "us is '2', which is no float"),
            ('[{"op": "decode_attention", "heads": "4", "batch": 1, "context": 1}]', "heads '4' are not written like"),
            ('[{"op": "skinny_linear", "tokens": 17, "columns": 8, "rows": 8}]', "takes at most 16 tokens, not 17"),
            (
                '[{"op": "prefill_attention", "form": "fast", "heads": "4/2x16", "batch": 1, "length": 1}]',
                "has no form 'fast', only portable and hopper",
            ),
            ('[{"op": "pick_tokens", "vocab_size": 9, "batch": 1, "logits": "odd"}]', "no logits 'odd', only peaked"),
        ],
    )
    def test_a_wrong_file(self, tmp_path: Path, text: str, reason: str) -> None:
        file = tmp_path / "rows.json"
        file.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            read_rows(str(file))

    def test_no_file(self) -> None:
        with pytest.raises(ConfigError, match="'a100' is no file and none of the shipped lists of rows: h200"):
            read_rows("a100")


HOPPER = GPU(capability=(9, 0), shared_memory=227 * 1024, num_sms=132)


@pytest.mark.parametrize("name", ["h200", "Qwen3-0.6B", "SmolLM2-135M"])
def test_every_row_at_its_full_size_is_launched_on_a_hopper_gpu(name: str) -> None:
    """On meta tensors: what it allocates and launches fits together, whatever is computed."""
    if name == "h200":
        rows = read_rows(name)
    else:
        model = model_shape(name)
        rows = model_rows(model, norms_heads(name, model), [1, 64], 1024, 8192, 256)
    place = Place(torch.device("meta"), torch.bfloat16)
    for row in rows:
        with recording(HOPPER) as launches:
            assert row.case.unsupported(place) is None
            prepared = row.case.prepare(place)
            prepared.op.calls[-1]()
        assert launches, row.case
        hopper = any("hopper" in launch.kernel.fn.__name__ for launch in launches)
        assert hopper == ("hopper" in f"{row.case.op} {row.case.shape}")
