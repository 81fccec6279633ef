"""Fill a model from a stream of checkpoint tensors: each parameter exactly once, or one error with all the names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

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
        ignored: names left out on purpose: harmless buffers, the copy of a tied head, what the model ignores.
    """

    loaded: tuple[str, ...]
    ignored: tuple[str, ...]


def load_weights(model: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> LoadReport:
    """Copy checkpoint tensors into a model, one by one, so that the peak is the model plus one tensor.

    Args:
        model: see `find_targets`; an attribute `ignored_weights`, a tuple of name endings such as
            "rotary_emb.inv_freq", lists tensors that a checkpoint may hold and the model does not use.
        tensors: names as in the checkpoint with whole tensors of any floating dtype and any device.

    Raises:
        CheckpointError: tensors are missing, unexpected, given twice, of another shape, not of floating dtype, or
            differ although the model ties them; all are listed.
    """
    targets, shared = find_targets(model)
    endings = (*HARMLESS, *getattr(model, "ignored_weights", ()))
    loaded: dict[str, None] = {}
    ignored: list[str] = []
    unexpected: list[str] = []
    repeated: list[str] = []
    misshapen: dict[str, str] = {}
    mistyped: dict[str, str] = {}
    untied: list[str] = []
    filled: dict[str, str] = {}
    for name, tensor in tensors:
        owner = name if name in targets else shared.get(name, name)
        target = targets.get(owner)
        if target is None:
            known = name in shared or any(_ends_with(name, ending) for ending in endings)
            (ignored if known else unexpected).append(name)
        elif name in loaded or name in misshapen or name in mistyped:
            repeated.append(name)
        elif tuple(tensor.shape) != target.tensor.shape:
            misshapen[name] = f"{name} is {list(tensor.shape)}, the config asks for {list(target.tensor.shape)}"
        elif target.parameter.is_floating_point() and not tensor.is_floating_point():
            mistyped[name] = f"{name} is {tensor.dtype}, the model computes in {target.parameter.dtype}"
        else:
            # Two names fill one parameter where the model ties them, in either order.
            other = filled.setdefault(owner, name)
            if other == name:
                target.load(tensor)
            elif not target.reload(tensor):
                untied.append(f"{name} and {other}")
            if name == owner:
                loaded[name] = None
            else:
                ignored.append(name)
        del tensor  # or it would live on while the next is read
    missing = [name for name in targets if name not in loaded and name not in misshapen and name not in mistyped]
    problems = [
        *_problem("missing", missing),
        *_problem("unexpected", unexpected),
        *_problem("given twice", repeated),
        *_problem("wrong shape", list(misshapen.values())),
        *_problem("wrong dtype", list(mistyped.values())),
        *_problem("tied but different, set tie_word_embeddings to false in config.json", untied),
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
