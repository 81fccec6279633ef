"""What the scheduler says when it refuses a prompt, or can go on no more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tritonllm.engine.block_manager import BlockManager
from tritonllm.errors import RequestError

if TYPE_CHECKING:
    from tritonllm.engine.scheduler import Scheduler


def check_prompt_length(num_tokens: int, limits: Mapping[str, int | None], manager: BlockManager) -> None:
    """Refuse a prompt that can never be served.

    Args:
        num_tokens: length of the prompt.
        limits: by name, tokens of prompt and completion at most; None is no limit.
        manager: the pool that has to hold the prompt.

    Raises:
        RequestError: it is empty, reaches a limit, or is larger than the pool.
    """
    if num_tokens == 0:
        raise RequestError("the prompt is empty; give at least one token")
    for name, limit in limits.items():
        if limit is not None and num_tokens >= limit:
            raise RequestError(f"the prompt has {num_tokens} tokens and leaves no room under {name} = {limit}")
    pool = manager.num_blocks * manager.block_size
    if num_tokens > pool:
        raise RequestError(
            f"the prompt has {num_tokens} tokens and can never fit the KV cache of {pool} ({manager.num_blocks} blocks "
            f"of {manager.block_size}); raise max_cached_blocks or gpu_memory_utilization"
        )


def describe_state(scheduler: Scheduler) -> str:
    """Queues, blocks and budget in one line."""
    manager = scheduler.block_manager
    queues = (scheduler.waiting, scheduler.prefilling, scheduler.running)
    longest = max((seq.length for queue in queues for seq in queue), default=0)
    return (
        f"{len(scheduler.waiting)} waiting, {len(scheduler.prefilling)} in their prompt, {len(scheduler.running)} "
        f"running, the longest of {longest} tokens; {manager.num_free_blocks} of {manager.num_blocks} blocks of "
        f"{manager.block_size} free; at most {scheduler.max_num_batched_tokens} tokens and "
        f"{scheduler.max_num_sequences} sequences a step; {scheduler.num_steps_in_flight} steps in flight"
    )
