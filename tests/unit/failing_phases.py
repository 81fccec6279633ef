"""A model that fails in the process of another rank, in the phase and the way that the environment names."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

from tritonllm.models.llama import LlamaForCausalLM

PHASES = ("import", "load", "warm-up", "step")
"""A rank imports the model, makes it, prepares what steps need (where rank 0 waits for it in a collective), steps."""

PHASE, WAY = "TEST_FAILING_PHASE", "TEST_FAILING_WAY"


def reach(phase: str) -> None:
    if multiprocessing.parent_process() is None or os.environ.get(PHASE) != phase:
        return
    way = os.environ[WAY]
    if way == "raise":
        raise RuntimeError(f"this rank fails: {phase}")
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdout.write(f"reached {phase}\n")
    sys.stdout.flush()
    # Rank 0 cannot leave a collective, so where it waits in one the pause has an end.
    time.sleep(60 if phase in ("import", "load") else 3)


class Model(LlamaForCausalLM):
    def __init__(self, config: Any, tp: Any) -> None:
        reach("load")
        super().__init__(config, tp)

    def __getattribute__(self, name: str) -> Any:
        if name == "compute_logits":  # looked up once a rank is loaded
            reach("warm-up")
        return super().__getattribute__(name)

    def forward(self, *args: Any) -> Any:
        reach("step")
        return super().forward(*args)


reach("import")
