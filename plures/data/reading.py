"""Reading: what a user says of a table, of images or of texts, so that they can be read."""

from typing import Literal, NamedTuple

from plures.data.text import Tokenizer

Task = Literal["classes", "binary", "labels", "number", "count"]


class Reading(NamedTuple):
    """How a table, images or texts are to be read; empty where the data itself says it."""

    client: str | None = None  # the column that says whose row it is
    target: str | None = None  # the column to predict; several, with commas, are labels
    drop: tuple[str, ...] = ()  # columns that are not used
    time: str | None = None  # the column that says when a row was
    text: str | None = None  # the column of texts
    window: int = 0  # rows before a row that tell it, of a time series
    schema: str | None = None  # a file with columns, scales and categories
    image_size: int = 0  # pixels that images are scaled to
    task: Task | None = None
    tokenizer: Tokenizer | None = None  # of the model, if it has its own; else words of the training rows are tokens
    alone: bool = False  # whether other clients, with classes of their own, have other rows of the same table

    @property
    def is_table(self) -> bool:
        """Whether it says anything that only a table can have."""
        return bool(self.client or self.target or self.drop or self.time or self.text or self.window or self.schema)
