"""A plugin's package to begin with: the files of `plugin_template/` with the names filled in."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from tritonllm import __version__
from tritonllm.errors import PluginError
from tritonllm.plugin_discovery import OWN_DISTRIBUTION, canonical_name

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_.][A-Za-z0-9]+)*")
_PREFIX = "tritonllm-"


def class_prefix(name: str) -> str:
    """ "Lantern" for "lantern": what comes before "ForCausalLM" in the family's architecture.

    Raises:
        PluginError: no package can have that name.
    """
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"A plugin cannot be called {name!r}: give letters and digits, with single dashes, dots or underscores "
            "between them, beginning with a letter."
        )
    words = re.split(r"[-_.]", name.removeprefix(_PREFIX))
    return "".join(word[0].upper() + word[1:] for word in words)


def plugin_files(name: str) -> dict[str, str]:
    """Path and text of each file of a new plugin.

    Args:
        name: of the entry point and the spec. The distribution is called "tritonllm-" and the name.

    Raises:
        PluginError: no package can have that name.
    """
    cls = class_prefix(name)
    distribution = _PREFIX + name.removeprefix(_PREFIX)
    if canonical_name(distribution) == OWN_DISTRIBUTION or canonical_name(name) == "tritonllm":
        raise PluginError(f"A plugin cannot be called {name!r}: that is this engine's own name; choose another.")
    package = re.sub(r"[-_.]", "_", distribution).lower()
    names = {"name": name, "cls": cls, "distribution": distribution, "package": package, "version": __version__}
    return {
        path.replace("package/", f"src/{package}/"): Template(text).substitute(names)
        for path, text in _template_files(resources.files("tritonllm") / "plugin_template")
    }


def write_plugin(name: str, parent: Path) -> Path:
    """Write a new plugin into a folder of its name, and return the folder.

    Raises:
        PluginError: no package can have that name, or there is something of that name already.
    """
    files = plugin_files(name)
    folder = parent / name
    if folder.exists():
        raise PluginError(f"{folder} exists already: choose another name, or another folder to work in.")
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder


def _template_files(folder: Traversable, prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir():
            found += _template_files(item, f"{prefix}{item.name}/")
        else:
            # They end in .txt, or tools would take them for modules of this package.
            found.append((prefix + item.name.removesuffix(".txt"), item.read_text(encoding="utf-8")))
    return found
