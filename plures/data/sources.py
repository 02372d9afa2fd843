"""Sources: data sets that are known by name, how their files are read, and where these are looked for."""

import gzip
import importlib.resources
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from plures.data import text
from plures.data.dataset import Dataset, check, check_range
from plures.data.folders import kind_of_folder, read_labelled_folder
from plures.data.readers import (
    KEYS,
    as_dataset,
    csv_rows,
    from_arrays,
    read_arrays,
    read_csv_file,
    read_folder,
    read_npz,
    read_txt_files,
    scale,
)
from plures.data.reading import Reading
from plures.data.tables import join_tables, read_table, table_dataset
from plures.errors import DataError, unknown
from plures.registry import Registry

# Data sets of other packages: functions without arguments that return a Dataset, or arrays as `as_dataset` takes them.
REGISTERED: Registry[Callable[[], Any]] = Registry("data set", "plures.data", {})

CLIENT_OF_FILE = "(file)"  # the column with the name of a row's file, where each client has one
NEWS_WORDS = 200  # words per row of AG News; longer texts are cut


class Source(NamedTuple):
    """A data set that is known by name."""

    description: str
    reader: Callable[[str, Path], Dataset]
    place: str | None  # a folder or a file inside the data folder; None if it comes with the package
    needs: str  # which files must be there
    texts: "Callable[[str, Path], Texts] | None" = None  # reads them as texts, for models with a tokenizer of their own


class Texts(NamedTuple):
    """Texts and their labels, before they are tokens."""

    texts: list[str]
    labels: list[int]
    n_classes: int
    n_train: int  # the first ones are for training


def load(name_or_path: str, data_dir: Path | None = None, reading: Reading = Reading()) -> Dataset:  # noqa: B008
    """The data set of this name, in this .npz file, or in this folder with one file per client.

    Names are looked up in `data_dir`, or else $PLURES_DATA, or else the folder plures of the user's
    cache. An .npz file holds `x` (one row per example) and `y` (labels from 0), and may hold
    `client` (an integer for each row) and `is_test` (0 or 1 for each row). `x` of type uint8 is read
    as images, scaled to [-1, 1]; other integers stay integers, as tokens, and then `y` may have a label
    for each of them. A folder has one .npz, .csv or .txt file for each client, as `read_folder` says.
    """
    if name_or_path in DATA:
        source = DATA[name_or_path]
        place = data_folder(data_dir) / (source.place or "")
        if reading.tokenizer is not None and source.texts is not None:
            dataset = _tokenized(name_or_path, source.texts(name_or_path, place), reading.tokenizer)
        else:
            dataset = source.reader(name_or_path, place)
        check(dataset)
        return dataset
    if name_or_path in REGISTERED:
        dataset = as_dataset(name_or_path, REGISTERED[name_or_path]())
        check(dataset)
        return dataset
    path = Path(os.path.expanduser(name_or_path))
    table = _read_as_table(name_or_path, path, reading, data_folder(data_dir))
    if table is not None:
        check(table)
        return table
    if path.suffix == ".npz":
        return read_npz(name_or_path, path)
    if path.suffix.lower() == ".csv" and path.is_file():
        return read_csv_file(name_or_path, path)
    if path.is_dir():
        return read_folder(name_or_path, path)
    if path.exists():
        raise DataError(
            f"{name_or_path} is not an .npz or .csv file or a folder. Save the data with "
            "numpy.savez(path, x=..., y=...), "
            f"make a folder with one .npz, .csv or .txt file per client, or name one of: {', '.join(DATA)}."
        )
    raise unknown("data", name_or_path, [*DATA, *REGISTERED])


