"""What an engine needs of a machine, looked at piece by piece; nothing here raises because something is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, NOTE, PROBLEM = "ok", "note", "problem"
_GIB = 1 << 30
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: "torch", "compiler", ...
        status: "ok"; "note", if something is slower or missing that not everybody needs; or "problem".
        detail: what there is.
        fix: what to do about it, "" where nothing is to be done.
    """

    what: str
    status: str
    detail: str
    fix: str = ""


def examine() -> Iterator[Finding]:
    """Look at everything, in the order in which it is needed."""
    for look in (_python, _torch, _triton, _driver, _gpu, _compiler, _cache, _interpreter, _plugins):
        yield from look()


def _python() -> Iterator[Finding]:
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    if platform.system() != "Linux":
        yield Finding("python", PROBLEM, detail, "Triton has no packages for this system: use Linux.")
    else:
        yield Finding("python", OK, detail)


def _torch() -> Iterator[Finding]:
    torch, reason = _imported("torch")
    if torch is None:
        yield Finding("torch", PROBLEM, reason, "Install it: pip install torch.")
        return
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"built for CUDA {cuda}" if cuda else f"built for ROCm {hip}" if hip else "built for CPUs only"
    detail = f"{torch.__version__}, {build}"
    if not cuda and not hip and _driver_version():
        yield Finding("torch", PROBLEM, f"{detail}, beside an NVIDIA driver", "Install a CUDA build of torch.")
    else:
        yield Finding("torch", OK, detail)


def _triton() -> Iterator[Finding]:
    triton, reason = _imported("triton")
    if triton is None:
        yield Finding("triton", PROBLEM, reason, "Install it: pip install 'triton>=3.6'.")
        return
    version = triton.__version__
    wanted = _required("torch", "triton")
    if _numbers(version) < (3, 6):
        yield Finding("triton", PROBLEM, version, "The kernels need 3.6 or newer: pip install -U 'triton>=3.6'.")
    elif wanted is not None and _numbers(wanted) != _numbers(version):
        fix = f"If kernels fail to compile, go back: pip install 'triton=={wanted}'."
        yield Finding("triton", NOTE, f"{version}; torch was built with {wanted}", fix)
    else:
        yield Finding("triton", OK, version)


def _driver() -> Iterator[Finding]:
    version = _driver_version()
    if version:
        yield Finding("driver", OK, f"NVIDIA {version}")
    elif shutil.which("nvidia-smi"):
        yield Finding(
            "driver", PROBLEM, "nvidia-smi is here, the kernel driver is not", "Load or install the driver; reboot."
        )
    else:
        yield Finding("driver", NOTE, "no NVIDIA driver", "A machine without a GPU needs none.")


def _gpu() -> Iterator[Finding]:
    torch, _ = _imported("torch")
    if torch is None or not torch.cuda.is_available():
        built = torch is not None and (torch.version.cuda or getattr(torch.version, "hip", None))
        if built and _driver_version():
            fix = "Let this user and container see /dev/nvidia*, look at CUDA_VISIBLE_DEVICES, update an old driver."
            yield Finding("gpu", PROBLEM, "there is a driver, and torch sees no device", fix)
        else:
            yield Finding("gpu", NOTE, "none: PyTorch references run on the CPU, slowly", "Use a machine with a GPU.")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        detail = f"{index}: {device.name}, sm_{device.major}{device.minor}, {device.total_memory / _GIB:.0f} GiB"
        if (device.major, device.minor) < (8, 0) and not getattr(torch.version, "hip", None):
            yield Finding("gpu", PROBLEM, detail, "The kernels are made for sm_80 and newer.")
        else:
            yield Finding("gpu", OK, detail)


