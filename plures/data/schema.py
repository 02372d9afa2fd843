"""Schema: what the columns of a table are, and how their cells become numbers; clients of a federation agree on it.

A number becomes (number - mean) / scale, and a blank the mean, with a column of its own that says so. Words become one
column for each category; a word that is in none is `other`. Means, scales and categories come from training rows alone.
"""

import math
import re
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

import numpy as np

from plures.data.dataset import TASK_KINDS, Target, TaskKind
from plures.data.reading import Task
from plures.errors import DataError
from plures.files import parse_toml, to_toml

Kind = Literal["number", "date", "words"]
KINDS: tuple[Kind, ...] = ("number", "date", "words")

BLANKS = ("", "na", "n/a", "nan", "null", "<na>", "nat")  # cells that say nothing, in any case; `None` is a word
MOST_CATEGORIES = 100  # of a column; rarer words are `other`
OTHER = "(other)"
BLANK = "(blank)"
SECONDS_OF_DAY = 86400.0


class Cells(NamedTuple):
    """A column as it was read: for each row the place of its text among all that are in the column."""

    codes: np.ndarray  # [row]
    texts: list[str]

    def rows(self, at: np.ndarray) -> "Cells":
        return Cells(self.codes[at], self.texts)


class Column(NamedTuple):
    """A column of a table that is read as input."""

    name: str
    kind: Kind
    mean: float = 0.0  # of numbers, and of dates as days since 1970
    scale: float = 1.0
    has_blanks: bool = False  # whether blanks have a column of their own
    categories: tuple[str, ...] = ()  # of words, the most frequent first
    has_other: bool = False  # whether some words were too rare to have a column of their own

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        n = 1 if self.kind != "words" else len(self.categories) + self.has_other
        return n + self.has_blanks


class Schema(NamedTuple):
    """What a table is read as."""

    columns: tuple[Column, ...]
    target_names: tuple[str, ...]  # one column, or one for each label
    target: Target
    classes: tuple[str, ...] = ()  # names of the classes
    client: str | None = None

    @property
    def n_outputs(self) -> int:
        """What a model gives for a row."""
        return {"classes": len(self.classes), "labels": len(self.target_names)}.get(self.target.kind, 1)

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)


def is_blank(text: str) -> bool:
    return text.strip().lower() in BLANKS


def as_number(text: str) -> float | None:
    """The number that a text says, or None."""
    try:
        return float(text) if "_" not in text else None
    except ValueError:
        return None


_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?(Z|[+-]\d{2}:?\d{2})?)?")


def as_days(text: str) -> float | None:
    """Days since 1970 of a date as 2024-05-31 or 2024-05-31 13:45:00, or None."""
    text = text.strip()
    if not _DATE.fullmatch(text):
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    since = when.replace(tzinfo=None) - datetime(1970, 1, 1) - (when.utcoffset() or timedelta())
    return since.total_seconds() / SECONDS_OF_DAY


READ: dict[Kind, Callable[[str], float | None]] = {"number": as_number, "date": as_days}
MOSTLY = 0.9  # of different texts that are numbers: then the others are mistakes, and not words


def used_texts(cells: Cells) -> dict[int, str]:
    """The texts that stand in some row and are not blank, by their place."""
    return {int(k): cells.texts[k] for k in np.unique(cells.codes) if not is_blank(cells.texts[k])}


def find_kind(cells: Cells) -> tuple[Kind, int | None]:
    """What a column holds, and a row that does not fit where nearly all others do."""
    texts = used_texts(cells)
    kinds: tuple[Kind, Kind] = ("number", "date")
    for kind in kinds:
        wrong = [k for k, text in texts.items() if READ[kind](text) is None]
        if texts and not wrong:
            return kind, None
        if len(texts) >= 10 and len(wrong) <= (1 - MOSTLY) * len(texts):
            return kind, int(np.flatnonzero(np.isin(cells.codes, wrong))[0])
    return "words", None


