"""Decoder layers on a decode batch, by each path that can run: `python -m tritonllm.bench.decode_layer [--write FILE]`.

Each path of `models/decode_path.py` runs a model without its head, with dummy weights and as many layers as it takes to
read far more than the L2 cache holds, in one CUDA graph; where a model's layers differ, all are like its first. Printed
are microseconds a layer, median of replays, beside what its weights, keys and values take at 4.4 TB/s. Before that, all
paths are compared with SEPARATE over a few layers. Contexts are drawn between half of --context and one and a half
times as many keys, the same in every run.

`--write FILE` puts the fastest paths into a tuning table, by hidden size: from one batch to the next larger one the
path changes only if that gains more than 1%. What else is in the file stays. TRITONLLM_TUNING=FILE uses it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tritonllm.bench.graph_timing import PEAK, ROTATED_BYTES, graph_microseconds
from tritonllm.bench.limits import Limits
from tritonllm.bench.tuning import best_paths
from tritonllm.bench.tuning_options import read_models, read_numbers, require_gpu, write_table
from tritonllm.config import EngineConfig
from tritonllm.engine.cuda_graphs import bucket_sizes
from tritonllm.engine.kv_cache import KVPool
from tritonllm.engine.resolve import ResolvedModel, build_model, resolve_model
from tritonllm.errors import EngineError, KernelError
from tritonllm.kernels.decode_attention import DecodeWorkspace
from tritonllm.kernels.hopper_linear import serves_shape
from tritonllm.kernels.longest_first import FEW_ROWS, longest_first
from tritonllm.kernels.skinny_linear import MAX_ROWS
from tritonllm.kernels.tuning_table import PathLimit
from tritonllm.models.attention_metadata import DecodeMetadata
from tritonllm.models.decode_path import DecodePath
from tritonllm.models.decoder import DecoderLM
from tritonllm.models.tensor_parallel import TPGroup

MODELS = ("Qwen3-0.6B", "Llama-3.2-1B", "Qwen3-8B")
BATCHES = tuple(bucket_sizes(256))
"""Those that an engine captures."""
LARGEST_ERROR = 5e-2
"""Relative, in the 2-norm, over `_COMPARED_LAYERS`: residual streams in bfloat16 differ by about 2e-2."""

_COMPARED_LAYERS = 4
_FEWEST_LAYERS = 8
_BLOCK_SIZE = 256


def ragged_contexts(batch: int, context: int) -> list[int]:
    """Keys of each row, `context` on average."""
    generator = random.Random(batch)
    return [generator.randint(max(1, context - context // 2), context + context // 2) for _ in range(batch)]


class Chain:
    """A model's embedding, layers and last norm on one decode batch, by whatever path is asked for.

    Args:
        resolved: the model, with dummy weights, its device and dtype; the chain has as many layers as it takes.
        contexts: keys of each row, the new one counted.

    Attributes:
        num_layers: of the chain.
        layer_bytes: weights, keys and values that a layer reads.
    """

    def __init__(self, resolved: ResolvedModel, contexts: Sequence[int]) -> None:
        self.num_layers, self.layer_bytes = chain_size(resolved, contexts)
        batch = len(contexts)
        config = replace(resolved.config.of_layer(0), num_layers=self.num_layers, vocab_size=batch)
        model = build_model(replace(resolved, config=config), TPGroup())
        if not isinstance(model, DecoderLM):
            raise EngineError(f"{type(model).__name__} is no DecoderLM, so it has no layers with paths to measure.")
        self.decoder = model.model
        self.dtype, self.device = dtype, device = self.decoder.norm.weight.dtype, self.decoder.norm.weight.device
        generator = torch.Generator(device).manual_seed(0)
        blocks = [-(-context // _BLOCK_SIZE) for context in contexts]
        pool = KVPool(config, sum(blocks), _BLOCK_SIZE, config.num_kv_heads, dtype, device)
        pool.data.normal_(generator=generator)
        self.caches = pool.layers
        shuffled = iter(torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).tolist())
        tables = torch.zeros(batch, max(blocks), dtype=torch.int32)
        for row, count in enumerate(blocks):
            tables[row, :count] = torch.tensor([next(shuffled) for _ in range(count)])
        lens = torch.tensor(contexts, dtype=torch.int32)
        positions = lens - 1
        slots = tables.gather(1, positions.long()[:, None] // _BLOCK_SIZE)[:, 0] * _BLOCK_SIZE + positions % _BLOCK_SIZE
        workspace = DecodeWorkspace.allocate(batch, config.num_heads, config.num_kv_heads, config.head_dim, device)
        self.input_ids = torch.arange(batch, device=device)
        self.positions = positions.to(device)
        lens = lens.to(device)
        order = longest_first(lens) if batch > FEW_ROWS else None
        self.attn = DecodeMetadata(slots.to(device), tables.to(device), lens, workspace, order)

    def paths(self) -> list[DecodePath]:
        """Those that can run here, SEPARATE among them."""
        on_hopper = all(serves_shape(size, self.dtype, self.device) for size in self.decoder.in_features)
        can_run = {
            DecodePath.SKINNY: len(self.input_ids) <= MAX_ROWS,
            DecodePath.HOPPER: on_hopper,
            DecodePath.MIXED: on_hopper,
            DecodePath.SEPARATE: True,
        }
        return [path for path in DecodePath if can_run[path]]

    def run(self, path: DecodePath, num_layers: int | None = None) -> torch.Tensor:
        """Hidden states `[batch, hidden_size]` behind the first `num_layers`, or all."""
        attn = replace(self.attn, path=path)
        hidden, residual = self.decoder.embed_tokens(self.input_ids), None
        for layer, cache in zip(self.decoder.layers[:num_layers], self.caches, strict=False):
            hidden, residual = layer(hidden, residual, self.positions, cache, attn)
        return self.decoder.norm(hidden, residual)

    def check(self, path: DecodePath) -> None:
        """Compare a path with SEPARATE.

        Raises:
            KernelError: they differ by more than rounding; NaN does so.
        """
        expected = self.run(DecodePath.SEPARATE, _COMPARED_LAYERS).double()
        error = ((self.run(path, _COMPARED_LAYERS).double() - expected).norm() / expected.norm()).item()
        if not error < LARGEST_ERROR:
            raise KernelError(
                f"the {path.value} path is wrong for {len(self.input_ids)} rows and weights of "
                f"{self.decoder.in_features} columns: relative error {error:.1e}"
            )

    def microseconds(self, path: DecodePath) -> float:
        """Time of one layer."""
        return graph_microseconds(partial(self.run, path)) / self.num_layers


def chain_size(resolved: ResolvedModel, contexts: Sequence[int]) -> tuple[int, int]:
    """Layers of a chain, and the bytes that each of them reads."""
    layer = Limits(replace(resolved.config.of_layer(0), num_layers=1), resolved.engine.dtype, None)
    itemsize = getattr(torch, resolved.engine.dtype).itemsize
    keys = sum(layer.keys_seen(context) for context in contexts)
    layer_bytes = layer.linear_parameters * itemsize + int(layer.kv_bytes(keys))
    return max(_FEWEST_LAYERS, ROTATED_BYTES // layer_bytes + 1), layer_bytes


def measure(resolved: ResolvedModel, name: str, batch: int, context: int) -> dict[str, float] | None:
    """Check and time all paths of a batch, and print a line; None if it does not fit the memory."""
    contexts = ragged_contexts(batch, context)
    torch.cuda.empty_cache()
    num_layers, layer_bytes = chain_size(resolved, contexts)
    start = f"{name:14}{batch:5}  {num_layers:6}{layer_bytes / PEAK:8.2f}"
    if num_layers * layer_bytes > 0.7 * torch.cuda.mem_get_info()[0]:
        print(f"{start}   not enough memory", flush=True)
        return None
    chain = Chain(resolved, contexts)
    for path in chain.paths():
        chain.check(path)
    times = {path.value: chain.microseconds(path) for path in chain.paths()}
    cells = "".join(f"{times[path.value]:10.2f}" if path.value in times else f"{'-':>10}" for path in DecodePath)
    print(f"{start}{cells}", flush=True)
    return times


def run(models: Sequence[ResolvedModel], batches: Sequence[int], context: int) -> dict[int, tuple[PathLimit, ...]]:
    """Print the table; by hidden size, the fastest paths."""
    titles = "".join(f"{path.value:>10}" for path in DecodePath)
    print(f"{'us a layer':14}{'batch':>5}  {'layers':>6}{'floor':>8}{titles}")
    found = {}
    for resolved in models:
        name, hidden_size = resolved.engine.model_name_or_path, resolved.config.hidden_size
        measured = {batch: measure(resolved, name, batch, context) for batch in batches}
        times = {batch: each for batch, each in measured.items() if each is not None}
        if not times:
            continue
        found[hidden_size] = best_paths(times)
        limits = "".join(f"{limit.path} up to {limit.rows} rows, " for limit in found[hidden_size])
        print(f"{name}, hidden size {hidden_size}: {limits}separate above", flush=True)
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with a sentence if they make no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names of shipped shapes, for example Qwen3-0.6B")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="for example 1,8,64")
    parser.add_argument("--context", type=int, default=700, help="keys of a row, on average")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the fastest paths into a tuning table")
    options = parser.parse_args(arguments)
    options.batches = sorted(set(read_numbers(parser, "--batches", options.batches)))
    if options.batches[0] < 1:
        parser.error(f"--batches has {options.batches[0]}, and a batch has at least 1 row")
    if options.context < 1:
        parser.error(f"--context {options.context} must be at least 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.models = [
        resolve_model(EngineConfig(model_name_or_path=model, load_format="dummy", dtype="bfloat16", device=device))
        for model in read_models(parser, options.models)
    ]
    names: dict[int, str] = {}
    for resolved in options.models:
        name, config = resolved.engine.model_name_or_path, resolved.config
        if options.context + options.context // 2 > config.max_length:
            parser.error(f"--context {options.context} is too long for {name}, which has {config.max_length} positions")
        if options.write and config.hidden_size in names:
            parser.error(
                f"--write needs models of different hidden sizes, and that of {names[config.hidden_size]} and {name} "
                f"is {config.hidden_size}"
            )
        names[config.hidden_size] = name
    options.table = require_gpu(parser, options.write)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with torch.inference_mode():
        found = run(options.models, options.batches, options.context)
    if options.write:
        write_table(options.write, options.table, decode_paths={**options.table.decode_paths, **found})


if __name__ == "__main__":
    main()
