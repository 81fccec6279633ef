"""README and docs say what the code does: examples run, tables are complete, names and paths exist."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import inspect
import io
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import tritonllm
from tritonllm import (
    EngineConfig,
    ModelConfig,
    ModelSpec,
    SamplingParams,
    conformance,
    hookspecs,
    kernels,
    plugin_discovery,
)
from tritonllm.cli import main
from tritonllm.config.engine import ARCHITECTURE_KEYS
from tritonllm.conformance.candidate import LONGEST
from tritonllm.conformance.checks import CHECKS
from tritonllm.models import decoder, layers
from tritonllm.plugin_scaffold import plugin_files, write_plugin
from tritonllm.testing import save_tiny_checkpoint, tiny_hf_config

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tritonllm"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGED_MODEL = "SmolLM2-135M-Instruct"


class Block(NamedTuple):
    """A fenced block: its language, its text, and the comment in the line above it."""

    page: str
    language: str
    code: str
    comment: str


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks() -> Iterator[Block]:
    fence = re.compile(r"(?:<!-- ([^\n]*) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)
    for page in PAGES:
        for match in fence.finditer(page.read_text(encoding="utf-8")):
            yield Block(page.name, match[2], match[3], match[1] or "")


def named(selected: list[Block]) -> list[Any]:
    return [pytest.param(block, id=f"{block.page}-{index}") for index, block in enumerate(selected)]


INCLUDED = [block for block in blocks() if block.comment.startswith("from: ")]
TEMPLATE = [block for block in blocks() if block.comment.startswith("from template: ")]
EXAMPLES = [block for block in blocks() if block.language == "python" and not block.comment]
NOT_RUN_THERE = [block for block in blocks() if block.comment.startswith("not run here: ")]
COMMANDS = [line for block in blocks() if block.language == "sh" for line in block.code.splitlines() if line]


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny random Llama with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("docs") / "tiny"
    save_tiny_checkpoint(tiny_hf_config("llama"), folder)
    return str(folder)


@pytest.fixture
def lantern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the tutorial's plugin, whose package can be imported."""
    folder = write_plugin("lantern", tmp_path)
    monkeypatch.syspath_prepend(folder / "src")
    yield folder
    for name in [name for name in sys.modules if name.startswith("tritonllm_lantern")]:
        del sys.modules[name]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small spend their time waiting for threads, not computing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
class TestExamples:
    def test_there_are_examples(self) -> None:
        assert len(EXAMPLES) >= 6
        assert len(INCLUDED) >= 2
        assert len(TEMPLATE) >= 4
        assert {block.language for block in blocks()} == {"python", "sh", "toml"}
        comments = {block.comment.partition(":")[0] for block in blocks() if block.comment}
        assert comments == {"from", "from template", "not run here"}

    @pytest.mark.parametrize("block", named(EXAMPLES))
    def test_python_runs(self, block: Block, tiny_checkpoint: str) -> None:
        # A checkpoint of the same form in place of the packaged one, which takes a while to load.
        code = block.code.replace(PACKAGED_MODEL, tiny_checkpoint)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, block.page, "exec", dont_inherit=True), {"__name__": "example"})
        assert bool(printed.getvalue()) == ("print(" in code)

    @pytest.mark.parametrize("block", named(INCLUDED))
    def test_an_included_file_is_the_file(self, block: Block) -> None:
        assert block.code == read(block.comment.removeprefix("from: "))

    @pytest.mark.parametrize("block", named(TEMPLATE))
    def test_a_file_of_the_template_is_what_plugins_new_writes(self, block: Block) -> None:
        assert block.code == plugin_files("lantern")[block.comment.removeprefix("from template: ")]

    def test_the_plugin_of_the_tutorial_is_done(self, lantern: Path) -> None:
        (block,) = [block for block in NOT_RUN_THERE if block.page == "plugins.md" and "check(SPEC)" in block.code]
        exec(compile(block.code, block.page, "exec"), {"__name__": "example"})

    def test_the_failure_that_the_tutorial_shows_is_what_the_kit_says(self, lantern: Path) -> None:
        config = lantern / "src" / "tritonllm_lantern" / "config.py"
        line = "    return read_hf_config(config,"
        ignoring = "    config = {**config, 'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0}}\n"
        config.write_text(config.read_text().replace(line, ignoring + line))
        with pytest.raises(AssertionError) as failed:
            conformance.check(importlib.import_module("tritonllm_lantern.plugin").SPEC, device="cpu")
        shown = " ".join(re.findall(r"^> (.*)$", read("docs/plugins.md"), re.MULTILINE))
        numbers = r"\d+(?:\.\d+)?"
        assert re.sub(numbers, "#", shown) == re.sub(numbers, "#", f"lantern, layers: {failed.value}")

    def test_the_checks_of_the_kit_stand_in_the_tutorial(self) -> None:
        after = read("docs/plugins.md").split("## You are done when this passes")[1].split("\n## ")[0]
        assert re.findall(r"^\| `([^`]+)` \|", after, re.MULTILINE) == list(CHECKS)
        assert f"It needs {LONGEST} positions" in " ".join(read("docs/plugins.md").split())

    def test_the_readme_dict_has_every_key(self) -> None:
        (block,) = [block for block in EXAMPLES if block.page == "README.md" and "config = {" in block.code]
        keys = re.findall(r'^    "(\w+)":', block.code, re.MULTILINE)
        assert sorted(keys) == sorted(field.name for field in dataclasses.fields(EngineConfig))