def _compiler() -> Iterator[Finding]:
    """Triton builds a small C module when it first launches a kernel."""
    needed = PROBLEM if _driver_version() else NOTE
    asked = os.environ.get("CC")
    found = shutil.which(asked) if asked else next(filter(None, map(shutil.which, ("clang", "gcc", "cc"))), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if found is None and asked:
        yield Finding("compiler", needed, f"CC={asked} is no program", "Unset CC, or let it name a C compiler.")
    elif found is None:
        fix = "Install one: apt-get install gcc (Triton builds its launcher with it)."
        yield Finding("compiler", needed, "no C compiler", fix)
    elif not header.is_file():
        fix = f"Install the headers of Python {platform.python_version()}: apt-get install python3-dev."
        yield Finding("compiler", needed, f"{found}, and no {header}", fix)
    else:
        yield Finding("compiler", OK, found)


def _cache() -> Iterator[Finding]:
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    fix = "Let TRITON_CACHE_DIR name a folder that can be written to."
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        yield Finding("cache", PROBLEM, f"{folder}: {there} is no folder", fix)
    elif not os.access(there, os.W_OK | os.X_OK):
        yield Finding("cache", PROBLEM, f"{folder} cannot be written to", fix)
    elif os.statvfs(there).f_flag & os.ST_NOEXEC:
        yield Finding("cache", PROBLEM, f"{folder} is on a file system without execution", fix)
    elif (free := shutil.disk_usage(there).free) < _GIB:
        yield Finding("cache", PROBLEM, f"{folder} has {free / _GIB:.1f} GiB left", "Make room: kernels take up to 1.")
    else:
        yield Finding("cache", OK, f"{folder}, {free / _GIB:.0f} GiB free")


def _interpreter() -> Iterator[Finding]:
    triton, numpy = _version("triton"), _version("numpy")
    pair = f"triton {triton} with numpy {numpy}"
    if triton is None or numpy is None:
        yield Finding("interpreter", NOTE, "needs triton and numpy")
    elif _numbers(triton) < (3, 7) and _numbers(numpy) >= (2, 4):
        fix = "Only tests need it: pip install 'triton>=3.7' or pip install 'numpy<2.4'."
        yield Finding("interpreter", NOTE, f"{pair} cannot interpret loops", fix)
    elif os.environ.get("TRITON_INTERPRET") == "1":
        fix = "It is for tests: unset TRITON_INTERPRET."
        yield Finding("interpreter", NOTE, f"{pair}, and it is on: every kernel runs in Python", fix)
    else:
        yield Finding("interpreter", OK, pair)


def _plugins() -> Iterator[Finding]:
    import warnings

    from tritonllm.registry import ModelRegistry

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registry = ModelRegistry()
        absent = [str(warning.message) for warning in caught]
        loaded = registry.plugins()
    fix = "Ask its author, uninstall it, or leave it out with TRITONLLM_PLUGINS."
    failed = [Finding("plugins", PROBLEM, plugin.failure, fix) for plugin in loaded if plugin.error]
    failed += [Finding("plugins", PROBLEM, message, "Correct TRITONLLM_PLUGINS.") for message in absent]
    failed += [Finding("plugins", PROBLEM, conflict, "See above.") for conflict in registry.conflicts()]
    yield from failed
    slow = [plugin for plugin in loaded if plugin.imports_torch]
    for plugin in slow:
        fix = "Let its module name the model by a string and import it nowhere."
        yield Finding("plugins", NOTE, f"{plugin.name!r} of {plugin.owner} imports torch when it is listed", fix)
    if not failed and not slow:
        yield Finding("plugins", OK, ", ".join(f"{plugin.name} ({plugin.owner})" for plugin in loaded) or "none")


def _imported(name: str) -> tuple[Any, str]:
    """A module, or None and why not."""
    import importlib

    try:
        return importlib.import_module(name), ""
    except Exception as error:  # a broken build raises anything
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _required(distribution: str, package: str) -> str | None:
    """The version of a package that a distribution pins, if it pins one."""
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    pins = (re.match(rf"{package}\s*\(?==\s*([\w.]+)", requirement) for requirement in requirements)
    return next((pin[1] for pin in pins if pin), None)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", f"{version}.0")[:2]
    return int(major), int(minor)


def _driver_version() -> str | None:
    try:
        found = re.search(r"(?:Kernel Module|x86_64|aarch64)\s+([\d.]+)", _DRIVER.read_text())
    except OSError:
        return None
    return found[1] if found else "of an unknown version"
