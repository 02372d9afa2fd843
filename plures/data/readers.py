"""Readers: .npz files, and folders with one .npz, .csv or .txt file per client."""

import csv
import math
import os
import zipfile
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from plures.data import text
from plures.data.dataset import Dataset, check, check_range
from plures.errors import DataError, UsageError
from plures.files import in_bytes

Arrays = tuple[Any, ...] | dict[str, Any]  # (x, y), (x, y, client), or arrays by name

MOST_UNPACKED = 200  # times the size of a file, from a gigabyte on
LEAST_WINDOWS = 3  # rows that a client with text must have: some to train on, and one to test on
KEYS = ("x", "y", "client", "is_test")  # arrays in an .npz file
_WIDEST = 1_000_000  # larger labels and tokens are probably identifiers or hashes, and would need a model of that width


def scale(x: np.ndarray, largest: int) -> np.ndarray:
    """Integers from 0 to `largest` as float32 from -1 to 1."""
    scaled = np.ascontiguousarray(x, dtype=np.float32)
    scaled /= largest  # in place: the larger sets fill most of a gigabyte
    scaled -= 0.5
    scaled /= 0.5
    return scaled


# --- .npz files ---


def read_npz(name: str, path: Path) -> Dataset:
    """The data set in an .npz file."""
    if not os.path.exists(path):
        raise DataError(
            f"{name} does not exist. Give the path of an .npz file, or a name that `plures list data` prints."
        )
    return from_arrays(name, read_arrays(path, name, KEYS))


def _refuse_misspelled(name: str, given: Iterable[str]) -> None:
    """An array that is called nearly as one of ours would be left out in silence: refuse it."""
    others = [key for key in given if key not in KEYS]
    for key in KEYS:
        near = get_close_matches(key, others, n=1, cutoff=0.7)
        if near and key not in given:
            raise DataError(f"{name} holds an array {near[0]!r}; did you mean {key!r}? Rename it, or leave it out.")


def from_arrays(name: str, arrays: dict[str, np.ndarray]) -> Dataset:
    """The data set that these arrays hold, checked."""
    _refuse_misspelled(name, list(arrays))
    missing = [key for key in ("x", "y") if key not in arrays]
    if missing:
        raise DataError(
            f"{name} holds no {' and no '.join(map(repr, missing))}. "
            "It needs 'x' (rows) and 'y' (labels), and may have 'client' and 'is_test'."
        )
    x = _rows(name, arrays["x"])
    is_tokens = x.dtype.kind == "i"
    y = _integers(name, "y", arrays["y"], x.shape if is_tokens else ())
    client = _integers(name, "client", arrays["client"], ()) if "client" in arrays else None
    check_range(name, "label", y, _WIDEST)
    if is_tokens:
        check_range(name, "token", x, _WIDEST)
    n_classes, n_tokens = int(y.max(initial=-1)) + 1, int(x.max(initial=-1)) + 1 if is_tokens else 0
    dataset = Dataset(name, x, y, n_classes, len(y), client, n_tokens)
    check(dataset)  # before rows are reordered, so that messages number them as in the file
    if "is_test" not in arrays:
        return dataset
    _check_is_test(name, arrays["is_test"], len(y))
    return _put_train_first(dataset, arrays["is_test"])


def as_dataset(name: str, data: "Dataset | Arrays") -> Dataset:
    """A data set from what Python users have: one already, a tuple (x, y) or (x, y, client), or a dict of arrays."""
    if isinstance(data, Dataset):
        data = data._replace(x=_rows(data.name, data.x))
        check(data)
        return data
    if isinstance(data, tuple):
        if len(data) not in (2, 3):
            raise UsageError(f"data as a tuple is (x, y) or (x, y, client), got {len(data)} items")
        data = dict(zip(("x", "y", "client"), data, strict=False))
    if not isinstance(data, dict):
        raise UsageError(f"data is a name, a path, a Dataset, a tuple or a dict of arrays, got {type(data).__name__}")
    return from_arrays(name, {key: np.asarray(value) for key, value in data.items()})


def _check_is_test(name: str, is_test: np.ndarray, n_rows: int) -> None:
    if is_test.shape != (n_rows,) or is_test.dtype.kind not in "biu" or not np.isin(is_test, (0, 1)).all():
        raise DataError(
            f"{name}: 'is_test' has shape {is_test.shape} and type {is_test.dtype}; "
            f"it needs 0 or 1 for each of the {n_rows} rows."
        )


