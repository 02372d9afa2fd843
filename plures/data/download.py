"""Downloads: fetch a data set from its publisher, or check the files that are there."""

import hashlib
import io
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from plures.data.sources import DATA, data_folder, load
from plures.errors import DataError, unknown
from plures.files import write_bytes

Say = Callable[[str], None]


class Remote(NamedTuple):
    """Files of a publisher, with their published MD5 sums. These guard against damage, not against attacks."""

    base: str
    files: dict[str, str]  # name -> MD5
    members: tuple[str, ...] = ()  # files to extract, if it is an archive


_IDX = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
_CIFAR = "https://www.cs.toronto.edu/~kriz/"

REMOTES: dict[str, Remote] = {
    "mnist": Remote(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        dict(
            zip(
                _IDX,
                [
                    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                    "d53e105ee54ea40749a09fcbcd1e9432",
                    "9fb629c4189551a2d022fa330f9573f3",
                    "ec29112dd5afa0611ce80d1b7f02629c",
                ],
                strict=True,
            )
        ),
    ),
    "fashion-mnist": Remote(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        dict(
            zip(
                _IDX,
                [
                    "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                    "25c81989df183df01b3e8a0aad5dffbe",
                    "bef4ecab320f06d8554ea6380940ec79",
                    "bb300cfdad3c16e7a12a480ee83cd310",
                ],
                strict=True,
            )
        ),
    ),
    "cifar10": Remote(
        _CIFAR,
        {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        ("test_batch.bin", *[f"data_batch_{k}.bin" for k in range(1, 6)]),
    ),
    "cifar100": Remote(
        _CIFAR, {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"}, ("train.bin", "test.bin")
    ),
}


def status(name: str, data_dir: Path | None = None) -> str:
    """One line about the files of a data set: what they hold, or what is wrong."""
    try:
        found = load(name, data_dir)
    except DataError as error:
        return str(error) if (data_folder(data_dir) / (DATA[name].place or "")).exists() else "not here"
    clients = "" if found.client is None else f", {len(set(found.client.tolist()))} clients of its own"
    return f"{len(found.y):,} rows, {found.n_train:,} of them to train on, {found.n_classes} classes{clients}"


def get(name: str, data_dir: Path | None, say: Say) -> None:
    """Check the files of a data set, and fetch them if they are not there."""
    if name not in DATA:
        raise unknown("data", name, DATA)
    source = DATA[name]
    folder = data_folder(data_dir) / (source.place or "")
    if source.place is not None and not folder.exists():
        if name not in REMOTES:
            raise DataError(f"{name} has no publisher to download it from. Put {source.needs} at {folder} yourself.")
        _fetch(name, REMOTES[name], folder, say)
    found = load(name, data_dir)  # raises an error if a file is damaged
    say(
        f"{name}: {len(found.y):,} rows, {found.n_classes} classes"
        + (f", in {folder}" if source.place else ", bundled")
    )


def _fetch(name: str, remote: Remote, folder: Path, say: Say) -> None:
    for file, md5 in remote.files.items():
        say(f"{name}: fetching {remote.base}{file}")
        content = _download(name, remote.base + file, folder)
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != md5:
            raise DataError(f"{name}: {remote.base}{file} is not the published file (its MD5 sum differs). Try again.")
        if not remote.members:
            write_bytes(folder / file, content)
            continue
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for member in archive.getmembers():  # by file name: paths in the archive are ignored
                content_of = archive.extractfile(member) if Path(member.name).name in remote.members else None
                if content_of is not None:
                    write_bytes(folder / Path(member.name).name, content_of.read())


def _download(name: str, url: str, folder: Path) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read()
    except (urllib.error.URLError, TimeoutError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"cannot fetch {url} for {name} ({reason}). Download it on another machine and put the file in {folder}, "
            "or say with --data-dir where it is."
        ) from None
