"""Fill a model from a stream of checkpoint tensors: each parameter exactly once, or one error with all the names."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import torch
from torch import nn

from tritonllm.errors import CheckpointError
from tritonllm.weights.targets import find_targets

# A buffer that old exports stored beside the weights; it follows from the config.
HARMLESS = ("rotary_emb.inv_freq",)
NAMES_SHOWN = 25


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What became of the tensors of a checkpoint.

    Fields:
        loaded: names that filled a parameter.
        ignored: names left out on purpose: harmless buffers, the copy of a tied head, what the model or caller ignores.
    """

    loaded: tuple[str, ...]
    ignored: tuple[str, ...]


def load_weights(
    model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], ignore: Collection[str] = ()
) -> LoadReport:
    """Copy checkpoint tensors into a model, one by one, so that the peak is the model plus one tensor.

    Args:
        model: see `find_targets`; an attribute `ignored_weights`, a tuple of name endings such as
            "rotary_emb.inv_freq", lists tensors that a checkpoint may hold and the model does not use.
        tensors: names as in the checkpoint with whole tensors of any dtype and device.
        ignore: further name endings to leave out.

    Raises:
        CheckpointError: tensors are missing, unexpected, given twice or of another shape; all are listed.
    """
    targets, shared = find_targets(model)
    endings = (*HARMLESS, *getattr(model, "ignored_weights", ()), *ignore)
    loaded: dict[str, None] = {}
    ignored: list[str] = []
    unexpected: list[str] = []
    repeated: list[str] = []
    misshapen: dict[str, str] = {}
    for name, tensor in tensors:
        target = targets.get(name)
        if target is None:
            known = name in shared or any(_ends_with(name, ending) for ending in endings)
            (ignored if known else unexpected).append(name)
        elif name in loaded or name in misshapen:
            repeated.append(name)
        elif tuple(tensor.shape) != target.tensor.shape:
            misshapen[name] = f"{name} is {list(tensor.shape)}, the config asks for {list(target.tensor.shape)}"
        else:
            target.load(tensor)
            loaded[name] = None
        del tensor  # or it would live on while the next is read
    missing = [name for name in targets if name not in loaded and name not in misshapen]
    problems = [
        *_problem("missing", missing),
        *_problem("unexpected", unexpected),
        *_problem("given twice", repeated),
        *_problem("wrong shape", list(misshapen.values())),
    ]
    if problems:
        raise CheckpointError(
            f"The checkpoint does not fit {type(model).__name__}: its files and its config must belong together.\n"
            + "\n".join(problems)
        )
    return LoadReport(tuple(loaded), tuple(ignored))


def _ends_with(name: str, ending: str) -> bool:
    """Whether whole segments of a name end so: "up_proj.weight" does not end "mlp.gate_up_proj.weight"."""
    return f".{name}".endswith(f".{ending.removeprefix('.')}")


def _problem(kind: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f", and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return [f"  {kind} ({len(names)}): {', '.join(names[:NAMES_SHOWN])}{more}"]
