"""The shape of the package: what may import what, what importing costs, and what is shipped."""

from __future__ import annotations

import ast
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
    for path in (SOURCE / "kernels").rglob("*.py"):
        for name, line in imports(path):
            assert name.startswith(("tritonllm.kernels", "tritonllm.errors")), f"{path}:{line} imports {name}"


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
    ],
)
def test_light_imports_leave_the_heavy_packages_out(statement: str) -> None:
    code = (
        f"{statement}\nimport sys\nprint([name for name in ('torch', 'triton', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"


def test_neither_pytest_nor_hypothesis_is_needed_to_test_a_model_family() -> None:
    for path in (SOURCE / "testing").rglob("*.py"):
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


def test_every_public_name_is_there_and_listed() -> None:
    assert sorted(dir(tritonllm)) == sorted(tritonllm.__all__)
    for name in tritonllm.__all__:
        assert getattr(tritonllm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LLMEngin'"):
        tritonllm.LLMEngin  # noqa: B018


def test_types_are_shipped() -> None:
    assert (SOURCE / "py.typed").is_file()
    project = SOURCE.parent.parent / "pyproject.toml"
    assert '"py.typed"' in project.read_text()
