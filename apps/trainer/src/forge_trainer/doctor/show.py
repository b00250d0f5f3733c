"""Runs the requested checks and prints their findings."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from forge_resilience.exit_codes import ExitCode

from forge_trainer.doctor.accounts import hub_findings, wandb_findings
from forge_trainer.doctor.finding import Finding
from forge_trainer.doctor.folder import folder_findings
from forge_trainer.doctor.machine import gpu_findings, machine_findings
from forge_trainer.doctor.network import network_findings
from forge_trainer.doctor.slurm import slurm_findings

CHECKS: dict[str, Callable[[Path], list[Finding]]] = {
    "train": lambda folder: [*machine_findings(), *folder_findings(folder)],
    "slurm": lambda folder: [*slurm_findings(), *network_findings()],
    "gpu": lambda folder: required(gpu_findings()),
    "wandb": lambda folder: wandb_findings(),
    "hf": lambda folder: hub_findings(),
}
"""The checks by name; each takes the folder of runs and returns findings."""

USUAL = ("train", "slurm")


def required(findings: list[Finding]) -> list[Finding]:
    """Return the findings with `skipped` replaced by `wrong`."""
    why = "it was asked for"
    return [
        Finding(one.name, "wrong", one.found, why, "ask for a node that has it")
        if one.state == "skipped"
        else one
        for one in findings
    ]


def examine(options: argparse.Namespace) -> int:
    """Run `forge doctor`.

    Returns:
        0, or 1 if a finding is `wrong`; warnings do not count.
    """
    asked = dict.fromkeys(options.purposes or USUAL)
    findings = [found for purpose in asked for found in CHECKS[purpose](Path(options.folder))]
    if options.json:
        lines = [json.dumps([finding.as_dict() for finding in findings], indent=2)]
    else:
        lines = [line for finding in findings for line in finding.lines()]
        bad = sum(finding.state == "wrong" for finding in findings)
        doubtful = sum(finding.state == "warning" for finding in findings)
        lines.append(f"{bad} wrong, {doubtful} to look at")
    sys.stdout.write("\n".join(lines) + "\n")
    return ExitCode.FAILED if any(finding.state == "wrong" for finding in findings) else ExitCode.DONE
