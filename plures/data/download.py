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
    """Files of a publisher, with their SHA-256 sums, which guard against damage and against attacks.

    Publishers tell MD5 sums alone. The sums here are those that other projects have recorded of the same files.
    """

    base: str
    files: dict[str, str]  # name -> SHA-256
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
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
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
                    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                ],
                strict=True,
            )
        ),
    ),
    "cifar10": Remote(
        _CIFAR,
        {"cifar-10-binary.tar.gz": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"},
        ("test_batch.bin", *[f"data_batch_{k}.bin" for k in range(1, 6)]),
    ),
    "cifar100": Remote(
        _CIFAR,
        {"cifar-100-binary.tar.gz": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"},
        ("train.bin", "test.bin"),
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
    for file, sha256 in remote.files.items():
        say(f"{name}: fetching {remote.base}{file}")
        content = _download(name, remote.base + file, folder)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DataError(f"{name}: {remote.base}{file} is not the published file (its SHA-256 differs). Try again.")
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
