"""The command `doctor`: what is wrong with this machine, and what to do about it."""

from __future__ import annotations

import dataclasses

import typer

from tritonllm.cli.listing import AsJson
from tritonllm.cli.terminal import print_json


def doctor(as_json: AsJson = False) -> None:
    """Look at GPU, driver, torch, Triton, compiler, cache folder, interpreter and plugins.

    Each problem comes with its fix. The exit code is 1 if there is one; a note is none.
    """
    from tritonllm.cli.environment import PROBLEM, examine

    findings = list(examine())
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        for finding in findings:
            typer.echo(f"{finding.status:8} {finding.what:12} {finding.detail}")
            if finding.fix:
                typer.echo(f"{'':21} -> {finding.fix}")
    if any(finding.status == PROBLEM for finding in findings):
        raise typer.Exit(1)
