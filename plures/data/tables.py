"""Tables: .csv and .parquet files and data frames with any kind of cells, read as rows for a model.

A file is read in pieces into columns of codes, each with the list of its different texts, so that a kind is found by
looking at different texts alone, and a mistake is told with its file, line and column.
"""

import csv
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plures.data import schema as schemas
from plures.data.dataset import Dataset, Target, TaskKind
from plures.data.reading import Reading
from plures.data.schema import Cells, Column, Kind, Schema
from plures.data.text import UNKNOWN, Tokenizer, pad, word_tokens, words
from plures.errors import DataError
from plures.files import read_toml

DELIMITERS = ",;\t|"
CACHED_BYTES = 20_000_000  # from this size on, what was read of a file is kept in the user's cache
PIECE = 65_536  # rows of a .parquet file that are read at a time
MOST_WORDS = 200  # of a text; longer ones are cut
LARGEST = 1e30  # of a number in a table: its variance must be a number, too
LEAST_ROWS = 20  # for which it is told that a column looks like an id


class Table(NamedTuple):
    """Columns of codes, and where each row came from."""

    name: str
    columns: dict[str, Cells]
    lines: np.ndarray  # [row], its line in its file, or its number
    files: tuple[str, ...]
    file_of: np.ndarray  # [row], its place among the files

    @property
    def n_rows(self) -> int:
        return len(self.lines)

    def where(self, row: int) -> str:
        """The place of a row, for messages."""
        return f"{self.files[self.file_of[row]]}, row {self.lines[row]}"

    def cell(self, name: str, row: int) -> str:
        cells = self.columns[name]
        return cells.texts[cells.codes[row]]

    def rows(self, at: np.ndarray) -> "Table":
        columns = {name: cells.rows(at) for name, cells in self.columns.items()}
        return self._replace(columns=columns, lines=self.lines[at], file_of=self.file_of[at])


class _Coding:
    """Columns of codes while they are read."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.known: list[dict[str, int]] = [{} for _ in names]
        self.codes: list[list[int]] = [[] for _ in names]

    def add(self, row: Iterable[str]) -> None:
        for known, codes, text in zip(self.known, self.codes, row, strict=True):
            codes.append(known.setdefault(text, len(known)))

    def table(self, name: str, lines: list[int]) -> Table:
        columns = {
            column: Cells(np.array(codes, np.int32), list(known))
            for column, known, codes in zip(self.names, self.known, self.codes, strict=True)
        }
        return Table(name, columns, np.array(lines, np.int64), (name,), np.zeros(len(lines), np.int32))


# Files


def read_table(path: Path, cache: Path | None = None) -> Table:
    """The table in a file; a large one is kept in the folder `cache`, by a hash of what is in it."""
    if not path.is_file():
        raise DataError(f"{path} is not a file: it is a folder, a pipe or a device, or it is not there.")
    kept = None
    if cache is not None and os.path.getsize(path) >= CACHED_BYTES:
        kept = cache / f"{_hash(path)}.npz"
        found = _read_kept(path, kept)
        if found is not None:
            return found
    table = read_parquet(path) if path.suffix.lower() == ".parquet" else read_csv(path)
    if table.n_rows == 0:
        raise DataError(f"{path} has no row after its header.")
    if kept is not None:
        _keep(table, kept)
    return table


def read_csv(path: Path) -> Table:
    """The table in a .csv file with a header; cells are divided by commas, semicolons, tabs or bars."""
    rows = _csv_rows(path)
    try:
        _, head = next(rows)
    except StopIteration:
        raise DataError(f"{path} is empty; it needs a line with the names of its columns.") from None
    names = _names(path, head)
    coding, lines = _Coding(names), []
    for line, row in rows:
        if len(row) != len(names):
            raise DataError(f"{path}, row {line}: {len(row)} cells, but the header has {len(names)} columns.")
        coding.add(row)
        lines.append(line)
    return coding.table(str(path), lines)


def _names(path: Path, head: list[str]) -> list[str]:
    names = [name.strip() for name in head]
    for k, name in enumerate(names):
        if not name:
            raise DataError(f"{path}: column {k + 1} of the header has no name.")
        if name in names[:k]:
            raise DataError(f"{path}: two columns are called {name!r}. Rename one of them.")
    return names


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row that is not empty."""
    encoding = _encoding(path)
    try:
        with open(path, encoding=encoding, newline="") as file:
            first = file.readline()
            delimiter = max(DELIMITERS, key=lambda mark: (_outside_quotes(first).count(mark), mark == ","))
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, strict=False)
            for row in reader:
                if row:
                    yield reader.line_num, [_with_point(cell) for cell in row] if delimiter == ";" else row
    except UnicodeDecodeError:
        line, byte = _first_bad_line(path)
        raise DataError(
            f"{path}, row {line}: the byte {byte} is not UTF-8. Save the file in one encoding, UTF-8."
        ) from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a table: {error}.") from error


