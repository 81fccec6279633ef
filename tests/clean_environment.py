"""A clean environment with tritonllm, a package that `tritonllm plugins new` began, and two that are broken.

Everything is built into wheels and installed by pip, offline.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
OVERLAY = TESTS / "plugins" / "exaone4"
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
SETUPTOOLS = 77
"""What pyproject.toml asks for, ours and that of new plugins; without build isolation it must be there."""

MISSPELLED = """from tritonllm import hookimpl

@hookimpl
def tritonllm_register_model(register):
    pass
"""

GENERATE = """
def main():
    import json, pathlib, shutil, sys
    import torch
    from tritonllm import LLMEngine, SamplingParams
    from tritonllm.testing import save_tiny_checkpoint
    from tritonllm_exaone4.config import reference

    device, *world_sizes = sys.argv[1:]
    torch.set_num_threads(1)
    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=256, sliding_window=16, sliding_window_pattern=2)
    twin = save_tiny_checkpoint(type(reference())(**sizes), "exaone4")
    shutil.copytree("exaone4", "tuned", dirs_exist_ok=True)
    config = pathlib.Path("exaone4/config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": None}))
    prompt = list(range(5, 45))
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(16):
            tokens.append(int(twin(torch.tensor([tokens])).logits[0, -1].argmax()))
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    keys = dict(device=device, dtype="float32", block_size=16, max_model_length=64, max_num_sequences=1,
                max_num_batched_tokens=64, max_cached_blocks=4)
    found = []
    for world_size in map(int, world_sizes):
        for name in ("exaone4", "./tuned"):
            with LLMEngine(name, world_size=world_size, **keys) as llm:
                ours = llm.generate([prompt], greedy)["token_ids"][0]
                where = next(llm.runner.model.parameters()).device.type
                found.append([llm.runner.resolved.spec.name, where, ours])
    print(json.dumps({"expected": tokens[40:], "found": found}))

if __name__ == "__main__":
    main()
"""
"""One checkpoint is known by its name alone, its copy by its architecture alone; heads of 64, a window in every other
layer that the prompt outgrows. Arguments: the device and world sizes."""


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

    def generate(self, device: str, *world_sizes: int) -> subprocess.CompletedProcess:
        """`GENERATE`, among the checkpoints."""
        (self.checkpoints / "generate.py").write_text(GENERATE)
        return self.run("generate.py", device, *map(str, world_sizes), where=self.checkpoints)

    def check(self, device: str) -> subprocess.CompletedProcess:
        """The conformance kit on the package, in pytest."""
        kit = ["-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "tritonllm.conformance"]
        return self.run(*kit, "--tritonllm-model", "exaone4", "--tritonllm-device", device, "-v")


def what_is_missing() -> str | None:
    """Why no wheel can be built here without a network, or None."""
    if importlib.util.find_spec("pip") is None:
        return "pip is not installed"
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version == "none" or int(version.partition(".")[0]) < SETUPTOOLS:
        return f"wheels are built by setuptools {SETUPTOOLS} or later, and {version} is installed"
    return None


def make_environment(folder: Path) -> Environment:
    """Wheels of tritonllm and of three plugins that `plugins new` began, two of them broken then, in a new venv."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=120)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    # What tritonllm depends on is not installed again; an editable tritonllm there stays out of reach.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    project = folder / "project"
    root = TESTS.parent
    shutil.copytree(root / "src", project / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, project)
    subprocess.run([*PIP, "--target", site, project], check=True, timeout=300)
    work = folder / "elsewhere"
    work.mkdir()
    made = Environment(site, work)
    names = ("exaone4", "gone", "misspelled")
    for name in names:
        begun = made.run("-m", "tritonllm", "plugins", "new", name)
        assert begun.returncode == 0, begun.stderr
    for file in OVERLAY.glob("*.py"):
        shutil.copy(file, work / "exaone4" / "src" / "tritonllm_exaone4")
    (work / "gone" / "src" / "tritonllm_gone" / "plugin.py").write_text("import no_such_package_anywhere\n")
    (work / "misspelled" / "src" / "tritonllm_misspelled" / "plugin.py").write_text(MISSPELLED)
    subprocess.run([*PIP, "--target", site, *(work / name for name in names)], check=True, timeout=300)
    for name in names:
        shutil.rmtree(work / name)
    return made
