"""`python -m tritonllm.bench.collectives` as far as it goes without GPUs: its options, its table."""

from __future__ import annotations

import pytest
import torch

from tritonllm.bench.collectives import parse, row_of_table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "--ranks 1 has nothing to add up; give 2 or more"),
        (["--rows", "1,x"], "--rows '1,x' must be numbers"),
        (["--hidden", "8k"], "--hidden '8k' must be numbers"),
    ],
)
def test_bad_options_end_with_a_sentence(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as left:
        parse(arguments)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_it_needs_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = parse(["--rows", "1,8"])
    assert (options.ranks, options.rows, options.hidden) == (2, [1, 8], [4096, 8192])
    with pytest.raises(SystemExit) as left:
        parse(["--ranks", "3"])
    assert left.value.code == 1
    assert "needs 3 CUDA devices, and torch sees 2" in capsys.readouterr().err


def test_a_line_shows_what_there_is() -> None:
    line = {"rows": 128, "hidden": 4096, "bytes": 2**20, "nccl": 20.0, "nccl_norm": 23.456, "two_shot": 12.0}
    line |= {"one_shot": None, "one_shot_norm": None, "two_shot_norm": 13.0, "auto": "two_shot"}
    assert " ".join(row_of_table(line).split()) == "4096 128 1024 20.00 - 12.00 23.46 - 13.00 two_shot"