def _put_train_first(dataset: Dataset, is_test: np.ndarray) -> Dataset:
    """The data set with training rows first and test rows after them, each part in its order."""
    name, x, y, client = dataset.name, dataset.x, dataset.y, dataset.client
    order = np.argsort(is_test, kind="stable")
    n_train = len(y) - int(is_test.sum())
    if n_train == 0:
        raise DataError(f"{name}: 'is_test' is 1 for all {len(y)} rows; at least one must be for training.")
    client = None if client is None else client[order]
    return dataset._replace(x=x[order], y=y[order], n_train=n_train, client=client)


def _rows(name: str, x: np.ndarray) -> np.ndarray:
    """x in the form that models take."""
    if x.ndim < 2:
        raise DataError(f"{name}: 'x' has shape {x.shape}; it needs a first axis of rows and at least one more.")
    if x.dtype == np.uint8:
        return scale(x[:, None] if x.ndim == 3 else x, 255)
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):  # numbers too large for float32 become infinity, which `check` reports
            return np.ascontiguousarray(x, dtype=np.float32)
    if np.can_cast(x.dtype, np.int64) and x.dtype.kind in "iu":
        return np.ascontiguousarray(x, dtype=np.int64)
    raise DataError(f"{name}: 'x' has type {x.dtype}; it must be floats, uint8 (images) or other integers (tokens).")


def _integers(name: str, key: str, column: np.ndarray, or_shape: tuple[int, ...]) -> np.ndarray:
    """An integer for each row, or integers of the shape `or_shape`."""
    if column.ndim != 1 and (column.ndim == 0 or column.shape != or_shape):
        besides = f", or the shape {or_shape} of x, with a number for each token" if or_shape else ""
        raise DataError(
            f"{name}: {key!r} has shape {column.shape}; it needs one axis, with a number for each row{besides}."
        )
    if column.dtype.kind not in "iu" or not np.can_cast(column.dtype, np.int64):
        raise DataError(f"{name}: {key!r} has type {column.dtype}; it must be integers that fit in int64.")
    return column.astype(np.int64)


def refuse_unreadable(path: Path, name: str) -> None:
    """Raise for what is there and is no file of rows: a pipe would be waited for without end."""
    if path.exists() and not path.is_file():
        raise DataError(f"{name} is not a file: {path} is a folder, a pipe or a device.")


def _refuse_bombs(name: str, archive: zipfile.ZipFile) -> None:
    """Raise if the arrays would not fit into memory, before any of them is unpacked."""
    n_bytes = sum(entry.file_size for entry in archive.infolist())
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packed = sum(entry.compress_size for entry in archive.infolist())
    if n_bytes > room // 2 or (n_bytes > 1 << 30 and n_bytes > MOST_UNPACKED * packed):
        raise DataError(
            f"{name} has {in_bytes(packed)} and would take {in_bytes(n_bytes)} when it is unpacked; this machine has "
            f"{in_bytes(room)}. Write it again with fewer or smaller numbers, or without compression."
        )


