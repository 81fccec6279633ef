"""A module that only rank 0 can import."""

from __future__ import annotations

import multiprocessing

from tritonllm.models.llama import LlamaForCausalLM

if multiprocessing.parent_process() is not None:
    raise ImportError("not in this process")

Model = LlamaForCausalLM