class TestCommands:
    @pytest.mark.parametrize("line", [line for line in COMMANDS if "tritonllm " in line and "-m " not in line])
    def test_every_option_of_the_command_line_exists(self, line: str, capsys: pytest.CaptureFixture[str]) -> None:
        words = shlex.split(line.split("| ")[-1], comments=True)
        assert words[0] == "tritonllm"
        groups = ("bench", "kernels", "plugins")
        command = words[1:3] if words[1] in groups and words[2:] and words[2][0] != "-" else words[1:2]
        with pytest.raises(SystemExit) as left:
            main([*command, "--help"])
        assert left.value.code == 0
        shown = set(re.findall(r"--?[\w-]+", capsys.readouterr().out))
        assert {word for word in words[2:] if word.startswith("-")} <= shown

    def test_make_targets_exist(self) -> None:
        makefile = read("Makefile")
        wanted = {shlex.split(line, comments=True)[1] for line in COMMANDS if line.startswith("make ")}
        wanted |= {name for page in PAGES for name in re.findall(r"`make ([\w-]+)`", page.read_text("utf-8"))}
        assert {"demo", "test", "gpu"} <= wanted
        assert wanted <= set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))

    def test_the_demo_is_the_one_in_the_readme(self) -> None:
        (demo,) = re.findall(r"tritonllm (generate .*)", read("Makefile"))
        assert f"tritonllm {demo}" in COMMANDS

    def test_paths_and_modules_of_commands_exist(self) -> None:
        for line in COMMANDS:
            for path in re.findall(r"\btests/[\w/.-]+", line):
                assert (ROOT / path).exists(), line
            for module in re.findall(r"-m (tritonllm[\w.]+)", line):
                assert importlib.util.find_spec(module), line


class TestReferences:
    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_links_lead_to_files(self, page: Path) -> None:
        for target in re.findall(r"\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("https://"):
                assert (page.parent / target).exists(), target

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_paths_in_backticks_exist(self, page: Path) -> None:
        for path in re.findall(r"`([\w./-]+/[\w./-]*)`", page.read_text(encoding="utf-8")):
            if not re.match(r"[A-Z]", path):  # a hub id
                homes = (ROOT, PACKAGE, ROOT / "tests", ROOT / "docs")
                assert any((home / path).exists() for home in homes), path

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
    def test_our_dotted_names_exist(self, page: Path) -> None:
        for name in re.findall(r"`(tritonllm(?:\.\w+)+)`", page.read_text(encoding="utf-8")):
            find(name)


def find(dotted: str) -> Any:
    """A module, or a name in one."""
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(importlib.import_module(module), name)


def rows(page: str, heading: str) -> dict[str, str]:
    """The rows `name -> default` of the tables below a heading, up to the next heading of that level or above."""
    level = heading.index(" ")
    after = read(page).split(f"\n{heading}\n", 1)[1]
    section = re.split(rf"\n#{{1,{level}}} ", after)[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))


def defaults(cls: Any) -> dict[str, str]:
    """`name -> default` as the tables write it."""
    return {
        field.name: "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
        for field in dataclasses.fields(cls)
    }


