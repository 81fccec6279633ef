"""Prefill attention in both forms: check, then time: `python -m tritonllm.bench.prefill_attention`.

Causal prompts of equal length, keys in blocks of 256, microseconds of one call in a CUDA graph, median of its replays,
and TFLOP/s counting the pairs that are not masked. `--prefix` puts that many cached tokens before every prompt.
"""

from __future__ import annotations

import argparse
import sys

import torch

from tritonllm.bench.graph_timing import graph_microseconds
from tritonllm.kernels.launch import Launch
from tritonllm.kernels.prefill_attention import plan_prefill_attention
from tritonllm.kernels.prefill_hopper import HOPPER_TILE_ROWS, serves_shape
from tritonllm.kernels.prefill_tiling import prefill_tiles
from tritonllm.kernels.reference import attention as reference

BLOCK_SIZE = 256
PORTABLE_TILE_ROWS = 64
_LARGEST_ERROR = 1e-2  # relative, in the 2-norm
_CALLS = 4


class Prompts:
    """A batch of prompts of one length over one cache.

    Args:
        num_heads, num_kv_heads, head_dim: of the model.
        batch: number of prompts.
        length: new tokens of each.
        prefix: cached tokens before them.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, batch: int, length: int, prefix: int) -> None:
        context = prefix + length
        blocks = -(-context // BLOCK_SIZE)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        self.scale = head_dim**-0.5
        self.query_lens, self.context_lens = [length] * batch, [context] * batch
        self.q = normal(batch * length, num_heads, head_dim)
        self.k_cache, self.v_cache = (normal(batch * blocks, BLOCK_SIZE, num_kv_heads, head_dim) for _ in range(2))
        tables = torch.randperm(batch * blocks, device="cuda").to(torch.int32).view(batch, blocks)
        cu_seqlens = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * length
        self.where = (tables, cu_seqlens, torch.full((batch,), context, device="cuda", dtype=torch.int32))
        pairs = batch * length * (prefix + (length + 1) / 2)
        self.flops = 4 * num_heads * head_dim * pairs

    def plan(self, hopper: bool, out: torch.Tensor) -> Launch:
        """The launch of one form."""
        rows = HOPPER_TILE_ROWS if hopper else PORTABLE_TILE_ROWS
        tiles = prefill_tiles(self.query_lens, self.context_lens, rows)
        tiles_tensor = torch.tensor(tiles, dtype=torch.int32, device="cuda")
        return plan_prefill_attention(
            self.q, self.k_cache, self.v_cache, *self.where, tiles_tensor, rows, self.scale, out, hopper=hopper
        )

    def error(self, launch: Launch, out: torch.Tensor) -> float:
        """Relative error of the first and last prompt in the 2-norm; NaN counts as infinite."""
        out.fill_(float("nan"))
        launch.run()
        worst = 0.0
        length = self.query_lens[0]
        for index in {0, len(self.query_lens) - 1}:
            rows = slice(index * length, (index + 1) * length)
            tables, _, contexts = (part[index : index + 1] for part in self.where)
            cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device="cuda")
            exact = reference.prefill_attention(
                self.q[rows].float(), self.k_cache.float(), self.v_cache.float(), tables, cu_seqlens, contexts,
                torch.empty(0, 2), 0, self.scale,
            )  # fmt: skip
            error = ((out[rows].float() - exact).norm() / exact.norm()).item()
            worst = max(worst, error if error == error else float("inf"))
        return worst


def microseconds(launch: Launch) -> float:
    """Median time of one call."""

    def run() -> None:
        for _ in range(_CALLS):
            launch.run()

    return graph_microseconds(run) / _CALLS


def main() -> int:
    """Print the table; the exit status is 1 if a form computes something else than the reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=["32/8x128", "16/8x128", "32/8x64"], help="query/KVxhead_dim")
    parser.add_argument("--tokens", type=int, default=16384, help="new tokens of a call, shared by prompts of a length")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 2048, 8192])
    parser.add_argument("--prefix", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    right = True
    for heads in options.heads:
        counts, head_dim = heads.split("x")
        num_heads, num_kv_heads = (int(count) for count in counts.split("/"))
        for length in options.lengths:
            batch = max(1, options.tokens // length)
            prompts = Prompts(num_heads, num_kv_heads, int(head_dim), batch, length, options.prefix)
            line = f"{heads:10} {batch:4} x {length:5}"
            for hopper in (False, True):
                if hopper and not serves_shape(int(head_dim), torch.bfloat16, BLOCK_SIZE, prompts.q.device):
                    continue
                out = torch.empty_like(prompts.q)
                launch = prompts.plan(hopper, out)
                error = prompts.error(launch, out)
                right &= error <= _LARGEST_ERROR
                time = microseconds(launch)
                name = "hopper" if hopper else "portable"
                line += f"   {name} {time:8.1f} us {prompts.flops / time * 1e-6:5.0f} TFLOP/s (error {error:.1e})"
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
