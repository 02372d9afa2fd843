"""Data sets: tables of rows and labels, read from files that are checked before they are used."""

import csv
import gzip
import importlib.resources
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from . import text
from .errors import DataError, unknown

LEAST_WINDOWS = 3  # rows that a client of text must have: some to train and one to be tested on
NEWS_WORDS = 200  # of a row of news; what is longer is cut
_WIDEST = 1_000_000  # a larger label or token is an identifier or a hash, and would ask for a model of that width
_KEYS = ("x", "y", "client", "is_test")  # of an .npz file


class Dataset(NamedTuple):
    """Rows with labels. The publisher's train part comes first, its test part follows."""

    name: str
    x: np.ndarray  # [row, ...], float32 ready for a model (images [channel, height, width]), or int64 tokens
    y: np.ndarray  # [row] or [row, position], int64 labels from 0 to n_classes - 1
    n_classes: int
    n_train: int  # rows of the train part; all of them if there is no test part
    client: np.ndarray | None  # [row], int64, the data's own client of each row, if it has any
    n_tokens: int = 0  # how many different tokens x may hold; 0 when x is not tokens
    client_names: tuple[str, ...] = ()  # of the data's own clients 0, 1, ..., if they have any


class Source(NamedTuple):
    """A data set that is known by name."""

    description: str
    reader: Callable[[str, Path], Dataset]
    place: str | None  # a folder or a file inside the data folder; None: it comes with the package
    needs: str  # what must be there


def load(name_or_path: str, data_dir: Path | None = None) -> Dataset:
    """The data set of this name, in this .npz file, or in this folder of one file a client.

    Names are looked up in `data_dir`, or else $PLURES_DATA, or else the folder plures of the user's
    cache. An .npz file holds `x` (one row for each example) and `y` (labels from 0), and may hold
    `client` (an integer for each row) and `is_test` (0 or 1 for each row). `x` of type uint8 is read
    as images, scaled to [-1, 1]; other integers stay integers, as tokens, and then `y` may have a label
    for each of them. A folder has one .npz, .csv or .txt file for each client, as `_read_folder` says.
    """
    if name_or_path in DATA:
        source = DATA[name_or_path]
        dataset = source.reader(name_or_path, data_folder(data_dir) / (source.place or ""))
        check(dataset)
        return dataset
    path = Path(os.path.expanduser(name_or_path))
    if path.suffix == ".npz":
        return _read_npz(name_or_path, path)
    if path.is_dir():
        return _read_folder(name_or_path, path)
    if path.exists():
        raise DataError(
            f"{name_or_path} is not an .npz file or a folder. Save the data with numpy.savez(path, x=..., y=...), "
            f"make a folder with one .npz, .csv or .txt file a client, or name one of: {', '.join(DATA)}."
        )
    raise unknown("data", name_or_path, DATA)


def data_folder(data_dir: Path | None = None) -> Path:
    """Where the named data sets are looked up."""
    if data_dir is not None:
        return data_dir
    if os.environ.get("PLURES_DATA"):
        return Path(os.environ["PLURES_DATA"])
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "plures"


def check(dataset: Dataset) -> None:
    """Refuse a data set with lengths that differ, labels out of range or numbers that are not finite."""
    name, x, y, n_classes, n_train, client = dataset[:6]
    if y.size == 0 or x.size == 0:
        raise DataError(f"{name}: x has shape {x.shape} and y has {y.size} labels; at least one row is needed.")
    for key, column, most_axes in (("y", y, 2), ("client", client, 1)):
        if column is not None and (column.shape[:1] != (len(x),) or column.ndim > most_axes):
            raise DataError(
                f"{name}: {key!r} has shape {column.shape}, but x has {len(x)} rows; it needs one number for each row."
            )
    if not 1 <= n_train <= len(y):
        raise DataError(f"{name}: {n_train} of {len(y)} rows are for training; at least one must be.")
    _check_range(name, "label", y, n_classes)
    if dataset.n_tokens:
        _check_range(name, "token", x, dataset.n_tokens)
    if x.dtype.kind == "f":
        bad = ~np.isfinite(x).reshape(len(x), -1).all(1)
        if bad.any():
            raise DataError(
                f"{name}: {bad.sum()} of {len(x)} rows of x hold NaN or infinity (as 32-bit floats), "
                f"the first is row {bad.argmax()}. Remove or repair these rows."
            )


