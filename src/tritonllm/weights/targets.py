"""Which checkpoint tensors a model needs, under the names that the checkpoint gives them."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from tritonllm.errors import CheckpointError
from tritonllm.models.parameters import CheckpointTensor, HoldsCheckpointTensors


@dataclasses.dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes: `parameter` of `module`, or one slot of it if it is fused."""

    module: nn.Module
    tensor: CheckpointTensor
    parameter: nn.Parameter

    def load(self, tensor: torch.Tensor) -> None:
        """Copy the whole, unsharded tensor (of the announced shape) into the parameter, casting to its dtype."""
        leaf, slot, _ = self.tensor
        if isinstance(self.module, HoldsCheckpointTensors):
            self.module.load_tensor(leaf, slot, tensor)
        else:
            with torch.no_grad():
                getattr(self.module, leaf).copy_(tensor)

    def reload(self, tensor: torch.Tensor) -> bool:
        """`load` over what another tensor left, and tell whether that changed nothing.

        What was there waits on the CPU: memory that it took on a GPU would be missing from the KV pool.
        """
        before = self.parameter.detach().to("cpu", copy=True)
        self.load(tensor)
        return torch.equal(before, self.parameter.detach().cpu())


def find_targets(model: nn.Module) -> tuple[dict[str, Target], dict[str, str]]:
    """Walk a model once and name every tensor that it needs.

    Args:
        model: modules that implement `HoldsCheckpointTensors` speak for their own parameters; the parameters of any
            other module are whole tensors under their own name. `model.packed`, if there, maps the checkpoint's name
            segment to the fused module's segment and slot, e.g. {"q_proj": ("qkv_proj", "q")}.

    Returns:
        `(targets, shared)`: targets by checkpoint name, and the names of parameters that are shared with one of these
        (a tied head), which need no tensor of their own, each with the name that it is shared with.

    Raises:
        CheckpointError: a slot is missing from `model.packed`, or two parameters ask for one name.
    """
    segments = {destination: segment for segment, destination in getattr(model, "packed", {}).items()}
    targets: dict[str, Target] = {}
    shared: dict[str, str] = {}
    owners: dict[nn.Parameter, str] = {}
    # The head goes last, so that of a tied pair the embedding is the owner, as in transformers.
    for path, module in sorted(model.named_modules(), key=lambda item: item[0].split(".")[-1] == "lm_head"):
        own = dict(module.named_parameters(recurse=False))
        fresh = {name: parameter for name, parameter in own.items() if parameter not in owners}
        shared |= {_join(path, name): owners[own[name]] for name in own.keys() - fresh.keys()}
        if not fresh:
            continue
        owners |= {parameter: _join(path, name) for name, parameter in fresh.items()}
        for needed in _announced(module, fresh):
            name = _checkpoint_name(path, needed, segments)
            if name in targets:
                raise CheckpointError(f"Two parameters of {type(model).__name__} ask for checkpoint tensor {name!r}.")
            parameter = fresh[needed.leaf] if needed.leaf in fresh else next(iter(fresh.values()))
            targets[name] = Target(module, needed, parameter)
    return targets, shared


def _announced(module: nn.Module, fresh: dict[str, nn.Parameter]) -> list[CheckpointTensor]:
    if isinstance(module, HoldsCheckpointTensors):
        return list(module.checkpoint_tensors())
    return [CheckpointTensor(name, None, tuple(parameter.shape)) for name, parameter in fresh.items()]


def _checkpoint_name(path: str, needed: CheckpointTensor, segments: dict[tuple[str, str], str]) -> str:
    if needed.slot is None:
        return _join(path, needed.leaf)
    parent, _, fused = path.rpartition(".")
    segment = segments.get((fused, needed.slot))
    if segment is None:
        raise CheckpointError(
            f"Module {path!r} has a slot {needed.slot!r} that the model's `packed` table does not name: "
            f"add an entry with the value {(fused, needed.slot)!r}."
        )
    return _join(_join(parent, segment), needed.leaf)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