def _read_as_table(name: str, path: Path, reading: Reading, cache: Path) -> Dataset | None:
    """A table, or a folder of tables, images or texts; None if it is something else."""
    suffix = path.suffix.lower()
    if path.is_dir() and kind_of_folder(path):
        return read_labelled_folder(name, path, reading)
    if suffix == ".parquet" or (suffix in (".csv", ".tsv") and reading.is_table):
        if not path.exists():
            raise DataError(f"{name} does not exist. Give the path of a file, or a name of `plures list data`.")
        return table_dataset(name, read_table(path, cache / "tables"), reading)
    if path.is_dir() and reading.is_table:
        files = sorted(path.glob("*.csv"), key=lambda file: file.stem)
        if not files:
            raise DataError(f"{name} holds no .csv file; a folder of tables has one for each client.")
        table = join_tables(name, [read_table(file, cache / "tables") for file in files], CLIENT_OF_FILE)
        return table_dataset(name, table, reading._replace(client=reading.client or CLIENT_OF_FILE))
    if reading.is_table:
        raise DataError(f"{name} is not a table: --target and the like are for .csv and .parquet files.")
    return None


def data_folder(data_dir: Path | None = None) -> Path:
    """Where the named data sets are looked up."""
    if data_dir is not None:
        return data_dir
    if os.environ.get("PLURES_DATA"):
        return Path(os.environ["PLURES_DATA"])
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "plures"


def _read_digits(name: str, folder: Path) -> Dataset:
    with importlib.resources.files("plures.data").joinpath("bundled/digits.npz").open("rb") as file:
        arrays = read_arrays(file, "bundled/digits.npz", KEYS)
    x, y = scale(arrays["x"], 16)[:, None], arrays["y"].astype(np.int64)
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
        check_range(label_path, "label", labels, 10, _AGAIN)
        parts.append((images[:, None], labels))
    return _images(name, parts, 10)


def _read_cifar10(name: str, folder: Path) -> Dataset:
    files = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    return _images(name, [_read_records(name, folder, file, 1, 10) for file in files], 10)


def _read_cifar100(name: str, folder: Path) -> Dataset:
    return _images(name, [_read_records(name, folder, file, 2, 100) for file in ("train.bin", "test.bin")], 100)


def _images(name: str, parts: list[tuple[np.ndarray, np.ndarray]], n_classes: int) -> Dataset:
    """A data set from parts of images (uint8) and labels; the last part is the test part."""
    y = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    x = scale(np.concatenate([images for images, _ in parts]), 255)
    return Dataset(name, x, y, n_classes, len(y) - len(parts[-1][1]), None)


def _read_idx(name: str, folder: Path, file: str, n_axes: int) -> tuple[Path, np.ndarray]:
    """The array in an idx file of unsigned bytes, gzipped or not."""
    path, content = _read_first(name, folder, [f"{file}.gz", file])
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
    """Images and labels of a file of records: `n_labels` bytes, the last of which is the label, then 3x32x32 bytes."""
    path, content = _read_first(name, folder, [file])
    length = n_labels + 3 * 32 * 32
    if len(content) == 0 or len(content) % length:
        raise DataError(
            f"{path} has {len(content)} bytes, which is not a whole number of records of {length} bytes. "
            "Get the file again."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, length)
    labels = records[:, n_labels - 1]
    check_range(path, "label", labels, n_classes, _AGAIN)
    return records[:, n_labels:].reshape(-1, 3, 32, 32), labels


def _read_first(name: str, folder: Path, files: list[str]) -> tuple[Path, bytes]:
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
    raise _missing_error(name, folder, " or ".join(files))


def _missing_error(name: str, folder: Path, what: str) -> DataError:
    return DataError(
        f"{name} needs {what}, which is not in {folder}. "
        f"Put {DATA[name].needs} there, or set PLURES_DATA to the folder that holds {DATA[name].place}."
    )


def _read_femnist(name: str, path: Path) -> Dataset:
    """Images with their writers as clients. Some writers may have test rows only."""
    path = _find(name, path.parent, [path.name])
    arrays = read_arrays(path, str(path), (*KEYS, "writer", "writer_name"))
    if "writer" in arrays:
        arrays["client"] = arrays.pop("writer")
    if "client" not in arrays:
        raise DataError(f"{path} holds no 'client', the number of the writer of each row. Get the file again.")
    data = from_arrays(str(path), arrays)
    check_range(path, "label", data.y, 62, _AGAIN)
    names = arrays.get("writer_name", np.zeros(0, np.str_))
    if len(names):
        check_range(path, "client", arrays["client"], len(names), " There must be a 'writer_name' for each.")
    return data._replace(name=name, n_classes=62, client_names=tuple(map(str, names)))