def _check_range(name: str | Path, what: str, values: np.ndarray, n: int, advice: str = "") -> None:
    outside = (values < 0) | (values >= n)
    if outside.any():
        row, value = np.argwhere(outside)[0][0], values[outside][0]
        raise DataError(f"{name}: the {what} of row {row} is {value}; {what}s must be from 0 to {n - 1}.{advice}")


def _scaled(x: np.ndarray, largest: int) -> np.ndarray:
    """Integers from 0 to `largest` as float32 from -1 to 1."""
    scaled = np.ascontiguousarray(x, dtype=np.float32)
    scaled /= largest  # in place: the larger sets fill most of a gigabyte
    scaled -= 0.5
    scaled /= 0.5
    return scaled


# --- named sets ---


def _read_digits(name: str, folder: Path) -> Dataset:
    with importlib.resources.files("plures").joinpath("bundled/digits.npz").open("rb") as file:
        arrays = _arrays(file, "bundled/digits.npz", _KEYS)
    x, y = _scaled(arrays["x"], 16)[:, None], arrays["y"].astype(np.int64)
    return Dataset(name, x, y, 10, len(y), None)


def _read_idx_set(name: str, folder: Path) -> Dataset:
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for part in ("train", "t10k"):
        image_path, images = _read_idx(name, folder, f"{part}-images-idx3-ubyte", 3)
        label_path, labels = _read_idx(name, folder, f"{part}-labels-idx1-ubyte", 1)
        if len(images) != len(labels):
            raise DataError(f"{label_path} has {len(labels)} labels for {len(images)} images. Get both files again.")
        if parts and images.shape[1:] != parts[0][0].shape[2:]:
            raise DataError(
                f"{image_path} has images of {images.shape[1:]} pixels, "
                f"the train part has {parts[0][0].shape[2:]}. Get both files again."
            )
        _check_range(label_path, "label", labels, 10, _AGAIN)
        parts.append((images[:, None], labels))
    return _images(name, parts, 10)


def _read_cifar10(name: str, folder: Path) -> Dataset:
    files = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    return _images(name, [_read_records(name, folder, file, 1, 10) for file in files], 10)


def _read_cifar100(name: str, folder: Path) -> Dataset:
    return _images(name, [_read_records(name, folder, file, 2, 100) for file in ("train.bin", "test.bin")], 100)


def _images(name: str, parts: list[tuple[np.ndarray, np.ndarray]], n_classes: int) -> Dataset:
    """A data set from parts of images (uint8) and labels, of which the last one is the test part."""
    y = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    x = _scaled(np.concatenate([images for images, _ in parts]), 255)
    return Dataset(name, x, y, n_classes, len(y) - len(parts[-1][1]), None)


