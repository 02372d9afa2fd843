"""TensorBoard: event files in DIR/NAME; look at them with `tensorboard --logdir DIR`."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from ..config import to_toml
from ..rows import Round
from ..run import Course, Watcher
from . import numbers


class Logger(Watcher):
    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self.writer: SummaryWriter | None = None

    def started(self, run: Course) -> None:
        # It has a thread, which must not be there before the workers are forked.
        self.writer = SummaryWriter(str(self.folder))
        self.writer.add_text("config", f"```\n{to_toml(run.scene.config)}```")

    def played(self, run: Course, row: Round) -> None:
        assert self.writer is not None
        for key, value in numbers(row).items():
            self.writer.add_scalar(key, value, row.round)

    def ended(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
