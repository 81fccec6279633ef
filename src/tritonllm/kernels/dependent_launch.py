"""Programmatic dependent launch (PDL): a kernel starts while the one before it on the stream still runs.

A kernel takes part if its plan sets the option `launch_pdl=True` together with a constexpr `PDL`, which makes it call
`launch_dependents`, at its start unless it says why not, and `wait_for_previous` in every program, even where there is
nothing to wait for: only then does the end of a kernel mean the end of all kernels before it.

Before the wait a kernel may read what no kernel in flight can have written, which is to say parameters of the model;
everything else it reads after the wait, and it writes nothing before.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, "griddepcontrol". The
instructions are written here as assembly, so that builds of Triton without the CUDA extras can import this.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tritonllm.kernels.launch import supports_pdl


@triton.jit
def launch_dependents():
    """Let the next kernel start as soon as every program of this one has come here. It orders no memory."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_previous():
    """Wait until the previous kernel has ended and its writes can be read. At once if there was no such launch."""
    tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def start_after_previous(PDL: tl.constexpr):
    """First line of a kernel that reads nothing early: its launch overlaps the previous kernel, its work does not."""
    if PDL:
        launch_dependents()
        wait_for_previous()


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Compiler options of a kernel that takes part, for a device that `supports_pdl`; none for any other."""
    return {"launch_pdl": True} if supports_pdl(device) else {}