def _read_idx(name: str, folder: Path, file: str, n_axes: int) -> tuple[Path, np.ndarray]:
    """The array in an idx file of unsigned bytes, gzipped or not."""
    path, content = _content(name, folder, [f"{file}.gz", file])
    header = 4 + 4 * n_axes
    magic = 0x0800 + n_axes  # 08: unsigned bytes; then the number of axes
    if int.from_bytes(content[:4], "big") != magic:
        raise DataError(
            f"{path} begins with {content[:4].hex() or 'nothing'} instead of {magic:08x}, "
            f"so it is not an idx file of {n_axes} axes. Get the file again."
        )
    shape = tuple(int.from_bytes(content[i : i + 4], "big") for i in range(4, header, 4))
    if len(content) != header + math.prod(shape):
        raise DataError(
            f"{path} has {len(content)} bytes (unpacked) but its header, with shape {shape}, asks for "
            f"{header + math.prod(shape)}. Get the file again."
        )
    return path, np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read_records(name: str, folder: Path, file: str, n_labels: int, n_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a file of records: `n_labels` bytes, of which the last one counts, then 3x32x32 bytes."""
    path, content = _content(name, folder, [file])
    length = n_labels + 3 * 32 * 32
    if len(content) == 0 or len(content) % length:
        raise DataError(
            f"{path} has {len(content)} bytes, which is not a whole number of records of {length} bytes. "
            "Get the file again."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, length)
    labels = records[:, n_labels - 1]
    _check_range(path, "label", labels, n_classes, _AGAIN)
    return records[:, n_labels:].reshape(-1, 3, 32, 32), labels


def _content(name: str, folder: Path, files: list[str]) -> tuple[Path, bytes]:
    """The bytes of the first of `files` that is in the folder, unpacked if its name ends in .gz."""
    path = _find(name, folder, files)
    try:
        content = path.read_bytes()
        return path, gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Get the file again.") from error


def _find(name: str, folder: Path, files: list[str]) -> Path:
    """The first of `files` that is in the folder."""
    for file in files:
        if os.path.exists(folder / file):
            return folder / file
    raise _missing(name, folder, " or ".join(files))


def _missing(name: str, folder: Path, what: str) -> DataError:
    return DataError(
        f"{name} needs {what}, which is not in {folder}, the folder searched. "
        f"Put there {DATA[name].needs}, or set PLURES_DATA to the folder that holds {DATA[name].place}."
    )


def _read_femnist(name: str, path: Path) -> Dataset:
    """Images with their writers as clients. Some writers may have test rows only."""
    path = _find(name, path.parent, [path.name])
    arrays = _arrays(path, str(path), (*_KEYS, "writer", "writer_name"))
    if "writer" in arrays:
        arrays["client"] = arrays.pop("writer")
    if "client" not in arrays:
        raise DataError(f"{path} holds no 'client', the number of the writer of each row. Get the file again.")
    data = _from_arrays(str(path), arrays)
    _check_range(path, "label", data.y, 62, _AGAIN)
    names = arrays.get("writer_name", np.zeros(0, np.str_))
    if len(names):
        _check_range(path, "client", arrays["client"], len(names), " There must be a 'writer_name' for each.")
    return data._replace(name=name, n_classes=62, client_names=tuple(map(str, names)))


def _read_agnews(name: str, folder: Path) -> Dataset:
    """News as words. The vocabulary has every word of the train part."""
    labels: list[int] = []
    news: list[list[str]] = []
    n_train = 0
    for file in ("train.csv", "test.csv"):
        path = _find(name, folder, [file])
        n_train = len(labels)
        for line, row in _csv_rows(path):
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise DataError(
                    f"{path}, line {line}: {len(row)} cells that begin with {row[0][:40]!r}; "
                    f"a row must be a class from 1 to 4, a title and a description.{_AGAIN}"
                )
            labels.append(int(row[0]) - 1)
            news.append(text.words(f"{row[1]} {row[2]}"))
    tokens = text.word_tokens(news[:n_train])
    x, y = text.padded(news, tokens, NEWS_WORDS), np.array(labels, np.int64)
    return Dataset(name, x, y, 4, n_train, None, text.UNKNOWN + 1 + len(tokens))


def _read_shakespeare(name: str, folder: Path) -> Dataset:
    files = sorted(folder.glob("*.txt"), key=lambda file: file.stem)
    if not files:
        raise _missing(name, folder, "a .txt file for each speaker")
    return _read_txt_files(name, files)


_AGAIN = " Get the file again."
_IDX_FILES = ", ".join(
    f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)

DATA: dict[str, Source] = {
    "digits": Source(
        "1,797 handwritten digits of 8x8 pixels in 10 classes; comes with the package", _read_digits, None, "nothing"
    ),
    "mnist": Source(
        "70,000 handwritten digits of 28x28 pixels in 10 classes",
        _read_idx_set,
        "mnist",
        f"the MNIST files {_IDX_FILES}",
    ),
    "fashion-mnist": Source(
        "70,000 pictures of clothes of 28x28 pixels in 10 classes",
        _read_idx_set,
        "fashion-mnist",
        f"the Fashion-MNIST files {_IDX_FILES} (github.com/zalandoresearch/fashion-mnist)",
    ),
    "cifar10": Source(
        "60,000 colour pictures of 32x32 pixels in 10 classes",
        _read_cifar10,
        "cifar-10-batches-bin",
        "data_batch_1.bin to data_batch_5.bin and test_batch.bin of the CIFAR-10 binary version "
        "(www.cs.toronto.edu/~kriz/cifar.html)",
    ),
    "cifar100": Source(
        "60,000 colour pictures of 32x32 pixels in 100 classes",
        _read_cifar100,
        "cifar-100-binary",
        "train.bin and test.bin of the CIFAR-100 binary version (www.cs.toronto.edu/~kriz/cifar.html)",
    ),
    "femnist": Source(
        "handwritten digits and letters of 28x28 pixels in 62 classes; own clients: the writers",
        _read_femnist,
        "femnist.npz",
        "the images of FEMNIST (leaf.cmu.edu) as one .npz file with the arrays x (28x28 bytes a row), y (0 to 61), "
        "client (the number of the writer) and is_test (0 or 1)",
    ),
    "agnews": Source(
        f"127,600 news of at most {NEWS_WORDS} words in 4 classes",
        _read_agnews,
        "ag_news_csv",
        "train.csv and test.csv of the AG News topic classification data set (class, title, description)",
    ),
    "shakespeare": Source(
        f"the next character in {text.WINDOW} characters of Shakespeare's plays; own clients: the speakers",
        _read_shakespeare,
        "shakespeare",
        "one .txt file for each speaking role with all that it says",
    ),
}


# --- .npz files ---


def _read_npz(name: str, path: Path) -> Dataset:
    if not os.path.exists(path):
        raise DataError(f"{name} does not exist. Give the path of an .npz file, or one of: {', '.join(DATA)}.")
    return _from_arrays(name, _arrays(path, name, _KEYS))


def _from_arrays(name: str, arrays: dict[str, np.ndarray]) -> Dataset:
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
    _check_range(name, "label", y, _WIDEST)
    if is_tokens:
        _check_range(name, "token", x, _WIDEST)
    n_classes, n_tokens = int(y.max(initial=-1)) + 1, int(x.max(initial=-1)) + 1 if is_tokens else 0
    dataset = Dataset(name, x, y, n_classes, len(y), client, n_tokens)
    check(dataset)  # before the rows change places, so that messages name them as the file does
    if "is_test" not in arrays:
        return dataset
    _check_is_test(name, arrays["is_test"], len(y))
    return _train_first(dataset, arrays["is_test"])


def _check_is_test(name: str, is_test: np.ndarray, n_rows: int) -> None:
    if is_test.shape != (n_rows,) or is_test.dtype.kind not in "biu" or not np.isin(is_test, (0, 1)).all():
        raise DataError(
            f"{name}: 'is_test' has shape {is_test.shape} and type {is_test.dtype}; "
            f"it needs 0 or 1 for each of the {n_rows} rows."
        )


def _train_first(dataset: Dataset, is_test: np.ndarray) -> Dataset:
    """The data set with the rows that are not for testing first, each part in its order."""
    name, x, y, client = dataset.name, dataset.x, dataset.y, dataset.client
    order = np.argsort(is_test, kind="stable")
    n_train = len(y) - int(is_test.sum())
    if n_train == 0:
        raise DataError(f"{name}: 'is_test' is 1 for all {len(y)} rows; at least one must be for training.")
    client = None if client is None else client[order]
    return dataset._replace(x=x[order], y=y[order], n_train=n_train, client=client)


def _rows(name: str, x: np.ndarray) -> np.ndarray:
    """x as a model takes it."""
    if x.ndim < 2:
        raise DataError(f"{name}: 'x' has shape {x.shape}; it needs a first axis of rows and at least one more.")
    if x.dtype == np.uint8:
        return _scaled(x[:, None] if x.ndim == 3 else x, 255)
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinity, which `check` reports
            return np.ascontiguousarray(x, dtype=np.float32)
    if np.can_cast(x.dtype, np.int64) and x.dtype.kind in "iu":
        return np.ascontiguousarray(x, dtype=np.int64)
    raise DataError(f"{name}: 'x' has type {x.dtype}; it must be floats, uint8 (images) or other integers (tokens).")


def _integers(name: str, key: str, column: np.ndarray, or_shape: tuple[int, ...]) -> np.ndarray:
    """A number for each row, or else numbers of the given shape."""
    if column.ndim != 1 and (column.ndim == 0 or column.shape != or_shape):
        besides = f", or the shape {or_shape} of x, a number for each token" if or_shape else ""
        raise DataError(f"{name}: {key!r} has shape {column.shape}; it needs one axis, a number for each row{besides}.")
    if column.dtype.kind not in "iu" or not np.can_cast(column.dtype, np.int64):
        raise DataError(f"{name}: {key!r} has type {column.dtype}; it must be integers of at most 64 bits with a sign.")
    return column.astype(np.int64)


def _arrays(file: Path | IO[bytes], name: str, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays of an .npz file that a data set is made of."""
    # A broken file makes numpy raise nearly anything, from BadZipFile to SyntaxError: hence `Exception`.
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
        for key in keys:
            if key not in archive:
                continue
            try:
                arrays[key] = archive[key]
            except Exception as error:
                raise DataError(
                    f"{name}: {key!r} cannot be read: {error}. Write it as an array of numbers with numpy.savez."
                ) from error
            if not isinstance(arrays[key], np.ndarray):  # bytes, when it is no array to numpy
                raise DataError(f"{name}: {key!r} is not an array. Write it as an array of numbers with numpy.savez.")
    return arrays


# --- folders with one file a client ---


def _read_folder(name: str, folder: Path) -> Dataset:
    """One file for each client, named like it: all of them .npz, all .csv or all .txt.

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
    arrays = [_arrays(file, str(file), ("x", "y", "is_test")) for file in files]
    tests = [found.pop("is_test", None) for found in arrays]
    parts = [_from_arrays(str(file), found) for file, found in zip(files, arrays, strict=True)]
    first = parts[0]
    for file, part, is_test in zip(files, parts, tests, strict=True):
        if (part.x.shape[1:], part.x.dtype, part.y.ndim) != (first.x.shape[1:], first.x.dtype, first.y.ndim):
            raise DataError(
                f"{file} has rows of shape {part.x.shape[1:]} and type {part.x.dtype} with labels of shape "
                f"{part.y.shape[1:]}, but {files[0].name} has {first.x.shape[1:]}, {first.x.dtype} and "
                f"{first.y.shape[1:]}. Make them alike in all files."
            )
        if (is_test is None) != (tests[0] is None):
            raise DataError(f"'is_test' is in one of {file} and {files[0].name} only. Put it into all files, or none.")
        if is_test is not None:
            _check_is_test(str(file), is_test, len(part.y))
    joined = _joined(name, files, [part.x for part in parts], [part.y for part in parts])
    joined = joined._replace(
        n_classes=max(part.n_classes for part in parts), n_tokens=max(part.n_tokens for part in parts)
    )
    given = [is_test for is_test in tests if is_test is not None]
    return _train_first(joined, np.concatenate(given)) if given else joined


def _read_csv_files(name: str, files: list[Path]) -> Dataset:
    tables = [_read_table(file) for file in files]
    header, n_columns = tables[0].header, len(tables[0].rows[0])
    for file, table in zip(files, tables, strict=True):
        if len(table.rows[0]) != n_columns or table.header != header:
            raise DataError(
                f"{file} has {len(table.rows[0])} columns and {_told(table.header)}, but {files[0].name} has "
                f"{n_columns} and {_told(header)}. Make them alike in all files."
            )
    at = next((header.index(key) for key in ("label", "y") if key in header), n_columns - 1)
    x = [_numbers(file, table, at) for file, table in zip(files, tables, strict=True)]
    y, n_classes = _labels(files, tables, at)
    return _joined(name, files, x, y)._replace(n_classes=n_classes)


def _read_txt_files(name: str, files: list[Path]) -> Dataset:
    """Rows of characters, labelled with the ones that follow. Files too short for LEAST_WINDOWS are left out."""
    texts = []
    for file in files:
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
    n_tokens = 1 + len(characters)  # also one for what is not among them
    joined = _joined(name, [files[i] for i in kept], [pairs[i][0] for i in kept], [pairs[i][1] for i in kept])
    return joined._replace(n_classes=n_tokens, n_tokens=n_tokens)


_FOLDERS = {".npz": _read_npz_files, ".csv": _read_csv_files, ".txt": _read_txt_files}


def _joined(name: str, files: list[Path], x: list[np.ndarray], y: list[np.ndarray]) -> Dataset:
    """The rows of all files, with a client for each file. The number of classes is left to the caller."""
    client = np.repeat(np.arange(len(files)), [len(part) for part in y])
    names = tuple(file.stem for file in files)
    return Dataset(name, np.concatenate(x), np.concatenate(y), 0, len(client), client, 0, names)


# --- .csv files ---


class _Table(NamedTuple):
    """The cells of a .csv file."""

    header: list[str]  # in lower case; empty if the file has none
    rows: list[list[str]]
    lines: list[int]  # where each row is in the file


def _csv_rows(path: Path) -> list[tuple[int, list[str]]]:
    """The number of the line and the cells, for each line that is not empty."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            return [(reader.line_num, row) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV in UTF-8: {error}. Write it again.") from error


