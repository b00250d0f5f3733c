"""`forge sample RUN`: prints the text that a step of a run reads, for all types of sources."""

import argparse
import sys
from pathlib import Path

from forge_data.loading.sample import sample_lines, with_rollbacks
from forge_data.order.mixing import Run
from forge_resilience.exit_codes import ExitCode

from forge_trainer.run_dir.files import read_job


def show_sample(options: argparse.Namespace) -> ExitCode:
    """Print the text of the sequences of a step; an image is shown as its placeholder token.

    Raises:
        DataError: there is no such step or rank, or data are missing.
    """
    job = read_job(Path(options.directory))
    lines = sample_lines(
        with_rollbacks(job.data, Path(options.directory)),
        Run(job.batch_sizes.at(job.train.steps - 1), job.train.steps),
        options.step,
        options.rank,
        options.world_size,
        options.limit,
        job.batch_sizes,
        job.model.items(),
    )
    for line in lines:
        sys.stdout.write(f"{line}\n")
    return ExitCode.DONE
