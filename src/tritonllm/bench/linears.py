"""Skinny linears against PyTorch at the shapes of shipped models: `python -m tritonllm.bench.linears [--tune]`.

Each shape is checked against float64, then timed: calls on different weights, more than the L2 cache holds, in one CUDA
graph, median of its replays. The other side is `F.linear` (cuBLAS), alone and with the separate kernels that do what
ours includes: the norm with its add, and SiLU.

`--tune` times other forms of each shape as well, against what the rules of `kernels/skinny_table.py` choose. `--write
FILE` makes a tuning table of it: forms more than 2% faster than the rules' choice. Forms that the file had before are
replaced, its decode paths are kept: those are from `python -m tritonllm.bench.decode_layer`. TRITONLLM_TUNING=FILE uses
it; kernels/tuned/ ships those of whole GPU families.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from tritonllm.bench.linear_layers import LARGEST_ERROR, Layer, Shape, candidates, layers_of
from tritonllm.bench.tuning import LinearTimes, best_forms
from tritonllm.bench.tuning_options import read_models, read_numbers, require_gpu, write_table
from tritonllm.errors import KernelError, TritonLLMError
from tritonllm.kernels.paged_attention import shared_memory_limit
from tritonllm.kernels.skinny_form import Form
from tritonllm.kernels.skinny_linear import MAX_ROWS
from tritonllm.kernels.skinny_table import choose_form
from tritonllm.kernels.tuning_table import TOKEN_BUCKETS, UNTUNED

MODELS = ("Qwen3-0.6B", "Llama-3.2-1B", "Qwen3-8B", "SmolLM2-135M")


def measure(layer: Layer) -> None:
    """Check and time a layer as it runs on this GPU, and print the line of the table.

    Raises:
        KernelError: the result is wrong.
    """
    shape, tokens = layer.shape, len(layer.x)
    error = layer.error()
    if error > LARGEST_ERROR:
        raise KernelError(f"skinny_linear is wrong at {shape} with {tokens} tokens: relative error {error:.1e}")
    ours = layer.microseconds(layer.call)
    apart = layer.microseconds(partial(layer.call, pdl=False))
    cublas = layer.microseconds(partial(F.linear, layer.x))
    separate = layer.microseconds(layer.separately)
    speed = 2e-6 * shape.columns * shape.rows / ours
    size = f"{shape.columns} -> {shape.rows}"
    print(
        f"{shape.name:22}{tokens:3}  {size:15}{ours:8.2f}{speed:6.2f}{apart:8.2f}{cublas:9.2f}{separate:9.2f}"
        f"{error:9.1e}",
        flush=True,
    )


def tune(layer: Layer) -> LinearTimes:
    """Time every form that computes the right thing, and print the fastest beside the rules' choice."""
    shape, key = layer.shape, layer.key
    shared_memory = shared_memory_limit(layer.x.device)
    rules = choose_form(UNTUNED, key.tokens, key.columns, key.rows, 2, key.gated, key.normed, shared_memory)
    timed: list[tuple[float, Form]] = []
    for form in {rules: None, **dict.fromkeys(candidates(shape, key.tokens, shared_memory))}:
        try:
            if layer.error(form) <= LARGEST_ERROR:
                timed.append((layer.microseconds(partial(layer.call, form=form)), form))
        except TritonLLMError:
            raise
        except Exception as error:  # a tile that this GPU has not the resources for
            print(f"    {form}: {type(error).__name__}")
    best = min(timed, key=lambda pair: pair[0])[1]
    # Once more, one after the other: the smallest of many times is smaller than it would be alone.
    rules_us, best_us = (layer.microseconds(partial(layer.call, form=form)) for form in (rules, best))
    times = LinearTimes(key, rules, rules_us, best, best_us)
    verdict = "kept" if times.is_worth_an_entry else "the rules' choice stays"
    print(f"    best {best_us:.2f} us, rules {rules_us:.2f}: {verdict}; {best}", flush=True)
    return times


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with a sentence if they make no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKEN_BUCKETS)), help="for example 1,8,16")
    parser.add_argument("--models", default=",".join(MODELS), help="names of shipped shapes, for example Qwen3-0.6B")
    parser.add_argument("--only", default="", help="part of a layer's name, for example 'o' or 'Qwen3-0.6B qkv'")
    parser.add_argument("--tune", action="store_true", help="try other forms of each shape")
    parser.add_argument("--write", type=Path, metavar="FILE", help="make a tuning table of what --tune finds")
    options = parser.parse_args(arguments)
    options.tokens = read_numbers(parser, "--tokens", options.tokens)
    models = read_models(parser, options.models)
    options.shapes = [shape for model in models for shape in layers_of(model) if options.only in shape.name]
    if not options.shapes:
        parser.error(f"--only {options.only!r} is in no layer's name")
    allowed = TOKEN_BUCKETS if options.write else range(1, MAX_ROWS + 1)
    for tokens in options.tokens:
        if tokens not in allowed:
            parser.error(f"--tokens has {tokens}, which must be one of {', '.join(map(str, allowed))}")
    if options.write and not options.tune:
        parser.error("--write needs --tune: a table is made of what that measures")
    options.table = require_gpu(parser, options.write)
    return options


def run(shapes: Sequence[Shape], tokens: Sequence[int], tuning: bool) -> list[LinearTimes]:
    """Print the table; what tuning found, if it was asked for."""
    torch.manual_seed(0)
    titles = f"{'us':>8}{'TB/s':>6}{'no PDL':>8}{'F.linear':>9}{'separate':>9}{'error':>9}"
    print(f"{'layer':22}{'M':>3}  {'K -> rows':15}{titles}")
    found = []
    for shape in shapes:
        for count in tokens:
            layer = Layer(shape, count)
            measure(layer)
            if tuning:
                found.append(tune(layer))
            del layer  # its weights, before the next ones are made
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    found = run(options.shapes, options.tokens, options.tune)
    if options.write:
        write_table(options.write, options.table, linears=best_forms(found))


if __name__ == "__main__":
    main()