def _tokenized(name: str, found: Texts, tokenizer: text.Tokenizer) -> Dataset:
    """Texts as tokens of a model."""
    x, y = tokenizer.encode(found.texts), np.array(found.labels, np.int64)
    return Dataset(name, x, y, found.n_classes, found.n_train, None, tokenizer.n_tokens)


def _read_agnews(name: str, folder: Path) -> Dataset:
    """News as words. The vocabulary holds every word of the train part."""
    found = _read_news(name, folder)
    news = [text.words(one) for one in found.texts]
    tokens = text.word_tokens(news[: found.n_train])
    x, y = text.pad(news, tokens, NEWS_WORDS), np.array(found.labels, np.int64)
    return Dataset(name, x, y, found.n_classes, found.n_train, None, text.UNKNOWN + 1 + len(tokens))


def _read_news(name: str, folder: Path) -> Texts:
    """News: title and description in one text."""
    labels: list[int] = []
    news: list[str] = []
    n_train = 0
    for file in ("train.csv", "test.csv"):
        path = _find(name, folder, [file])
        n_train = len(labels)
        for line, row in csv_rows(path):
            if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                raise DataError(
                    f"{path}, line {line}: {len(row)} cells that begin with {row[0][:40]!r}; "
                    f"a row must be a class from 1 to 4, a title and a description.{_AGAIN}"
                )
            labels.append(int(row[0]) - 1)
            news.append(f"{row[1]} {row[2]}")
    return Texts(news, labels, 4, n_train)


def _read_shakespeare(name: str, folder: Path) -> Dataset:
    files = sorted(folder.glob("*.txt"), key=lambda file: file.stem)
    if not files:
        raise _missing_error(name, folder, "a .txt file for each speaker")
    return read_txt_files(name, files)


_AGAIN = " Get the file again."
_IDX_FILES = ", ".join(
    f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)

DATA: dict[str, Source] = {
    "digits": Source(
        "1,797 handwritten digits, 8x8 pixels, in 10 classes; comes with the package", _read_digits, None, "nothing"
    ),
    "mnist": Source(
        "70,000 handwritten digits, 28x28 pixels, in 10 classes",
        _read_idx_set,
        "mnist",
        f"the MNIST files {_IDX_FILES}",
    ),
    "fashion-mnist": Source(
        "70,000 images of clothes, 28x28 pixels, in 10 classes",
        _read_idx_set,
        "fashion-mnist",
        f"the Fashion-MNIST files {_IDX_FILES} (github.com/zalandoresearch/fashion-mnist)",
    ),
    "cifar10": Source(
        "60,000 colour images, 32x32 pixels, in 10 classes",
        _read_cifar10,
        "cifar-10-batches-bin",
        "data_batch_1.bin to data_batch_5.bin and test_batch.bin of the CIFAR-10 binary version "
        "(www.cs.toronto.edu/~kriz/cifar.html)",
    ),
    "cifar100": Source(
        "60,000 colour images, 32x32 pixels, in 100 classes",
        _read_cifar100,
        "cifar-100-binary",
        "train.bin and test.bin of the CIFAR-100 binary version (www.cs.toronto.edu/~kriz/cifar.html)",
    ),
    "femnist": Source(
        "handwritten digits and letters, 28x28 pixels, in 62 classes; the writers are its clients",
        _read_femnist,
        "femnist.npz",
        "the images of FEMNIST (leaf.cmu.edu) as one .npz file with the arrays x (28x28 bytes per row), y (0 to 61), "
        "client (the number of the writer) and is_test (0 or 1)",
    ),
    "agnews": Source(
        f"127,600 news texts of at most {NEWS_WORDS} words in 4 classes",
        _read_agnews,
        "ag_news_csv",
        "train.csv and test.csv of the AG News topic classification data set (class, title, description)",
        _read_news,
    ),
    "shakespeare": Source(
        f"predict the next character in Shakespeare's plays, {text.WINDOW} per row; the speakers are its clients",
        _read_shakespeare,
        "shakespeare",
        "one .txt file with all lines of a speaking role, for each role",
    ),
}
