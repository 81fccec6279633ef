"""docs/testing.md answers reported faults with tests: each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "testing.md").read_text(encoding="utf-8")
ANSWERS = PAGE.split("\n## Faults that other engines had\n")[1]
NAMED = sorted(set(re.findall(r"`(\w+/test_\w+\.py::[\w:]+)`", ANSWERS)))
ROWS = [row for row in re.findall(r"^\| (.*) \|$", ANSWERS, re.MULTILINE) if not row.startswith(("What is", "---"))]


def names_in(file: Path) -> set[str]:
    """`test_name` and `Class::test_name` of a file; a name that is assigned, too."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("named", NAMED)
def test_a_test_that_is_named_exists(named: str) -> None:
    file, _, name = named.partition("::")
    assert name in names_in(TESTS / file)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split(" | ")[0])
def test_every_fault_has_an_answer(row: str) -> None:
    """A test, why it cannot occur, or what brings the test."""
    _, sources, answer = (cell.strip() for cell in row.split(" |"))
    assert all(re.fullmatch(r"(?:[\w.-]+/[\w.-]+)?#\d+", source) for source in filter(None, sources.split(", ")))
    assert re.search(r"::test_|::Test|[Cc]ome?s? with|Cannot occur|with sliding windows|No server yet", answer)


def test_the_table_is_the_whole_of_it() -> None:
    assert len(ROWS) >= 58
    assert len(NAMED) >= 100