_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+,\d+\s*")


def _with_point(cell: str) -> str:
    """A number with a decimal comma, as files with semicolons have it, with a point."""
    return cell.replace(",", ".") if _DECIMAL_COMMA.fullmatch(cell) else cell


def _outside_quotes(line: str) -> str:
    return re.sub(r'"[^"]*"', "", line)


def _encoding(path: Path) -> str:
    with open(path, "rb") as file:
        start = file.read(2)
    return "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def _first_bad_line(path: Path) -> tuple[int, str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError as error:
                return number, f"0x{line[error.start]:02x}"
    return 0, "?"


def read_parquet(path: Path) -> Table:
    """The table in a .parquet file, some rows at a time."""
    if importlib.util.find_spec("pyarrow") is None:
        raise DataError(f"{path} needs pyarrow to be read: pip install 'plures[data]'")
    import pyarrow  # here, because it is an extra
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = _names(path, list(file.schema_arrow.names))
        coding, n = _Coding(names), 0
        for piece in file.iter_batches(PIECE):
            texts = [[as_text(value) for value in column.to_pylist()] for column in piece.columns]
            for row in zip(*texts, strict=True):
                coding.add(row)
            n += piece.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as a .parquet file: {error}.") from error
    return coding.table(str(path), list(range(1, n + 1)))


def as_text(value: Any) -> str:
    """A cell of a .parquet file or a data frame as text; what is missing is blank."""
    if value is None or value != value:  # not a number is not equal to itself
        return ""
    if isinstance(value, (float, np.floating)):
        return repr(float(value))
    return value.isoformat(sep=" ") if hasattr(value, "isoformat") and hasattr(value, "hour") else str(value)


def from_frame(name: str, frame: Any) -> Table:
    """The table in a data frame of pandas, or of what is built like it."""
    names = _names(Path(name), [str(column) for column in frame.columns])
    coding = _Coding(names)
    for row in zip(*[[as_text(value) for value in frame[column].tolist()] for column in frame.columns], strict=True):
        coding.add(row)
    return coding.table(name, list(range(len(frame))))


def join_tables(name: str, parts: list[Table], client: str) -> Table:
    """The rows of several tables with the same columns, and a column with the name of the file of each."""
    first = parts[0]
    for part in parts[1:]:
        if list(part.columns) != list(first.columns):
            odd = sorted(set(part.columns) ^ set(first.columns)) or ["their order"]
            raise DataError(f"{part.name} and {first.name} have different columns: {', '.join(odd)}. Make them alike.")
    columns = {column: _join_cells([part.columns[column] for part in parts]) for column in first.columns}
    sizes = [part.n_rows for part in parts]
    file_of = np.repeat(np.arange(len(parts), dtype=np.int32), sizes)
    columns[client] = Cells(file_of, [Path(part.name).stem for part in parts])
    files = tuple(part.files[0] for part in parts)
    return Table(name, columns, np.concatenate([part.lines for part in parts]), files, file_of)


def _join_cells(parts: list[Cells]) -> Cells:
    known: dict[str, int] = {}
    codes = []
    for part in parts:
        place = np.array([known.setdefault(text, len(known)) for text in part.texts], np.int32)
        codes.append(place[part.codes] if len(place) else part.codes)
    return Cells(np.concatenate(codes), list(known))


# What was read of large files


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _keep(table: Table, path: Path) -> None:
    """Keep a table; that this fails, on a full disk or without the right to write, is no reason to stop."""
    texts = json.dumps({name: cells.texts for name, cells in table.columns.items()})
    arrays = {f"codes {k}": cells.codes for k, cells in enumerate(table.columns.values())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".part"), "wb") as file:
            known: dict[str, Any] = {"lines": table.lines, "texts": np.frombuffer(texts.encode(), np.uint8)}
            np.savez(file, **(known | arrays))
        os.replace(path.with_suffix(".part"), path)
    except OSError:
        path.with_suffix(".part").unlink(missing_ok=True)