def numbers_of(cells: Cells, kind: Kind) -> np.ndarray:
    """[row]: numbers, or days since 1970; not a number for blanks."""
    read = READ[kind]
    known = [math.nan if is_blank(text) else read(text) for text in cells.texts]
    return np.array([math.nan if value is None else value for value in known], np.float64)[cells.codes]


def words_of(cells: Cells) -> list[str]:
    """The text of each code, without blanks around it."""
    return [BLANK if is_blank(text) else text.strip() for text in cells.texts]


class Summary(NamedTuple):
    """What a column's training rows say of it: enough to make a schema, or to join those of several clients."""

    name: str
    kind: Kind
    n: int  # rows that are not blank
    n_blank: int
    mean: float = 0.0
    variance: float = 0.0
    counts: tuple[tuple[str, int], ...] = ()  # of each word


def summarise(name: str, kind: Kind, cells: Cells) -> Summary:
    """What some rows of a column say of it."""
    if kind != "words":
        values = numbers_of(cells, kind)
        known = values[np.isfinite(values)]
        mean, variance = (float(known.mean()), float(known.var())) if len(known) else (0.0, 0.0)
        return Summary(name, kind, len(known), len(values) - len(known), mean, variance)
    words = words_of(cells)
    counts: dict[str, int] = {}
    for code, n in enumerate(np.bincount(cells.codes, minlength=len(words)).tolist()):
        if n:
            counts[words[code]] = counts.get(words[code], 0) + n
    n_blank = counts.pop(BLANK, 0)
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    return Summary(name, kind, sum(counts.values()), n_blank, counts=tuple(ordered))


def join(parts: list[Summary]) -> Summary:
    """What the rows of several clients say together."""
    first = parts[0]
    n, n_blank = sum(part.n for part in parts), sum(part.n_blank for part in parts)
    if first.kind == "words":
        counts: dict[str, int] = {}
        for part in parts:
            for word, k in part.counts:
                counts[word] = counts.get(word, 0) + k
        return first._replace(
            n=n, n_blank=n_blank, counts=tuple(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))
        )
    mean = sum(part.n * part.mean for part in parts) / n if n else 0.0
    variance = sum(part.n * (part.variance + (part.mean - mean) ** 2) for part in parts) / n if n else 0.0
    return first._replace(n=n, n_blank=n_blank, mean=mean, variance=variance)


def column_of(found: Summary) -> Column:
    """How a column is read, from what its training rows say."""
    blanks = found.n_blank > 0
    if found.kind == "words":
        kept = tuple(word for word, _ in found.counts[:MOST_CATEGORIES])
        return Column(found.name, "words", has_blanks=blanks, categories=kept, has_other=len(found.counts) > len(kept))
    scale = math.sqrt(found.variance)
    return Column(found.name, found.kind, found.mean, scale if scale > 0 else 1.0, blanks)


def says_nothing(column: Column, found: Summary) -> bool:
    """Whether all rows have the same cell."""
    if column.has_blanks and found.n:
        return False
    return len(column.categories) <= 1 if column.kind == "words" else found.variance == 0


class Encoded(NamedTuple):
    """A column as numbers, and how many of its words are in no category."""

    x: np.ndarray  # [row, width]
    n_other: int


def encode(column: Column, cells: Cells) -> Encoded:
    """The cells of a column as numbers."""
    n = len(cells.codes)
    if column.kind != "words":
        values = numbers_of(cells, column.kind)
        is_missing = ~np.isfinite(values)
        scaled = np.where(is_missing, 0.0, (values - column.mean) / column.scale)
        parts = [scaled, is_missing] if column.has_blanks else [scaled]
        return Encoded(np.stack(parts, 1).astype(np.float32), 0)
    place = {word: k for k, word in enumerate(column.categories)}
    other = len(column.categories) if column.has_other else -1
    blank = len(column.categories) + column.has_other if column.has_blanks else -1
    of_code = np.array([blank if word == BLANK else place.get(word, other) for word in words_of(cells)], np.int64)
    is_other = np.array([word != BLANK and word not in place for word in words_of(cells)])
    x = np.zeros((n, column.width), np.float32)
    at = of_code[cells.codes]
    known = np.flatnonzero(at >= 0)
    x[known, at[known]] = 1.0
    return Encoded(x, int(is_other[cells.codes].sum()))


