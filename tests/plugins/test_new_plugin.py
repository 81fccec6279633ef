"""From `tritonllm plugins new` to tokens: a package of one's own in a clean environment, beside two broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clean_environment import OVERLAY, Environment, make_environment


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("clean"))


def test_it_is_the_installed_package_that_runs(environment: Environment) -> None:
    done = environment.run("-c", "import tritonllm, tritonllm_exaone4 as p; print(tritonllm.__file__, p.__file__)")
    ours, theirs = done.stdout.split()
    assert Path(ours).is_relative_to(environment.site)
    assert Path(theirs).is_relative_to(environment.site)


def test_the_model_takes_few_lines_and_its_architecture_is_new() -> None:
    from tritonllm.models import BUILTIN_SPECS

    assert len((OVERLAY / "model.py").read_text().splitlines()) <= 80
    assert "Exaone4ForCausalLM" not in {name for spec in BUILTIN_SPECS for name in spec.architectures}


def test_the_list_names_the_good_one_and_what_is_wrong_with_the_others(environment: Environment) -> None:
    done = environment.run("-m", "tritonllm", "plugins", "--json")
    assert (done.returncode, done.stderr) == (1, "")
    listed = {plugin["name"]: plugin for plugin in json.loads(done.stdout)}
    assert listed.keys() == {"exaone4", "gone", "misspelled"}
    good = listed["exaone4"]
    assert (good["distribution"], good["version"], good["error"]) == ("tritonllm-exaone4", "0.1.0", None)
    assert (good["checkpoints"], good["architectures"]) == (["exaone4"], ["Exaone4ForCausalLM"])
    assert listed["gone"]["distribution"] == "tritonllm-gone"
    assert "no_such_package_anywhere" in listed["gone"]["error"]
    assert "tritonllm_register_model" in listed["misspelled"]["error"]
    text = environment.run("-m", "tritonllm", "plugins").stdout
    for part in ("from tritonllm-gone 0.1.0", "no_such_package_anywhere", "from tritonllm-misspelled 0.1.0"):
        assert part in text


def test_it_generates_by_name_and_by_architecture_on_one_rank_and_on_two(environment: Environment) -> None:
    done = environment.generate("cpu", 1, 2)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(set(result["expected"])) > 3
    assert result["found"] == [["exaone4", "cpu", result["expected"]]] * 4

    config = environment.checkpoints / "tuned" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["NobodysForCausalLM"]}))
    failed = environment.run("-m", "tritonllm", "generate", "checkpoints/tuned", "Hello")
    assert failed.returncode == 1
    (error,) = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
    assert "No model serves checkpoint 'tuned' (architectures: NobodysForCausalLM)" in error
    assert "Plugin 'gone' of tritonllm-gone 0.1.0 failed: ModuleNotFoundError" in error
    assert "Plugin 'misspelled' of tritonllm-misspelled 0.1.0 failed" in error


def test_the_kit_passes_on_it(environment: Environment) -> None:
    done = environment.check("auto")
    assert done.returncode == 0, done.stdout
    assert "[exaone4-two ranks] PASSED" in done.stdout
    assert "10 passed" in done.stdout


PLANTED = {
    "wrong epsilon": (
        "model.py",
        "        for kind, layer in zip(",
        "        self.model.layers[0].post_attention_layernorm.eps = 1e-5\n        for kind, layer in zip(",
        "layer 0 (`model.layers.0`) is the first whose output differs",
        "`self_attn` agrees, `post_attention_layernorm` differs first; look at its epsilon",
    ),
    "missing norms of heads": (
        "model.py",
        "qk_norm = True",
        "qk_norm = False",
        "unexpected (4): model.layers.0.self_attn.k_norm.weight, model.layers.0.self_attn.q_norm.weight",
        "1 failed, 9 skipped",
    ),
    "gate and up swapped": (
        "model.py",
        "    layer_class = Exaone4Layer",
        "    layer_class = Exaone4Layer\n    packed = {**DecoderLM.packed, 'gate_proj': ('gate_up_proj', 'up'), "
        "'up_proj': ('gate_up_proj', 'gate')}",
        "layer 0 (`model.layers.0`) is the first whose output differs",
        "`mlp` differs first; look at the order of gate and up in `packed`",
    ),
    "rotary base ignored": (
        "config.py",
        "    return read_hf_config(config,",
        "    rope = {**config['rope_parameters'], 'rope_theta': 10000.0}\n"
        "    return read_hf_config({**config, 'rope_parameters': rope},",
        "layer 0 (`model.layers.0`) is the first whose output differs",
        "`self_attn` differs first; the first token, which attends to itself alone, agrees: look at",
    ),
    "window off by one": (
        "config.py",
        "    return read_hf_config(config,",
        "    return read_hf_config({**config, 'sliding_window': config['sliding_window'] - 1},",
        "layer 0 (`model.layers.0`) is the first whose output differs",
        "`self_attn` differs first; the tokens before position 15 agree: look at the sliding window",
    ),
}
"""File, its text, what stands there instead, and what the kit says."""


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_the_kit_finds_a_planted_bug_and_names_the_layer(environment: Environment, bug: str) -> None:
    file, right, wrong, *words = PLANTED[bug]
    module = environment.site / "tritonllm_exaone4" / file
    before = module.read_text()
    assert before.count(right) == 1
    module.write_text(before.replace(right, wrong))
    try:
        done = environment.run("-m", "tritonllm", "plugins", "check", "exaone4", PYTHONDONTWRITEBYTECODE="1")
    finally:
        module.write_text(before)
    assert done.returncode == 1, done.stdout
    for part in words:
        assert part in done.stdout, done.stdout