def _read_kept(path: Path, kept: Path) -> Table | None:
    try:
        with np.load(kept, allow_pickle=False) as arrays:
            texts = json.loads(arrays["texts"].tobytes())
            columns = {name: Cells(arrays[f"codes {k}"], own) for k, (name, own) in enumerate(texts.items())}
            lines = arrays["lines"]
    except (OSError, ValueError, KeyError):
        return None
    return Table(str(path), columns, lines, (str(path),), np.zeros(len(lines), np.int32))


# From cells to rows


class Plan(NamedTuple):
    """What is used of a table, and as what, before any scale or category is known."""

    table: Table  # rows that have a target and a client
    kinds: dict[str, Kind]  # of the columns that are read as input
    targets: tuple[str, ...]
    kind: TaskKind
    classes: tuple[str, ...]
    client: str | None
    notes: tuple[str, ...]


def plan_table(table: Table, reading: Reading, given: Schema | None = None) -> Plan:
    """Find out what the columns are, and leave out rows that cannot be used. Raises where something is wrong."""
    targets = given.target_names if given and not reading.target else _split_names(reading.target)
    if not targets:
        raise DataError(
            f"{table.name}: say which column is to be predicted, as in --target NAME. "
            f"Its columns are: {', '.join(table.columns)}."
        )
    client = reading.client
    if client is None and given is not None and given.client in table.columns:
        client = given.client
    drop = reading.drop if given is None else ()  # a schema names what is used
    for name in (*targets, *drop, *filter(None, (client, reading.time, reading.text))):
        _refuse_missing(table, name)
    if client in targets:
        raise DataError(f"{table.name}: {client!r} cannot be both the client and what is predicted.")
    table, notes = _with_known(table, [*targets, *([client] if client else [])])
    kind, classes = _find_target(table, targets, reading, given)
    inputs = [name for name in table.columns if name not in (*targets, *drop, client, reading.text)]
    if reading.window:
        inputs += [name for name in targets if kind in ("number", "count")]  # what was before tells what comes next
    if given is not None:
        for column in given.columns:
            _refuse_missing(table, column.name)
        kinds = {column.name: column.kind for column in given.columns}
        for name, wanted in kinds.items():
            _refuse_misfits(table, name, wanted)
    else:
        kinds = {name: _kind(table, name) for name in inputs}
    if not kinds and not reading.text:
        raise DataError(f"{table.name}: no column is left to predict {', '.join(targets)} from.")
    notes += _ids(table, kinds) if given is None else ()
    return Plan(table, kinds, targets, kind, classes, client, notes)


