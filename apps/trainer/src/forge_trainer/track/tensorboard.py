"""TensorBoard event files."""

from pathlib import Path

from torch.utils.tensorboard.writer import SummaryWriter

from forge_trainer.track.base import Record


class TensorBoard:
    """A tracker that writes scalars; steps after the resumed step are purged."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def log(self, record: Record) -> None:
        """See `Tracker.log`."""
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, int(record["step"]))

    def close(self) -> None:
        """See `Tracker.close`."""
        self._writer.close()
