"""The all-reduces of a group that go through its GPUs' memory, where that is faster than NCCL."""

from __future__ import annotations

import torch

from tritonllm.kernels.launch import compiles_ahead
from tritonllm.kernels.peer_all_reduce import (
    Norm,
    choose_plan,
    one_shot_fits,
    plan_one_shot,
    plan_two_shot,
    two_shot_fits,
)
from tritonllm.kernels.peer_buffer import MAX_CHANNELS, PeerBuffer


class PeerGroup:
    """All-reduces over a `PeerBuffer`. All ranks call the same in the same order.

    Args:
        buffer: this rank's view, of which no rank has made use.

    Attributes:
        buffer: the same.
    """

    def __init__(self, buffer: PeerBuffer) -> None:
        self.buffer = buffer
        self._compiled: set[tuple[int, torch.dtype, torch.dtype, int, bool]] = set()
        device = buffer.state.device
        # Prepared, as a kernel that waits may hold up what would be done later.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=device.type == "cuda")

    def all_reduce(self, x: torch.Tensor, out: torch.Tensor, norm: Norm | None = None) -> bool:
        """Sum x over the ranks into out, or its norm as `plan_one_shot` says; False if that is for others to do.

        Args:
            x: [T, H], or float32 parts of it [S, T, H]. Another shape is not taken.
            out: [T, H], contiguous; may be x.
            norm: what follows the sum.
        """
        if out.dim() != 2 or not out.is_contiguous() or 0 in out.shape:
            return False
        self._compile_both(x, out, norm)
        rows, columns = out.shape
        plan = choose_plan(rows, columns, out.dtype, self.buffer)
        if plan is None:
            return False
        if not compiles_ahead():
            plan(x, out, norm, self.buffer).run()
        return True

    def _compile_both(self, x: torch.Tensor, out: torch.Tensor, norm: Norm | None) -> None:
        """At the first sum of a kind, which is while an engine starts, compile for any number of rows."""
        parts = x.shape[0] if x.dim() == 3 else 0
        kind = (out.shape[1], out.dtype, x.dtype, parts, norm is not None)
        if kind in self._compiled:
            return
        self._compiled.add(kind)
        if norm is not None:
            norm = Norm(norm.residual[:1], norm.weight, norm.eps)
        for plan, fits in ((plan_one_shot, one_shot_fits), (plan_two_shot, two_shot_fits)):
            if fits(1, out.shape[1], out.dtype, self.buffer):
                plan(x[..., :1, :], out[:1], norm, self.buffer).compile()

    def stop(self) -> None:
        """Let kernels end that wait for a rank which is lost. Nothing here may be used after it."""
        stop = self.buffer.state[MAX_CHANNELS:]
        if self._stream is None:
            stop.copy_(self._one)
            return
        with torch.cuda.stream(self._stream):
            stop.copy_(self._one, non_blocking=True)
