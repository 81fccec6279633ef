"""Models that fail on one rank, for `test_ranks.py`; ranks import them by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tritonllm.models.llama import LlamaForCausalLM
from tritonllm.registry import process_registry

BAD_TOKEN = 13


class FailsToLoad(LlamaForCausalLM):
    def __init__(self, config: Any, tp: Any) -> None:
        if tp.rank == 1:
            raise RuntimeError("this rank cannot load")
        super().__init__(config, tp)


class FailsWhileRank0Loads(FailsToLoad):
    """Rank 0 needs half a minute to load."""

    def __init__(self, config: Any, tp: Any) -> None:
        super().__init__(config, tp)
        for module in self.modules():
            if hasattr(module, "load_tensor"):
                module.load_tensor = _slowed(module.load_tensor)


def _slowed(load: Callable[..., None]) -> Callable[..., None]:
    def slow(*args: Any) -> None:
        time.sleep(4)
        load(*args)

    return slow


class FailsInStep(LlamaForCausalLM):
    def __init__(self, config: Any, tp: Any) -> None:
        super().__init__(config, tp)
        self.rank = tp.rank

    def forward(self, input_ids: Any, *others: Any) -> Any:
        if self.rank and process_registry.cache_info().currsize:
            raise RuntimeError("this rank looked for plugins")
        if self.rank == 1 and (input_ids == BAD_TOKEN).any():
            raise RuntimeError("this rank cannot go on")
        return super().forward(input_ids, *others)