class TestConfiguration:
    def test_every_key_of_the_engine_with_its_default(self) -> None:
        assert rows("docs/configuration.md", "## The engine") == defaults(EngineConfig)

    def test_architecture_keys_stand_apart(self) -> None:
        second_table = read("docs/configuration.md").split("These describe the architecture.")[1].split("###")[0]
        assert re.findall(r"^\| `(\w+)`", second_table, re.MULTILINE) == list(ARCHITECTURE_KEYS)

    def test_every_sampling_parameter_with_its_default(self) -> None:
        assert rows("docs/configuration.md", "## Sampling") == defaults(SamplingParams)

    def test_environment_variables_that_the_source_reads(self) -> None:
        source = "".join(file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py"))
        variables = set(re.findall(r'environ(?:\.get)?[\[(]"(\w+)"', source)) | {plugin_discovery.PLUGINS_VARIABLE}
        documented = set(re.findall(r"`([A-Z][A-Z_]+)`", read("docs/configuration.md")))
        assert variables <= documented


class TestPlugins:
    def test_every_hook_with_exactly_its_parameters(self) -> None:
        hooks = {
            name: f"{name}({', '.join(inspect.signature(function).parameters)})"
            for name, function in inspect.getmembers(hookspecs, inspect.isfunction)
            if name.startswith("tritonllm_")
        }
        documented = re.findall(r"^#### `(.*)`$", read("docs/plugins.md"), re.MULTILINE)
        assert sorted(documented) == sorted(hooks.values())

    def test_every_field_of_a_spec_with_its_default(self) -> None:
        assert rows("docs/plugins.md", "### `ModelSpec`") == defaults(ModelSpec)

    def test_every_field_of_a_model_with_its_default(self) -> None:
        assert rows("docs/plugins.md", "### `ModelConfig`") == defaults(ModelConfig)

    def test_every_layer_with_exactly_its_parameters(self) -> None:
        public = {name: getattr(layers, name) for name in layers.__all__}
        expected = {
            name + untyped(layer)
            for name, layer in public.items()
            if isinstance(layer, type) and issubclass(layer, torch.nn.Module)
        }
        documented = re.findall(r"^##### `(\w+\(.*\))`$", read("docs/plugins.md"), re.MULTILINE)
        assert len(expected) >= 10
        assert sorted(documented) == sorted(expected)
        for heading in documented:
            after = read("docs/plugins.md").split(f"\n##### `{heading}`\n", 1)[1]
            section = re.split(r"\n##+ ", after)[0]
            layer = public[heading.partition("(")[0]]
            parameters = re.findall(r"^\| `(\w+)` \| \S", section, re.MULTILINE)
            assert parameters == list(inspect.signature(layer).parameters), heading

    def test_the_attributes_of_a_decoder_layer_with_their_defaults(self) -> None:
        section = read("docs/plugins.md").split("\n### The decoder\n", 1)[1].split("\n### ", 1)[0]
        attributes = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section, re.MULTILINE))
        assert attributes == {name: repr(getattr(decoder.DecoderLayer, name)) for name in ("qk_norm", "stacked")}
        norms = dict(re.findall(r"^\| `(\w+Layer)` \| (.*?) \|", section, re.MULTILINE))
        kinds = (decoder.DecoderLayer, decoder.SandwichNormLayer, decoder.PostNormLayer)
        assert {name: tuple(re.findall(r"`(\w+)`", text)) for name, text in norms.items()} == {
            kind.__name__: kind.norms for kind in kinds
        }

    def test_built_in_families_stand_in_the_readme(self) -> None:
        from tritonllm.models import BUILTIN_SPECS

        table = dict(re.findall(r"^\| (\w+) \| `(\w+)` \|", read("README.md"), re.MULTILINE))
        assert table == {spec.name: spec.architectures[0] for spec in BUILTIN_SPECS}


class TestArchitecture:
    def test_every_module_has_its_line(self) -> None:
        modules = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py")}
        modules = {module for module in modules if not module.endswith("__init__.py")}
        listed = re.findall(r"^\| `([\w/]+\.py)` \|", read("docs/architecture.md"), re.MULTILINE)
        assert sorted(listed) == sorted(modules)

    def test_the_way_of_a_request_has_ten_stations_that_exist(self) -> None:
        stations = re.findall(r"^\d+\. `([\w.]+)`", read("docs/architecture.md"), re.MULTILINE)
        assert len(stations) == 10
        homes: dict[str, Any] = {}
        for module in modules_of("tritonllm.engine", "tritonllm.models"):
            homes |= vars(module)
        for station in stations:
            first, *attributes = station.split(".")
            found = homes[first]
            for attribute in attributes:
                found = getattr(found, attribute)
            assert callable(found)


