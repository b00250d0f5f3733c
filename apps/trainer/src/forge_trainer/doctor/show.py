"""Run all checks and tell what they found."""

import argparse
import json
import sys
from pathlib import Path

from forge_resilience.exit_codes import ExitCode

from forge_trainer.doctor.folder import folder_findings
from forge_trainer.doctor.machine import machine_findings
from forge_trainer.doctor.slurm import slurm_findings


def examine(options: argparse.Namespace) -> int:
    """`forge doctor`.

    Returns:
        0, or 1 if something is wrong; warnings do not count.
    """
    findings = [*machine_findings(), *folder_findings(Path(options.folder)), *slurm_findings()]
    if options.json:
        lines = [json.dumps([finding.as_dict() for finding in findings], indent=2)]
    else:
        lines = [line for finding in findings for line in finding.lines()]
        bad = sum(finding.state == "wrong" for finding in findings)
        doubtful = sum(finding.state == "warning" for finding in findings)
        lines.append(f"{bad} wrong, {doubtful} to look at")
    sys.stdout.write("\n".join(lines) + "\n")
    return ExitCode.FAILED if any(finding.state == "wrong" for finding in findings) else ExitCode.DONE