def _refuse_missing(table: Table, name: str) -> None:
    """Raise if there is no such column."""
    if name in table.columns:
        return
    near = get_close_matches(name, list(table.columns), n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise DataError(f"{table.name} has no column {name!r}{hint} Its columns are: {', '.join(table.columns)}.")


def _split_names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _with_known(table: Table, names: list[str]) -> tuple[Table, tuple[str, ...]]:
    """The rows in which none of these columns is blank, and how many are not among them."""
    notes = []
    for name in names:
        cells = table.columns[name]
        is_known = ~np.array([schemas.is_blank(text) for text in cells.texts])[cells.codes]
        if not is_known.any():
            raise DataError(f"{table.name}: column {name!r} is blank in all rows.")
        n = int((~is_known).sum())
        if n:
            notes.append(f"{n} of {len(is_known)} rows are left out: {name!r} is blank in them")
            table = table.rows(np.flatnonzero(is_known))
    return table, tuple(notes)


def _kind(table: Table, name: str) -> Kind:
    kind, odd = schemas.find_kind(table.columns[name])
    if odd is not None:
        what = "a number" if kind == "number" else "a date as 2024-05-31"
        raise DataError(
            f"{table.where(odd)}, column {name!r}: {table.cell(name, odd)!r} is not {what}, as nearly all others there "
            f"are. Mend it, leave the cell blank, or leave the column out with --drop."
        )
    _refuse_misfits(table, name, kind)
    return kind


def _refuse_misfits(table: Table, name: str, kind: Kind) -> None:
    """Raise if a cell is not of the kind of its column, or is infinite."""
    if kind == "words":
        return
    cells, read = table.columns[name], schemas.READ[kind]
    bad = []
    for code, text in enumerate(cells.texts):
        value = None if schemas.is_blank(text) else read(text)
        if not schemas.is_blank(text) and (value is None or not abs(value) <= LARGEST):
            bad.append(code)
    at = np.flatnonzero(np.isin(cells.codes, bad))
    if len(at):
        rule = "a number that fits in 32 bits" if kind == "number" else "a date as 2024-05-31"
        raise DataError(f"{table.where(int(at[0]))}, column {name!r}: {table.cell(name, int(at[0]))!r} is not {rule}.")


def _find_target(
    table: Table, targets: tuple[str, ...], reading: Reading, given: Schema | None
) -> tuple[TaskKind, tuple[str, ...]]:
    """What is predicted, and the names of its classes."""
    if given is not None:
        kind = given.target.kind
        if kind == "classes":
            _refuse_other_classes(table, targets[0], given.classes)
        elif kind != "labels":
            _refuse_misfits(table, targets[0], "number")
        return kind, given.classes
    name = targets[0]
    column_kind, odd = schemas.find_kind(table.columns[name])
    texts = sorted({text.strip() for text in schemas.used_texts(table.columns[name]).values()})
    if odd is not None and len(targets) == 1 and reading.task not in ("classes", "binary"):
        _kind(table, name)
    kind = schemas.kind_of_task(reading.task, column_kind == "words", texts, len(targets))
    if kind == "labels":
        for each in targets:
            _as_labels(table, each)
        return kind, ()
    if len(targets) > 1:
        raise DataError(f"{table.name}: {len(targets)} columns are to be predicted, which only the task labels can.")
    if len(texts) < 2 and not reading.alone:
        raise DataError(f"{table.name}: column {name!r} is {texts[0]!r} in all rows, so there is nothing to predict.")
    if kind == "classes":
        if reading.task == "binary" and (len(texts) > 2 or (len(texts) < 2 and not reading.alone)):
            raise DataError(f"{table.name}: column {name!r} has {len(texts)} values; the task binary needs two.")
        return kind, tuple(sorted(texts, key=schemas.order_of_class))
    if column_kind != "number":
        row = next(i for i in range(table.n_rows) if schemas.as_number(table.cell(name, i)) is None)
        raise DataError(f"{table.where(row)}, column {name!r}: {table.cell(name, row)!r} is not a number.")
    _refuse_misfits(table, name, "number")
    values = schemas.numbers_of(table.columns[name], "number")
    if kind == "count" and ((values < 0) | (values != np.floor(values))).any():
        row = int(np.flatnonzero((values < 0) | (values != np.floor(values)))[0])
        raise DataError(f"{table.where(row)}, column {name!r}: {table.cell(name, row)!r} is not a count.")
    return kind, ()


def _refuse_other_classes(table: Table, name: str, classes: tuple[str, ...]) -> None:
    for code, text in schemas.used_texts(table.columns[name]).items():
        if text.strip() not in classes:
            row = int(np.flatnonzero(table.columns[name].codes == code)[0])
            raise DataError(
                f"{table.where(row)}, column {name!r}: {text.strip()!r} is not one of the classes of the schema: "
                f"{', '.join(classes)}."
            )


YES = {"1", "1.0", "yes", "y", "true", "t"}
NO = {"0", "0.0", "no", "n", "false", "f"}


def _as_labels(table: Table, name: str) -> np.ndarray:
    """[row]: 1 where a label is there, 0 where it is not."""
    cells = table.columns[name]
    for code, text in schemas.used_texts(cells).items():
        if text.strip().lower() not in YES | NO:
            row = int(np.flatnonzero(cells.codes == code)[0])
            raise DataError(f"{table.where(row)}, column {name!r}: {text!r} is not yes or no, 1 or 0, true or false.")
    return np.array([text.strip().lower() in YES for text in cells.texts], np.float32)[cells.codes]


def _ids(table: Table, kinds: dict[str, Kind]) -> tuple[str, ...]:
    """Columns that have another value in nearly every row, as ids have: nothing can be learned from them."""
    notes = []
    for name, kind in kinds.items():
        texts = schemas.used_texts(table.columns[name]).values()
        whole = kind == "number" and all(float(text).is_integer() for text in texts)
        if table.n_rows >= LEAST_ROWS and len(texts) > 0.9 * table.n_rows and (whole or kind == "words"):
            notes.append(
                f"column {name!r} has another value in nearly every row, as an id has; --drop {name} leaves it out"
            )
    return tuple(notes)


def table_dataset(name: str, table: Table, reading: Reading) -> Dataset:
    """A table as a data set; its rows become numbers when it is known which of them are for training."""
    given = schemas.from_toml(reading.schema, read_toml(Path(reading.schema))) if reading.schema else None
    plan = plan_table(table, reading, given)
    table = plan.table
    client, names = None, ()
    if plan.client:
        cells = table.columns[plan.client]
        texts = [text.strip() for text in cells.texts]
        used = sorted({texts[k] for k in np.unique(cells.codes)}, key=_natural)
        place = {text: k for k, text in enumerate(used)}
        client = np.array([place.get(text, 0) for text in texts], np.int64)[cells.codes]
        names = tuple(used)
    time = None if reading.time is None else _times(table, reading.time)
    y = raw_target(plan)
    n_outputs = {"classes": len(plan.classes), "labels": len(plan.targets)}.get(plan.kind, 1)
    waiting = np.zeros((table.n_rows, 1), np.float32)  # stands for rows that are not numbers yet
    data = Dataset(name, waiting, y, n_outputs, table.n_rows, client, 0, names, plan.classes)
    data = data._replace(target=Target(plan.kind), time=time, notes=plan.notes)
    if reading.text:
        return _texts(data, plan, reading)
    if reading.window:
        return _series(data, plan, given, reading)
    return data._replace(encode=lambda train: encode_table(data, plan, given, train))


def _texts(data: Dataset, plan: Plan, reading: Reading) -> Dataset:
    """A data set whose rows are the texts of a column."""
    cells = plan.table.columns[str(reading.text)]
    return text_dataset(data, cells.texts, cells.codes, reading.tokenizer)


def text_dataset(data: Dataset, raw: list[str], of_row: np.ndarray, tokenizer: Tokenizer | None) -> Dataset:
    """A data set whose rows are texts: row i has the text `of_row[i]`.

    They become tokens of a model that has a tokenizer, or else words of a vocabulary of the training rows.
    """
    texts = [words(one) for one in raw]
    if not any(texts):
        raise DataError(f"{data.name}: all texts are empty.")
    if tokenizer is not None:
        return data._replace(x=tokenizer.encode(raw)[of_row], n_tokens=tokenizer.n_tokens)
    length = min(MOST_WORDS, max(map(len, texts)))

    def encode(train: np.ndarray) -> Dataset:
        tokens = word_tokens(texts[k] for k in of_row[train])
        x = pad(texts, tokens, length)[of_row]
        return data._replace(x=x, n_tokens=UNKNOWN + 1 + len(tokens), encode=None)

    waiting = np.zeros((len(of_row), 1), np.int64)
    return data._replace(x=waiting, n_tokens=1, encode=encode)


def _series(data: Dataset, plan: Plan, given: Schema | None, reading: Reading) -> Dataset:
    """A data set whose rows are windows of a time series: a row is told by so many rows before it, of its client."""
    n, window = len(data.y), reading.window
    client = np.zeros(n, np.int64) if data.client is None else data.client
    when = np.arange(n, dtype=np.float64) if data.time is None else data.time
    order = np.lexsort((when, client))
    place = np.arange(n) - np.searchsorted(client[order], client[order])  # of each row in its series
    at = np.flatnonzero(place >= window)
    if not len(at):
        raise DataError(
            f"{data.name}: no client has more than {window} rows, so none can be told by the {window} before it. "
            "Use a smaller --window."
        )
    rows = order[at]  # of the table, that are told
    before = order[at[:, None] + np.arange(-window, 0)]  # [row, position]
    short = n - len(rows)
    notes = (f"{short} of {n} rows only tell others: fewer than {window} rows of their client are before them",)
    some = data._replace(
        y=data.y[rows],
        n_train=len(rows),
        client=None if data.client is None else data.client[rows],
        time=when[rows],
        x=np.zeros((len(rows), 1), np.float32),
        notes=(*data.notes, *notes),
    )

    def encode(train: np.ndarray) -> Dataset:
        whole = encode_table(data, plan, given, rows[train])
        x = np.ascontiguousarray(whole.x[before].transpose(0, 2, 1))  # [row, channel, position]
        told = tuple(note for note in whole.notes if note not in some.notes)
        return some._replace(x=x, y=whole.y[rows], target=whole.target, schema=whole.schema, notes=(*some.notes, *told))

    return some._replace(encode=encode)


def _natural(text: str) -> list[Any]:
    """Numbers in names by their value, so that site 2 comes before site 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", text)]


def _times(table: Table, name: str) -> np.ndarray:
    kind = _kind(table, name)
    if kind == "words":
        row = 0
        raise DataError(
            f"{table.where(row)}, column {name!r}: {table.cell(name, row)!r} is not a date as 2024-05-31, nor a number."
        )
    times = schemas.numbers_of(table.columns[name], kind)
    blank = np.flatnonzero(~np.isfinite(times))
    if len(blank):
        raise DataError(f"{table.where(int(blank[0]))}, column {name!r}: the time of a row must not be blank.")
    return times


def raw_target(plan: Plan) -> np.ndarray:
    """What is to be predicted: the number of a class, labels, or a number that is not scaled yet."""
    if plan.kind == "labels":
        return np.stack([_as_labels(plan.table, name) for name in plan.targets], 1)
    cells = plan.table.columns[plan.targets[0]]
    if plan.kind != "classes":
        return schemas.numbers_of(cells, "number").astype(np.float32)
    place = {name: k for k, name in enumerate(plan.classes)}
    return np.array([place.get(text.strip(), 0) for text in cells.texts], np.int64)[cells.codes]


def fit_schema(plan: Plan, train: np.ndarray) -> tuple[Schema, tuple[str, ...]]:
    """The schema by these training rows, and the columns that say nothing."""
    columns, silent = [], []
    for name, kind in plan.kinds.items():
        found = schemas.summarise(name, kind, plan.table.columns[name].rows(train))
        column = schemas.column_of(found)
        if schemas.says_nothing(column, found):
            silent.append(name)
        else:
            columns.append(column)
    if not columns:
        raise DataError(f"{plan.table.name}: every column has one value in all training rows; nothing can be learned.")
    notes = [f"column {name!r} is left out: it is the same in all training rows" for name in silent]
    target = fit_target(plan.kind, raw_target(plan)[train])
    return Schema(tuple(columns), plan.targets, target, plan.classes, plan.client), tuple(notes)


def fit_target(kind: TaskKind, values: np.ndarray) -> Target:
    """How a number to predict is scaled, by its training rows."""
    if kind == "number":
        scale = float(values.astype(np.float64).std())
        return Target(kind, float(values.astype(np.float64).mean()), scale if scale > 0 else 1.0)
    if kind == "count":
        mean = float(values.astype(np.float64).mean())
        return Target(kind, 0.0, mean if mean > 0 else 1.0)
    return Target(kind)


def encode_table(data: Dataset, plan: Plan, given: Schema | None, train: np.ndarray) -> Dataset:
    """The data set with rows as numbers: by the schema that was given, or by the training rows."""
    schema, notes = (given, ()) if given is not None else fit_schema(plan, train)
    x, unseen = encode_rows(schema.columns, plan.table)
    told = tuple(f"{n} cells of column {name!r} hold words that no training row has" for name, n in unseen)
    y = data.y
    if schema.target.is_real:
        y = ((data.y.astype(np.float64) - schema.target.shift) / schema.target.scale).astype(np.float32)
    return data._replace(
        x=x,
        y=y,
        target=schema.target,
        encode=None,
        notes=(*data.notes, *notes, *told),
        schema=schemas.to_text(schema),
    )


def encode_rows(columns: tuple[Column, ...], table: Table) -> tuple[np.ndarray, list[tuple[str, int]]]:
    """[row, number]; and the columns with words that are in no category, and how many."""
    parts, unseen = [], []
    for column in columns:
        found = schemas.encode(column, table.columns[column.name])
        parts.append(found.x)
        if found.n_other and not column.has_other:
            unseen.append((column.name, found.n_other))
    return np.concatenate(parts, 1), unseen