def read_arrays(file: Path | IO[bytes], name: str, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Those arrays of an .npz file whose names are in `keys`."""
    if isinstance(file, Path):
        refuse_unreadable(file, name)
        try:
            with open(file, "rb") as opened:  # numpy would leave a broken file open
                return read_arrays(opened, name, keys)
        except OSError as error:
            raise DataError(f"{name} is not an .npz file that can be read: {error.strerror or error}.") from error
    # For a broken file numpy may raise nearly anything, from BadZipFile to SyntaxError: hence `Exception`.
    try:
        archive: Any = np.load(file, allow_pickle=False)
    except Exception as error:
        raise DataError(
            f"{name} is not an .npz file that can be read: {error}. Write it again with numpy.savez."
        ) from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(
            f"{name} holds a single array, not an .npz archive. Write it with numpy.savez(path, x=..., y=...)."
        )
    arrays = {}
    with archive:
        assert archive.zip is not None
        _refuse_bombs(name, archive.zip)
        if keys == KEYS:
            _refuse_misspelled(name, list(archive))
        for key in keys:
            if key not in archive:
                continue
            try:
                arrays[key] = archive[key]
            except Exception as error:
                raise DataError(
                    f"{name}: {key!r} cannot be read: {error}. Write it as an array of numbers with numpy.savez."
                ) from error
            if not isinstance(arrays[key], np.ndarray):  # numpy returns bytes for what is not an array
                raise DataError(f"{name}: {key!r} is not an array. Write it as an array of numbers with numpy.savez.")
    return arrays


# --- folders with one file per client ---


def read_folder(name: str, folder: Path) -> Dataset:
    """One file per client, with the name of the client: all of them .npz, all .csv or all .txt.

    An .npz file holds `x` and `y`, and may hold `is_test`. A .csv file has a row of numbers and a label in
    each line, after a header if there is one; the label is in the column `label` or `y`, or else in the
    last one, and is a whole number from 0 or a word. A .txt file is for predicting the next character;
    clients with fewer than LEAST_WINDOWS rows are left out.
    """
    files = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.stem)
    kinds = {path.suffix.lower(): path.name for path in files}
    if len(kinds) != 1 or not set(kinds) <= set(_FOLDERS):
        raise DataError(
            f"{name} holds {' and '.join(sorted(kinds.values())) or 'no file'}; a folder must hold "
            f"one file for each client, all of one kind ({', '.join(_FOLDERS)}), and nothing else."
        )
    dataset = _FOLDERS[next(iter(kinds))](name, files)
    check(dataset)
    return dataset


def _read_npz_files(name: str, files: list[Path]) -> Dataset:
    arrays = [read_arrays(file, str(file), ("x", "y", "is_test")) for file in files]
    tests = [found.pop("is_test", None) for found in arrays]
    parts = [from_arrays(str(file), found) for file, found in zip(files, arrays, strict=True)]
    first = parts[0]
    for file, part, is_test in zip(files, parts, tests, strict=True):
        if (part.x.shape[1:], part.x.dtype, part.y.ndim) != (first.x.shape[1:], first.x.dtype, first.y.ndim):
            raise DataError(
                f"{file} has rows of shape {part.x.shape[1:]} and type {part.x.dtype} with labels of shape "
                f"{part.y.shape[1:]}, but {files[0].name} has {first.x.shape[1:]}, {first.x.dtype} and "
                f"{first.y.shape[1:]}. Make them alike in all files."
            )
        if (is_test is None) != (tests[0] is None):
            raise DataError(f"'is_test' is in only one of {file} and {files[0].name}. Put it into all files, or none.")
        if is_test is not None:
            _check_is_test(str(file), is_test, len(part.y))
    dataset = _join(name, files, [part.x for part in parts], [part.y for part in parts])
    dataset = dataset._replace(
        n_classes=max(part.n_classes for part in parts), n_tokens=max(part.n_tokens for part in parts)
    )
    given = [is_test for is_test in tests if is_test is not None]
    return _put_train_first(dataset, np.concatenate(given)) if given else dataset


def read_csv_file(name: str, path: Path) -> Dataset:
    """A single .csv file of numbers and a label, as in a folder of them; its rows have no clients."""
    dataset = _read_csv_files(name, [path])._replace(client=None, client_names=())
    check(dataset)
    return dataset


def _read_csv_files(name: str, files: list[Path]) -> Dataset:
    tables = [_read_table(file) for file in files]
    header, n_columns = tables[0].header, len(tables[0].rows[0])
    for file, table in zip(files, tables, strict=True):
        if len(table.rows[0]) != n_columns or table.header != header:
            raise DataError(
                f"{file} has {len(table.rows[0])} columns and {_header_text(table.header)}, but {files[0].name} has "
                f"{n_columns} and {_header_text(header)}. Make them alike in all files."
            )
    at = next((header.index(key) for key in ("label", "y") if key in header), n_columns - 1)
    x = [_numbers(file, table, at) for file, table in zip(files, tables, strict=True)]
    y, n_classes, class_names = _labels(files, tables, at)
    return _join(name, files, x, y)._replace(n_classes=n_classes, class_names=class_names)


def read_txt_files(name: str, files: list[Path]) -> Dataset:
    """Rows of characters, labelled with the next characters. Files with fewer than LEAST_WINDOWS rows are left out."""
    texts = []
    for file in files:
        refuse_unreadable(file, str(file))
        try:
            texts.append(file.read_text("utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file} cannot be read as text in UTF-8: {error}. Write it again.") from error
    characters = text.alphabet(texts)
    pairs = [text.windows(content, characters) for content in texts]
    kept = [i for i, (x, _) in enumerate(pairs) if len(x) >= LEAST_WINDOWS]
    if not kept:
        raise DataError(
            f"{name}: none of {len(files)} files has the {LEAST_WINDOWS * text.WINDOW + 1} characters that make "
            f"{LEAST_WINDOWS} rows of {text.WINDOW}. Use longer texts."
        )
    n_tokens = 1 + len(characters)  # one more for other characters
    dataset = _join(name, [files[i] for i in kept], [pairs[i][0] for i in kept], [pairs[i][1] for i in kept])
    return dataset._replace(n_classes=n_tokens, n_tokens=n_tokens)


_FOLDERS = {".npz": _read_npz_files, ".csv": _read_csv_files, ".txt": read_txt_files}


def _join(name: str, files: list[Path], x: list[np.ndarray], y: list[np.ndarray]) -> Dataset:
    """The rows of all files, with one client per file. The caller sets the number of classes."""
    client = np.repeat(np.arange(len(files)), [len(part) for part in y])
    names = tuple(file.stem for file in files)
    return Dataset(name, np.concatenate(x), np.concatenate(y), 0, len(client), client, 0, names)


# --- .csv files ---


class _Table(NamedTuple):
    """The cells of a .csv file."""

    header: list[str]  # in lower case; empty if the file has none
    rows: list[list[str]]
    lines: list[int]  # the line of each row in the file


def csv_rows(path: Path) -> list[tuple[int, list[str]]]:
    """(number of the line, cells) for each line that is not empty."""
    refuse_unreadable(path, str(path))
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            return [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV in UTF-8: {error}. Write it again.") from error


def _read_table(path: Path) -> _Table:
    """A table whose rows have equal lengths. Its first line is a header if it has a column `label` or no number."""
    found = csv_rows(path)
    header = [cell.strip().lower() for cell in found[0][1]] if found else []
    if "label" not in header and any(_is_number(cell) for cell in header):
        header = []
    width = len(found[0][1]) if found else 0
    found = found[1:] if header else found
    if not found:
        raise DataError(f"{path} has no rows. Each line must be a row: numbers and a label, with commas between.")
    for line, row in found:
        if len(row) != width or width < 2:
            raise DataError(
                f"{path}, line {line}: {len(row)} cells, the first line has {width}. "
                "All rows must have the same number of cells, at least a number and a label, with commas between."
            )
    return _Table(header, [row for _, row in found], [line for line, _ in found])


def _header_text(header: list[str]) -> str:
    return f"the header {','.join(header)}" if header else "no header"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers(file: Path, table: _Table, label_at: int) -> np.ndarray:
    """All columns except the label."""
    cells = [row[:label_at] + row[label_at + 1 :] for row in table.rows]
    numbers = np.array([[float(cell) if _is_number(cell) else math.nan for cell in row] for row in cells])
    bad = ~(np.abs(numbers) <= np.finfo(np.float32).max)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise DataError(
            f"{file}, line {table.lines[row]}: {cells[row][column][:40]!r} is not a finite number (as a 32-bit float). "
            "All cells except the label must be."
        )
    return numbers.astype(np.float32)


def _labels(files: list[Path], tables: list[_Table], label_at: int) -> tuple[list[np.ndarray], int, tuple[str, ...]]:
    """The labels of each file, the number of classes, and their names. Words are numbered in alphabetical order."""
    words = [[row[label_at].strip() for row in table.rows] for table in tables]
    are_numbers = _is_number(words[0][0])
    for file, table, column in zip(files, tables, words, strict=True):
        for line, word in zip(table.lines, column, strict=True):
            if not word or _is_number(word) != are_numbers:
                raise DataError(
                    f"{file}, line {line}: the label is {word[:40]!r}, the first label of {files[0].name} is "
                    f"{words[0][0][:40]!r}. Labels must be whole numbers in all files, or words in all files."
                )
            if are_numbers and not (float(word).is_integer() and 0 <= float(word) < _WIDEST):
                raise DataError(
                    f"{file}, line {line}: the label is {word[:40]}; "
                    f"labels must be whole numbers from 0 to {_WIDEST - 1}, or words."
                )
    if are_numbers:
        y = [np.array([int(float(word)) for word in column], np.int64) for column in words]
        return y, max(int(column.max()) for column in y) + 1, ()
    numbers = {word: i for i, word in enumerate(sorted({word for column in words for word in column}))}
    return [np.array([numbers[word] for word in column], np.int64) for column in words], len(numbers), tuple(numbers)