class TestKernels:
    def test_every_module_is_mentioned(self) -> None:
        page = read("docs/kernels.md")
        for file in (PACKAGE / "kernels").glob("*.py"):
            assert file.name == "__init__.py" or f"`{file.name}`" in page, file.name

    def test_every_op_with_a_plan_is_listed(self) -> None:
        listed = set()
        row = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| `(\w+)\.py` \|", re.MULTILINE)
        for ops, file in row.findall(read("docs/kernels.md")):
            module = importlib.import_module(f"tritonllm.kernels.{file}")
            for op in re.findall(r"`(\w+)`", ops):
                assert callable(getattr(module, op))
                listed.add((file, op))
        ops_with_plan = {
            (module.__name__.rpartition(".")[2], name.removeprefix("plan_"))
            for module in modules_of("tritonllm.kernels")
            for name, value in vars(module).items()
            if name.startswith("plan_") and value.__module__ == module.__name__ and hasattr(module, name[5:])
        }
        assert ops_with_plan <= listed
        assert {op for _, op in listed} == set(kernels.reference.__all__)

    def test_every_op_with_exactly_its_parameters(self) -> None:
        documented = re.findall(r"^### `(\w+\(.*\))`$", read("docs/kernels.md"), re.MULTILINE)
        assert sorted(documented) == sorted(name + bare_signature(name) for name in kernels.reference.__all__)

    @pytest.mark.parametrize("name", kernels.reference.__all__)
    def test_an_op_is_described_whole(self, name: str) -> None:
        after = read("docs/kernels.md").split(f"\n### `{name}(", 1)[1]
        section = re.split(r"\n##+ ", after)[0]
        parameters = re.findall(r"^\| `(\w+)` \| \S", section, re.MULTILINE)
        assert parameters == list(inspect.signature(getattr(kernels, name)).parameters)
        points = re.findall(r"^- \*\*(\w+)\*\*", section, re.MULTILINE)
        assert points == ["Returns", "Rounding", "Targets", "Errors", "Reference"]
        assert f"`reference.{name}`" in section
        assert ("Hopper only" in section) == name.startswith("hopper_")

    def test_of_every_op_the_idea_the_numbers_the_limits_and_what_lost(self) -> None:
        after = read("docs/kernels.md").split("\n## What is known of each kernel\n", 1)[1].split("\n## ")[0]
        sections = [section for section in after.split("\n### ")[1:] if not section.startswith("Registers on RDNA\n")]
        for section in sections:
            points = re.findall(r"^- \*\*([\w ]+)\*\*: \S", section, re.MULTILINE)
            assert points == ["Idea", "Numbers", "Limits", "Tried and lost"], section.splitlines()[0]
        headings = " ".join(section.splitlines()[0] for section in sections)
        assert set(kernels.reference.__all__) == set(re.findall(r"`(\w+)`", headings))

    def test_what_stands_for_another_op_s_parameter_names_one(self) -> None:
        page = read("docs/kernels.md")
        for parameter, op in re.findall(r"^\| `(\w+)` \| .*?As in `(\w+)`", page, re.MULTILINE):
            assert parameter in inspect.signature(getattr(kernels, op)).parameters, (parameter, op)


def bare_signature(op: str) -> str:
    """That of an op without types."""
    return untyped(getattr(kernels, op))


def untyped(function: Any) -> str:
    """`(x, *, bias=None)`: a signature without types."""
    signature = inspect.signature(function)
    untyped = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(untyped))


def modules_of(*packages: str) -> Iterator[ModuleType]:
    for package in map(importlib.import_module, packages):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(info.name)


class TestDocstrings:
    def test_every_public_name_has_one(self) -> None:
        for name in tritonllm.__all__:
            value = getattr(tritonllm, name)
            if isinstance(value, type) or inspect.isroutine(value):
                assert inspect.getdoc(value), name

    def test_every_public_function_and_class_has_one(self) -> None:
        bare = [module.__name__ for module in modules_of("tritonllm") if not module.__doc__]
        for module in modules_of("tritonllm"):
            for name, value in vars(module).items():
                # A script's `main` is described by its module, a hook by its specification.
                public = not name.startswith(("_", "tritonllm_")) and name != "main"
                ours = getattr(value, "__module__", None) == module.__name__
                if public and ours and (inspect.isfunction(value) or inspect.isclass(value)) and not value.__doc__:
                    bare.append(f"{module.__name__}.{name}")
        assert bare == []

    def test_every_public_method_of_the_engine_has_one(self) -> None:
        for cls in (tritonllm.LLMEngine, tritonllm.ModelRunner, tritonllm.Scheduler, tritonllm.BlockManager):
            for name, value in vars(cls).items():
                if inspect.isfunction(value) and not name.startswith("_"):
                    assert value.__doc__, f"{cls.__name__}.{name}"


def test_the_changelog_begins_with_what_is_not_released() -> None:
    headings = re.findall(r"^## (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"


@pytest.mark.parametrize(("page", "name"), [("README.md", "status"), ("docs/performance.md", "results")])
def test_sections_that_are_filled_in_by_hand_are_marked(page: str, name: str) -> None:
    assert len(re.findall(rf"<!-- {name}: begin -->.*?<!-- {name}: end -->", read(page), re.DOTALL)) == 1
