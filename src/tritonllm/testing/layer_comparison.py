"""Hidden states of the same checkpoint here and in transformers, layer by layer: which one is the first to differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tritonllm.engine.llm_engine import LLMEngine
from tritonllm.testing.hf_comparison import TOLERANCE, prefill_logits


@dataclass
class LayerRecord:
    """What one forward pass computed.

    Attributes:
        streams: name to the residual stream `[T, hidden_size]` before the first layer and after each.
        modules: name to the output of every other module, in the order in which they ended.
    """

    streams: dict[str, torch.Tensor] = field(default_factory=dict)
    modules: dict[str, torch.Tensor] = field(default_factory=dict)


def assert_layers_match(engine: LLMEngine, twin: Any, prompt: list[int], tolerance: float = TOLERANCE) -> None:
    """Run a prompt through both and compare the residual stream before the first layer, after each, and the last norm.

    Args:
        engine: with this checkpoint loaded in float32, on one rank, and as many blocks as the prompt needs.
        twin: the transformers model of the same weights.
        prompt: token ids.
        tolerance: largest difference, for values up to 1; larger ones in proportion to the stream's size.

    Raises:
        AssertionError: names the first layer that differs, and the first module inside it; or the model has no list of
            layers under the name that it has in the checkpoint.
    """
    path = layers_path(twin)
    try:
        engine.runner.model.get_submodule(path)  # type: ignore[attr-defined]
    except AttributeError as error:
        raise AssertionError(
            f"the model has no `{path}`: its layers and their modules bear the names of the checkpoint, so that "
            "weights and layers can be found"
        ) from error
    with recorded(engine.runner.model, path, sums=True) as ours:  # type: ignore[arg-type]
        prefill_logits(engine.runner, prompt, len(prompt))
    with torch.inference_mode(), recorded(twin, path) as theirs:
        twin(torch.tensor([prompt]), use_cache=False)
    if ours.streams.keys() != theirs.streams.keys():
        raise AssertionError(
            f"`{path}` has run {len(ours.streams) - 1} layers here and {len(theirs.streams) - 1} in transformers"
        )
    for index, name in enumerate(theirs.streams):
        difference = _Difference.of(ours.streams[name], theirs.streams[name], tolerance)
        if difference is None:
            continue
        if index == 0:
            raise AssertionError(
                f"what goes into the first layer (`{name}`) differs from transformers: {difference.words}; look at the "
                "embedding, and at a factor that multiplies it"
            )
        raise AssertionError(
            f"layer {index - 1} (`{name}`) is the first whose output differs from transformers: {difference.words}; "
            f"{_inside(name, ours, theirs, tolerance)}"
        )
    for name in theirs.modules:
        if not name.startswith(f"{path}.") and name.count(".") <= path.count("."):
            difference = _Difference.of(ours.modules.get(name), theirs.modules[name], tolerance)
            if difference is not None and name in ours.modules and "norm" in name:
                raise AssertionError(
                    f"all layers agree, and the last norm (`{name}`) differs from transformers: {difference.words}; "
                    "look at its epsilon and at how it uses its weight"
                )


def layers_path(twin: Any) -> str:
    """Where a transformers model keeps its list of layers, such as "model.layers".

    Raises:
        ValueError: no list has as many modules as the config has layers.
    """
    for name, module in twin.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == twin.config.num_hidden_layers:
            return name
    raise ValueError(
        f"{type(twin).__name__} has no list of {twin.config.num_hidden_layers} layers, so none can be compared; "
        "give a reference of a decoder-only model"
    )


@contextmanager
def recorded(model: nn.Module, path: str, *, sums: bool = False) -> Iterator[LayerRecord]:
    """Record the forward passes inside; a later one replaces an earlier one.

    Args:
        model: in which `path` is the list of layers.
        path: its name.
        sums: whether a layer's output of two tensors is a stream in two parts, as of `DecoderLayer`.
    """
    record = LayerRecord()
    layers = {f"{path}.{name}": layer for name, layer in model.get_submodule(path).named_children()}
    hooks = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record.streams[f"{path} input"] = _tokens(args[0] if args else kwargs["hidden_states"])

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            parts = output if isinstance(output, tuple) else (output,)
            if not parts or not isinstance(parts[0], torch.Tensor):
                return
            if name not in layers:
                record.modules.pop(name, None)
                record.modules[name] = _tokens(parts[0])
            elif sums and len(parts) == 2 and isinstance(parts[1], torch.Tensor):
                record.streams[name] = _tokens(parts[0] + parts[1])
            else:
                record.streams[name] = _tokens(parts[0])

        return hook

    hooks.append(layers[f"{path}.0"].register_forward_pre_hook(enter, with_kwargs=True))
    hooks += [module.register_forward_hook(leave(name)) for name, module in model.named_modules() if name]
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


def _tokens(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, `[T, ...]`: what follows may change the tensor in place."""
    tensor = tensor.detach().float().to("cpu", copy=True)
    return tensor.squeeze(0) if tensor.dim() == 3 else tensor


@dataclass(frozen=True)
class _Difference:
    first_token: int
    words: str

    @classmethod
    def of(cls, ours: torch.Tensor | None, theirs: torch.Tensor, tolerance: float) -> _Difference | None:
        """How far two outputs are apart, None if they agree or cannot be compared."""
        if ours is None:
            return None
        if ours.shape != theirs.shape:
            return cls(0, f"it is {list(ours.shape)} here and {list(theirs.shape)} there")
        allowed = tolerance * max(1.0, float(theirs.square().mean().sqrt()))
        apart = (ours - theirs).abs().flatten(1).nan_to_num(nan=torch.inf).amax(1)
        wrong = (apart > allowed).nonzero().flatten()
        if not len(wrong):
            return None
        return cls(
            int(wrong[0]),
            f"{len(wrong)} of {len(apart)} tokens, the first at position {int(wrong[0])}, by up to "
            f"{float(apart.max()):.2g} where {allowed:.1g} is allowed",
        )


def _inside(layer: str, ours: LayerRecord, theirs: LayerRecord, tolerance: float) -> str:
    """What of a layer's own modules agrees, and what to look at in the first that does not."""
    agree = []
    for name, output in theirs.modules.items():
        child = name.removeprefix(f"{layer}.")
        if child == name or "." in child or name not in ours.modules:
            continue
        difference = _Difference.of(ours.modules[name], output, tolerance)
        if difference is None:
            agree.append(f"`{child}`")
            continue
        agreed = f"{' and '.join(agree)} {'agree' if len(agree) > 1 else 'agrees'}, " if agree else ""
        return f"inside it {agreed}`{child}` differs first; {_advice(child, difference.first_token)}"
    if agree:
        return f"inside it {', '.join(agree)} agree: look at how they are added, and at factors between them"
    return "none of its modules can be compared; name them as in the checkpoint"


def _advice(child: str, first_token: int) -> str:
    if "norm" in child:
        return "look at its epsilon, at how it uses its weight, and at what it is given"
    if "mlp" in child or "feed_forward" in child:
        return "look at the order of gate and up in `packed`, and at the activation"
    if "att" in child and first_token > 1:
        return (
            f"the tokens before position {first_token} agree: look at the sliding window, if there is one, or at what "
            "depends on the distance of two tokens"
        )
    if "att" in child and first_token == 1:
        return (
            "the first token, which attends to itself alone, agrees: look at the norms of query and key heads, the "
            "rotary embedding and its base, and the softmax scale"
        )
    return "look at its projections, their order in `packed`, and their biases"
