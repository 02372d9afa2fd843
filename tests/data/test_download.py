"""Data sets that are fetched, from a publisher on this machine."""

import hashlib
import io
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from plures.data import download
from plures.errors import DataError, UsageError


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def publisher(tmp_path, monkeypatch):
    """A server with a small CIFAR-100: two images to train on, one to test, and a file with a wicked name."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    content = {"train.bin": b"\0\7" + bytes(3072) + b"\0\1" + bytes(3072), "test.bin": b"\0\2" + bytes(3072)}
    with tarfile.open(shelf / "cifar.tar.gz", "w:gz") as archive:
        for name, data in {**content, "../../wicked": b"x"}.items():
            member = tarfile.TarInfo(name if name.startswith("..") else f"cifar-100-binary/{name}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    sha256 = hashlib.sha256((shelf / "cifar.tar.gz").read_bytes()).hexdigest()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(shelf)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setitem(
        download.REMOTES, "cifar100", download.Remote(base, {"cifar.tar.gz": sha256}, ("train.bin", "test.bin"))
    )
    yield monkeypatch, base
    server.shutdown()
    server.server_close()


def test_fetched_once_checked_and_read(publisher, tmp_path):
    said = []
    download.get("cifar100", tmp_path / "data", said.append)
    assert sorted(path.name for path in (tmp_path / "data/cifar-100-binary").iterdir()) == ["test.bin", "train.bin"]
    assert not list(tmp_path.glob("wicked")) and said[-1].startswith("cifar100: 3 rows, 100 classes")
    said.clear()
    download.get("cifar100", tmp_path / "data", said.append)
    assert len(said) == 1  # nothing was fetched again
    assert download.status("cifar100", tmp_path / "data") == "3 rows, 2 of them to train on, 100 classes"


def test_damaged_file_is_refused_and_nothing_is_left(publisher, tmp_path):
    monkeypatch, base = publisher
    monkeypatch.setitem(download.REMOTES, "cifar100", download.Remote(base, {"cifar.tar.gz": "0" * 64}, ("train.bin",)))
    with pytest.raises(DataError, match="not the published file"):
        download.get("cifar100", tmp_path / "data", print)
    assert not (tmp_path / "data").exists()


def test_publisher_that_cannot_be_reached_is_told_in_words(publisher, tmp_path):
    monkeypatch, base = publisher
    monkeypatch.setitem(download.REMOTES, "mnist", download.Remote(base, {"no.gz": ""}))
    with pytest.raises(DataError, match=r"cannot fetch .*no\.gz for mnist"):
        download.get("mnist", tmp_path / "data", print)


def test_what_cannot_be_fetched(tmp_path):
    with pytest.raises(DataError, match="femnist has no publisher"):
        download.get("femnist", tmp_path, print)
    with pytest.raises(UsageError, match="did you mean 'mnist'"):
        download.get("mnis", tmp_path, print)
    assert download.status("mnist", tmp_path) == "not here"
    download.get("digits", tmp_path, print)


def test_every_file_has_a_sum_that_no_other_has():
    sums = [digest for remote in download.REMOTES.values() for digest in remote.files.values()]
    assert all(len(bytes.fromhex(digest)) == 32 for digest in sums) and len(set(sums)) == len(sums) == 10
