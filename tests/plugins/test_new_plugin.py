"""From `tritonllm plugins new` to tokens: a package of one's own in a clean environment, beside two broken ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]

MISSPELLED = """from tritonllm import hookimpl

@hookimpl
def tritonllm_register_model(register):
    pass
"""

GENERATE = """
def main():
    import json, pathlib, shutil
    import torch
    from tritonllm import LLMEngine, SamplingParams
    from tritonllm.testing import save_tiny_checkpoint
    from tritonllm_exaone4.config import reference

    torch.set_num_threads(1)
    twin = save_tiny_checkpoint(reference(), "exaone4")
    shutil.copytree("exaone4", "tuned")
    config = pathlib.Path("exaone4/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": None}))
    prompt = [5, 6, 7, 8, 9]
    tokens = list(prompt)
    for _ in range(12):
        tokens.append(int(twin(torch.tensor([tokens])).logits[0, -1].argmax()))
    found = []
    for name, world_size in (("exaone4", 1), ("./tuned", 1), ("exaone4", 2), ("./tuned", 2)):
        with LLMEngine(name, world_size=world_size, device="cpu", dtype="float32", max_model_length=64) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            found.append([llm.runner.resolved.spec.name, llm.generate([prompt], greedy)["token_ids"][0]])
    print(json.dumps({"expected": tokens[5:], "found": found}))

if __name__ == "__main__":
    main()
"""
"""One checkpoint is known by its name alone, its copy by its architecture alone."""


class Environment(NamedTuple):
    """Where tritonllm and plugins are installed as packages, and nothing of this repository is in reach."""

    site: Path
    work: Path

    @property
    def checkpoints(self) -> Path:
        """A folder for checkpoints: in the working folder they would be taken for what a command names."""
        folder = self.work / "checkpoints"
        folder.mkdir(exist_ok=True)
        return folder

    def run(self, *args: str, where: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
        """Python of the environment, in its working folder or another."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITONLLM"))}
        python = self.site.parents[2] / "bin" / "python"
        return subprocess.run(
            [python, *args],
            cwd=where or self.work,
            env={**env, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Wheels of tritonllm and of three plugins that `plugins new` began, two of them broken then."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=120)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # What tritonllm depends on is not installed again; an editable tritonllm there stays out of reach.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    project = folder / "project"
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    subprocess.run([*PIP, "--target", site, project], check=True, timeout=300)
    work = folder / "elsewhere"
    work.mkdir()
    made = Environment(site, work)
    names = ("exaone4", "gone", "misspelled")
    for name in names:
        begun = made.run("-m", "tritonllm", "plugins", "new", name)
        assert begun.returncode == 0, begun.stderr
    package = work / "exaone4" / "src" / "tritonllm_exaone4"
    for file in ("model.py", "config.py"):
        shutil.copy(HERE / "exaone4" / file, package)
    (work / "gone" / "src" / "tritonllm_gone" / "plugin.py").write_text("import no_such_package_anywhere\n")
    (work / "misspelled" / "src" / "tritonllm_misspelled" / "plugin.py").write_text(MISSPELLED)
    subprocess.run([*PIP, "--target", site, *(work / name for name in names)], check=True, timeout=300)
    for name in names:
        shutil.rmtree(work / name)
    return made


def test_it_is_the_installed_package_that_runs(environment: Environment) -> None:
    done = environment.run("-c", "import tritonllm, tritonllm_exaone4 as p; print(tritonllm.__file__, p.__file__)")
    ours, theirs = done.stdout.split()
    assert Path(ours).is_relative_to(environment.site)
    assert Path(theirs).is_relative_to(environment.site)


def test_the_model_takes_few_lines_and_its_architecture_is_new() -> None:
    from tritonllm.models import BUILTIN_SPECS

    assert len((HERE / "exaone4" / "model.py").read_text().splitlines()) <= 80
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
    (environment.checkpoints / "generate.py").write_text(GENERATE)
    done = environment.run("generate.py", where=environment.checkpoints)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(set(result["expected"])) > 3
    assert result["found"] == [["exaone4", result["expected"]]] * 4

    config = environment.checkpoints / "tuned" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["NobodysForCausalLM"]}))
    failed = environment.run("-m", "tritonllm", "generate", "checkpoints/tuned", "Hello")
    assert failed.returncode == 1
    (error,) = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
    assert "No model serves checkpoint 'tuned' (architectures: NobodysForCausalLM)" in error
    assert "Plugin 'gone' of tritonllm-gone 0.1.0 failed: ModuleNotFoundError" in error
    assert "Plugin 'misspelled' of tritonllm-misspelled 0.1.0 failed" in error


def test_the_kit_passes_on_it(environment: Environment) -> None:
    kit = ["-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "tritonllm.conformance"]
    done = environment.run(*kit, "--tritonllm-model", "exaone4", "-v")
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
