"""Memory that shows what was never written to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        if tensor.device.type == "meta":
            return tensor
        return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)

    return empty


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, each new uninitialised tensor holds NaN, or the smallest integer, so an element left unwritten shows.

    That holds for `torch.empty`, `torch.empty_like` and `Tensor.new_empty`, on every device, in every thread.
    """
    with torch.device("cpu"):  # at the first call torch notes which functions it places: the true `empty` is one
        torch.empty(0)
    with ExitStack() as patches:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patches.enter_context(patch.object(owner, name, _poisoned(getattr(owner, name))))
        yield
