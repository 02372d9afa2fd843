"""Data sets: tables of rows and labels, read from files that are checked before they are used."""

import gzip
import importlib.resources
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from .errors import DataError, unknown

_MOST_CLASSES = 1_000_000  # a larger label is an identifier or a hash, and would ask for a model of that width


class Dataset(NamedTuple):
    """Rows with labels. The publisher's train part comes first, its test part follows."""

    name: str
    x: np.ndarray  # [row, ...], float32 ready for a model (images [channel, height, width]), or int64 tokens
    y: np.ndarray  # [row] or [row, position], int64 labels from 0 to n_classes - 1
    n_classes: int
    n_train: int  # rows of the train part; all of them if there is no test part
    client: np.ndarray | None  # [row], int64, the data's own client of each row, if it has any
    n_tokens: int = 0  # how many different tokens x may hold; 0 when x is not tokens
    client_names: tuple[str, ...] = ()  # of the data's own clients, if they have any


class Source(NamedTuple):
    """A data set that is known by name."""

    description: str
    reader: Callable[[str, Path], Dataset]
    folder: str | None  # inside the data folder; None: it comes with the package
    needs: str  # what must be in the folder


def load(name_or_path: str, data_dir: Path | None = None) -> Dataset:
    """The data set of this name, or in this .npz file.

    Names are looked up in `data_dir`, or else $PLURES_DATA, or else the folder plures of the user's
    cache. An .npz file holds `x` (one row for each example) and `y` (labels from 0), and may hold
    `client` (an integer for each row) and `is_test` (0 or 1 for each row). `x` of type uint8 is read
    as images, scaled to [-1, 1]; other integers stay integers, as tokens.
    """
    if name_or_path in DATA:
        source = DATA[name_or_path]
        dataset = source.reader(name_or_path, data_folder(data_dir) / (source.folder or ""))
        check(dataset)
        return dataset
    path = Path(os.path.expanduser(name_or_path))
    if path.suffix == ".npz":
        return _read_npz(name_or_path, path)
    if os.path.exists(name_or_path):
        raise DataError(
            f"{name_or_path} is not an .npz file. Save the data with numpy.savez(path, x=..., y=...), "
            f"or name one of: {', '.join(DATA)}."
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
    if len(y) == 0 or x.size == 0:
        raise DataError(f"{name}: x has shape {x.shape} and y has {len(y)} labels; at least one row is needed.")
    for key, column in (("y", y), ("client", client)):
        if column is not None and column.shape != (len(x),):
            raise DataError(
                f"{name}: {key!r} has shape {column.shape}, but x has {len(x)} rows; it needs one number for each row."
            )
    if not 1 <= n_train <= len(y):
        raise DataError(f"{name}: {n_train} of {len(y)} rows are for training; at least one must be.")
    outside = (y < 0) | (y >= n_classes)
    if outside.any():
        row = int(outside.argmax())
        raise DataError(f"{name}: the label of row {row} is {y[row]}; labels must be from 0 to {n_classes - 1}.")
    if x.dtype.kind == "f":
        bad = ~np.isfinite(x).reshape(len(x), -1).all(1)
        if bad.any():
            raise DataError(
                f"{name}: {bad.sum()} of {len(x)} rows of x hold NaN or infinity (as 32-bit floats), "
                f"the first is row {bad.argmax()}. Remove or repair these rows."
            )


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
        arrays = _arrays(file, "bundled/digits.npz")
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
        _check_labels(label_path, labels, 10)
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
    _check_labels(path, labels, n_classes)
    return records[:, n_labels:].reshape(-1, 3, 32, 32), labels


def _check_labels(path: Path, labels: np.ndarray, n_classes: int) -> None:
    if len(labels) and labels.max() >= n_classes:
        row = int((labels >= n_classes).argmax())
        raise DataError(
            f"{path}: the label of row {row} is {labels[row]}; labels must be from 0 to {n_classes - 1}. "
            "Get the file again."
        )


def _content(name: str, folder: Path, files: list[str]) -> tuple[Path, bytes]:
    """The bytes of the first of `files` that is in the folder, unpacked if its name ends in .gz."""
    path = next((folder / file for file in files if os.path.exists(folder / file)), None)
    if path is None:
        raise DataError(
            f"{name} needs {' or '.join(files)}, which is not in {folder}, the folder searched. "
            f"Put there {DATA[name].needs}, or set PLURES_DATA to the folder that holds {DATA[name].folder}."
        )
    try:
        content = path.read_bytes()
        return path, gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}. Get the file again.") from error


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
}


# --- .npz files ---


def _read_npz(name: str, path: Path) -> Dataset:
    if not os.path.exists(path):
        raise DataError(f"{name} does not exist. Give the path of an .npz file, or one of: {', '.join(DATA)}.")
    arrays = _arrays(path, name)
    missing = [key for key in ("x", "y") if key not in arrays]
    if missing:
        raise DataError(
            f"{name} holds no {' and no '.join(map(repr, missing))}. "
            "It needs 'x' (rows) and 'y' (labels), and may have 'client' and 'is_test'."
        )
    x = _rows(name, arrays["x"])
    y = _integers(name, "y", arrays["y"])
    if len(y) and not 0 <= y.min() <= y.max() < _MOST_CLASSES:
        row = int(((y < 0) | (y >= _MOST_CLASSES)).argmax())
        raise DataError(f"{name}: the label of row {row} is {y[row]}; labels must be from 0 to {_MOST_CLASSES - 1}.")
    client = _integers(name, "client", arrays["client"]) if "client" in arrays else None
    dataset = Dataset(name, x, y, int(y.max()) + 1 if len(y) else 0, len(y), client)
    check(dataset)  # before the rows change places, so that messages name them as the file does
    return _train_first(dataset, arrays["is_test"]) if "is_test" in arrays else dataset


def _train_first(dataset: Dataset, is_test: np.ndarray) -> Dataset:
    """The data set with the rows that are not for testing first, each part in its order."""
    name, x, y, client = dataset.name, dataset.x, dataset.y, dataset.client
    if is_test.shape != y.shape or is_test.dtype.kind not in "biu" or not np.isin(is_test, (0, 1)).all():
        raise DataError(
            f"{name}: 'is_test' has shape {is_test.shape} and type {is_test.dtype}; "
            f"it needs 0 or 1 for each of the {len(y)} rows."
        )
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


def _integers(name: str, key: str, column: np.ndarray) -> np.ndarray:
    if column.ndim != 1:
        raise DataError(f"{name}: {key!r} has shape {column.shape}; it needs one axis, a number for each row.")
    if column.dtype.kind not in "iu" or not np.can_cast(column.dtype, np.int64):
        raise DataError(f"{name}: {key!r} has type {column.dtype}; it must be integers of at most 64 bits with a sign.")
    return column.astype(np.int64)


def _arrays(file: Path | IO[bytes], name: str) -> dict[str, np.ndarray]:
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
        for key in ("x", "y", "client", "is_test"):
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
