"""TensorBoard: event files in DIR/NAME; look at them with `tensorboard --logdir DIR`."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from plures.runs.callbacks import Callback
from plures.runs.config import config_toml
from plures.runs.loggers import numbers
from plures.runs.results import Round
from plures.runs.state import RunState


class Logger(Callback):
    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self.writer: SummaryWriter | None = None

    def started(self, state: RunState) -> None:
        # It has a thread, which must not be there before the workers are forked.
        self.writer = SummaryWriter(str(self.folder))
        self.writer.add_text("config", f"```\n{config_toml(state.scene.config)}```")

    def played(self, state: RunState, row: Round) -> None:
        assert self.writer is not None
        for key, value in numbers(row).items():
            self.writer.add_scalar(key, value, row.round)

    def ended(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None