# As a file


def to_text(schema: Schema) -> str:
    """The schema as TOML, which can be edited."""
    target: dict[str, Any] = {"columns": list(schema.target_names), "kind": schema.target.kind}
    if schema.target.is_real:
        target |= {"shift": schema.target.shift, "scale": schema.target.scale}
    if schema.classes:
        target["classes"] = list(schema.classes)
    columns = []
    for column in schema.columns:
        about: dict[str, Any] = {"name": column.name, "kind": column.kind, "has_blanks": column.has_blanks}
        if column.kind == "words":
            about |= {"categories": list(column.categories), "has_other": column.has_other}
        else:
            about |= {"mean": column.mean, "scale": column.scale}
        columns.append(about)
    out: dict[str, Any] = {"target": target, "column": columns}
    return to_toml(({"client": schema.client} if schema.client else {}) | out)


def parse(text: str) -> dict[str, Any]:
    """The values in the text of a schema, which may come from outside."""
    try:
        return parse_toml(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"a schema is not TOML: {error}") from None


def order_of_class(name: str) -> tuple[float, str]:
    """Classes that are numbers by their value, others by their names."""
    return as_number(name) or 0.0, name


def from_toml(name: str, content: dict[str, Any]) -> Schema:
    """The schema in a file, checked: a mistake is told with the column in which it is."""
    try:
        about = content["target"]
        target = Target(about["kind"], float(about.get("shift", 0.0)), float(about.get("scale", 1.0)))
        columns = tuple(_column(name, each) for each in content["column"])
        names = tuple(map(str, about["columns"]))
        schema = Schema(columns, names, target, tuple(map(str, about.get("classes", ()))), content.get("client"))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{name} is not a schema: {what}. Make it again with `plures data schema`.") from None
    if target.kind not in TASK_KINDS or not names or not columns or target.scale <= 0:
        raise DataError(
            f"{name}: the target needs columns, a scale above 0 and a kind ({', '.join(TASK_KINDS)}), "
            "and there must be at least one other column."
        )
    if target.kind == "classes" and len(schema.classes) < 2:
        raise DataError(f"{name}: the target {names[0]!r} has {len(schema.classes)} classes; it needs at least two.")
    _refuse_twice(name, [column.name for column in columns])
    return schema


def _column(name: str, about: dict[str, Any]) -> Column:
    column = Column(
        str(about["name"]),
        about["kind"],
        float(about.get("mean", 0.0)),
        float(about.get("scale", 1.0)),
        bool(about.get("has_blanks", False)),
        tuple(map(str, about.get("categories", ()))),
        bool(about.get("has_other", False)),
    )
    if column.kind not in KINDS:
        raise DataError(f"{name}: column {column.name!r} is of kind {column.kind!r}; it must be {', '.join(KINDS)}.")
    if not (math.isfinite(column.mean) and math.isfinite(column.scale) and column.scale > 0):
        raise DataError(f"{name}: column {column.name!r} needs a finite mean and a scale above 0.")
    _refuse_twice(f"{name}, column {column.name!r}", column.categories)
    return column


def _refuse_twice(where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise DataError(f"{where}: {name!r} is there twice. Leave one of them out.")
        seen.add(name)


def kind_of_task(task: Task | None, is_words: bool, values: list[str], n_targets: int) -> TaskKind:
    """What is predicted: as the user says, or as the column looks."""
    if task is not None:
        return "classes" if task == "binary" else task
    if n_targets > 1:
        return "labels"
    if is_words:
        return "classes"
    numbers = {as_number(value) for value in values}
    is_code = all(number is not None and number.is_integer() for number in numbers)
    return "classes" if is_code and len(numbers) <= MOST_CODES else "number"


MOST_CODES = 10  # different whole numbers in a target that are taken for classes