def _read_table(path: Path) -> _Table:
    """A table whose rows are as long as each other. Its first line is a header if it names a `label` or no number."""
    found = _csv_rows(path)
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
                "Each row must have as many, at least a number and a label, with commas between."
            )
    return _Table(header, [row for _, row in found], [line for line, _ in found])


def _told(header: list[str]) -> str:
    return f"the header {','.join(header)}" if header else "no header"


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _numbers(file: Path, table: _Table, label_at: int) -> np.ndarray:
    """All columns but that of the label."""
    cells = [row[:label_at] + row[label_at + 1 :] for row in table.rows]
    numbers = np.array([[float(cell) if _is_number(cell) else math.nan for cell in row] for row in cells])
    bad = ~(np.abs(numbers) <= np.finfo(np.float32).max)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise DataError(
            f"{file}, line {table.lines[row]}: {cells[row][column][:40]!r} is not a finite number (as a 32-bit float). "
            "All cells but the label must be."
        )
    return numbers.astype(np.float32)


def _labels(files: list[Path], tables: list[_Table], label_at: int) -> tuple[list[np.ndarray], int]:
    """The labels of each file and the number of classes. Words are numbered in their order over all files."""
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
        return y, max(int(column.max()) for column in y) + 1
    numbers = {word: i for i, word in enumerate(sorted({word for column in words for word in column}))}
    return [np.array([numbers[word] for word in column], np.int64) for column in words], len(numbers)
