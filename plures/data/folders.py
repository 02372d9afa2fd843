"""Folders of images or texts: CLIENT/CLASS/file, or a manifest that says whose and what each file is."""

import importlib.util
from pathlib import Path

import numpy as np

from plures.data.dataset import Dataset
from plures.data.readers import scale
from plures.data.reading import Reading
from plures.data.tables import Table, read_csv, text_dataset
from plures.errors import DataError

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
MANIFEST = "manifest.csv"
COLUMNS = ("file", "client", "label")  # of a manifest
MOST_PIXELS = 64_000_000  # of an image; a small file can unpack to more than memory holds


def kind_of_folder(folder: Path) -> str:
    """`images`, `texts`, or empty if the folder holds one file for each client."""
    if (folder / MANIFEST).is_file():
        names = {Path(name).suffix.lower() for name in _column(read_csv(folder / MANIFEST), folder, "file")}
        return "images" if names & set(IMAGES) else "texts"
    for suffix in (*IMAGES, ".txt"):
        if next(folder.glob(f"*/*/*{suffix}"), None) or next(folder.glob(f"*/*/*{suffix.upper()}"), None):
            return "texts" if suffix == ".txt" else "images"
    return ""


def read_labelled_folder(name: str, folder: Path, reading: Reading) -> Dataset:
    """Images or texts in CLIENT/CLASS/file, or as a manifest with the columns file, client and label says."""
    files, clients, labels = _list_files(folder)
    names, classes = sorted(set(clients)), sorted(set(labels))
    if len(classes) < 2:
        raise DataError(f"{name}: all files are of the class {classes[0]!r}, so there is nothing to predict.")
    place, number = {client: k for k, client in enumerate(names)}, {label: k for k, label in enumerate(classes)}
    y = np.array([number[label] for label in labels], np.int64)
    client = np.array([place[one] for one in clients], np.int64)
    data = Dataset(name, np.zeros((len(y), 1), np.float32), y, len(classes), len(y), client, 0, tuple(names))
    data = data._replace(class_names=tuple(classes))
    if kind_of_folder(folder) == "images":
        return data._replace(x=_read_images(files, reading.image_size))
    return text_dataset(data, [_read_text(file) for file in files], np.arange(len(files)), reading.tokenizer)


def _list_files(folder: Path) -> tuple[list[Path], list[str], list[str]]:
    """The files, and the client and the class of each."""
    if (folder / MANIFEST).is_file():
        table = read_csv(folder / MANIFEST)
        files, clients, labels = (_column(table, folder, name) for name in COLUMNS)
        paths = [folder / name for name in files]
        for row, path in enumerate(paths):
            if not path.resolve().is_relative_to(folder.resolve()):
                raise DataError(f"{table.where(row)}: {files[row]!r} is not in the folder {folder}.")
            if not path.is_file():
                raise DataError(f"{table.where(row)}: there is no file {files[row]!r} in {folder}.")
        return paths, clients, labels
    kind = (*IMAGES,) if kind_of_folder(folder) == "images" else (".txt",)
    found = sorted(path for path in folder.glob("*/*/*") if path.suffix.lower() in kind and path.is_file())
    return found, [path.parent.parent.name for path in found], [path.parent.name for path in found]


def _column(table: Table, folder: Path, name: str) -> list[str]:
    if name not in table.columns:
        raise DataError(f"{folder / MANIFEST} has no column {name!r}; it needs {', '.join(COLUMNS)}.")
    cells = table.columns[name]
    return [cells.texts[code].strip() for code in cells.codes]


def _read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as text in UTF-8: {error}. Write it again.") from error


def _read_images(files: list[Path], size: int) -> np.ndarray:
    """[row, channel, height, width] from -1 to 1; grey if all are grey."""
    if importlib.util.find_spec("PIL") is None:
        raise DataError("images need Pillow to be read: pip install 'plures[data]'")
    from PIL import Image, UnidentifiedImageError  # here, because it is an extra

    found, is_grey = [], True
    for file in files:
        try:
            with Image.open(file) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise DataError(f"{file} has {image.width} x {image.height} pixels, which is too many.")
                is_grey = is_grey and image.mode in ("1", "L", "LA", "I;16")
                pixels = image.convert("RGB")
                if size:
                    pixels = pixels.resize((size, size), Image.Resampling.BILINEAR)
                found.append(np.asarray(pixels))
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{file} is empty, or is no image that can be read: {error}. Remove or mend it.") from None
        if found[-1].shape != found[0].shape:
            (h, w), (first_h, first_w) = found[-1].shape[:2], found[0].shape[:2]
            raise DataError(
                f"{file} has {w} x {h} pixels, but {files[0].name} has {first_w} x {first_h}. "
                "Give a size for all, as in --image-size 32."
            )
    x = np.stack(found).transpose(0, 3, 1, 2)
    return scale(x[:, :1] if is_grey else x, 255)
