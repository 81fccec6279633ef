"""The shape of the package: what may import what, what importing costs, and what is shipped."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tritonllm

SOURCE = Path(tritonllm.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# Higher layers first; a file imports from its own layer and from those below. What is not named is below all of them.
LAYERS = (
    ("cli", "__main__", "bench", "conformance"),
    ("testing",),
    ("engine",),
    ("parallel", "weights", "registry"),
    ("models",),
    ("kernels",),
)
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}


def imports(path: Path) -> list[tuple[str, int]]:
    """Modules of this package that a file imports, at any depth, with line numbers."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            found.append((node.module or "", node.lineno))
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return [(name, line) for name, line in found if name.split(".")[0] == "tritonllm"]


def level(parts: tuple[str, ...]) -> int:
    return LEVEL.get(parts[0].removesuffix(".py"), len(LAYERS)) if parts else len(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downward(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    if relative.parts == ("__init__.py",):
        return  # its names are imported when first used
    own = level(relative.parts)
    assert [f"line {line}: {name}" for name, line in imports(path) if level(tuple(name.split(".")[1:])) < own] == []


def test_kernels_know_nothing_of_the_rest_but_errors() -> None:
    known = ("tritonllm.kernels", "tritonllm.errors", "tritonllm.lazy_package")
    for path in (SOURCE / "kernels").rglob("*.py"):
        for name, line in imports(path):
            assert name.startswith(known), f"{path}:{line} imports {name}"


def loaded_by(statement: str) -> list[str]:
    """Modules in a fresh process after a statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        "from tritonllm.kernels import *\nfrom tritonllm.kernels.reference import *",
        "from tritonllm.testing.strategies import *",
    ],
)
def test_kernels_and_their_tests_bring_no_engine(statement: str) -> None:
    loaded = loaded_by(statement)
    assert "torch" in loaded
    rest = ("tritonllm.engine", "tritonllm.models", "tritonllm.config", "tritonllm.weights", "transformers")
    assert [name for name in loaded if name.startswith(rest)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 350


@pytest.mark.parametrize(
    "statement",
    [
        "import tritonllm",
        "from tritonllm import SamplingParams, EngineConfig, ModelConfig, ModelSpec, hookimpl",
        "import tritonllm.registry; tritonllm.registry.ModelRegistry([]).specs()",
        "import tritonllm.models",
        "from tritonllm import Scheduler, BlockManager, Sequence",
        "from tritonllm import kernels; dir(kernels), kernels.reference, kernels.row_layout.HEADER",
        "import tritonllm.kernels.reference",
        "import tritonllm.testing",
    ],
)
def test_light_imports_leave_the_heavy_packages_out(statement: str) -> None:
    assert not {"torch", "triton", "transformers"} & set(loaded_by(statement))


def test_neither_pytest_nor_hypothesis_is_needed_to_test_a_model_family() -> None:
    for path in (SOURCE / "testing").rglob("*.py"):
        if path.name == "strategies.py":
            continue  # says what to install
        modules = [
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        ]
        assert not {"pytest", "hypothesis"} & {name.split(".")[0] for name in modules}, path


@pytest.mark.parametrize("package", ["", ".kernels", ".kernels.reference", ".testing"])
def test_every_public_name_is_there_and_listed(package: str) -> None:
    module = importlib.import_module(f"tritonllm{package}")
    assert sorted(dir(module)) == sorted(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None
    with pytest.raises(AttributeError, match=f"module 'tritonllm{package}' has no attribute 'LLMEngin'"):
        module.LLMEngin  # noqa: B018


@pytest.mark.parametrize("package", ["", ".kernels", ".kernels.reference", ".testing"])
def test_type_checkers_see_the_same_names(package: str) -> None:
    module = importlib.import_module(f"tritonllm{package}")
    imported = {
        alias.name: node.module
        for block in ast.parse(Path(module.__file__).read_text()).body
        if isinstance(block, ast.If)
        for node in block.body
        for alias in node.names
    }
    assert imported == module._HOME
    assert list(module._HOME) == [name for name in module.__all__ if name in module._HOME]


def test_a_name_means_the_op_whatever_was_imported_before() -> None:
    code = """
import importlib, sys, types
if sys.argv[1] == "module first":
    import tritonllm.kernels.fused_decode_attention  # brings the module decode_attention
from tritonllm import kernels
from tritonllm.kernels import decode_attention
assert isinstance(decode_attention, types.FunctionType) and kernels.decode_attention is decode_attention
import tritonllm.kernels.longest_first
from tritonllm.kernels.longest_first import FEW_ROWS
assert isinstance(kernels.longest_first, types.FunctionType)
module = importlib.import_module("tritonllm.kernels.decode_attention")
assert isinstance(module, types.ModuleType) and module.decode_attention is decode_attention
from tritonllm.kernels import launch, tuning  # no op has these names
assert isinstance(launch, types.ModuleType) and kernels.launch is launch
"""
    for order in ("module first", "op first"):
        subprocess.run([sys.executable, "-c", code, order], check=True, timeout=120)


def test_types_are_shipped() -> None:
    assert (SOURCE / "py.typed").is_file()
    project = SOURCE.parent.parent / "pyproject.toml"
    assert '"py.typed"' in project.read_text()
