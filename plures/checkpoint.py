"""Checkpoints: safetensors and a manifest, written so that a torn one is never taken for a whole one.

A checkpoint is a folder named after its round. It is written under another name, flushed, and then
renamed. The manifest has the SHA-256 of the tensors. The last two are kept: if the newest cannot be
read, the one before it is taken.
"""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load, save
from torch import Tensor

from . import tree
from .errors import RunFailed
from .store import ClientStore
from .tree import Tree


class Checkpoint(NamedTuple):
    server: dict[str, Tensor]  # path -> tensor
    clients: dict[str, Tensor]  # path -> rows of the clients below
    ids: Tensor
    manifest: dict[str, Any]


def named(prefix: str, of: Tree) -> dict[str, Tensor]:
    return {f"{prefix}/{path}": x.contiguous() for path, x in zip(tree.names(of), tree.leaves(of), strict=True)}


def digest(server: Tree, store: ClientStore) -> str:
    """SHA-256 of the state: the server's tensors and every client's, by name."""
    total = hashlib.sha256()
    for name, x in sorted(named("server", server).items()):
        total.update(name.encode() + _bytes(x))

    def add(ids: Tensor, rows: Tree) -> None:
        total.update(_bytes(ids))
        for name, x in sorted(named("clients", rows).items()):
            total.update(name.encode() + _bytes(x))

    store.each_written(add)
    return total.hexdigest()


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def write(folder: Path, round: int, server: Tree, store: ClientStore, manifest: dict[str, Any]) -> None:
    """Write the checkpoint of a round, and drop all but the last two."""
    ids, rows = store.saved()
    write_tensors(folder, round, named("server", server) | named("clients", rows) | {"ids": ids}, manifest)
    for old in folders(folder)[:-2]:
        shutil.rmtree(old, ignore_errors=True)


def write_tensors(folder: Path, round: int, tensors: dict[str, Tensor], manifest: dict[str, Any]) -> None:
    """Tensors and a manifest as a folder named after the round: whole, or not there at all."""
    data = save(tensors)
    whole = manifest | {"round": round, "sha256": hashlib.sha256(data).hexdigest()}
    target = folder / f"{round:06d}"
    new = folder / f".{round:06d}.new"
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        _write_flushed(new / "state.safetensors", data)
        _write_flushed(new / "manifest.json", json.dumps(whole).encode())
        _flush_folder(new)
        if target.exists():
            shutil.rmtree(target)
        os.replace(new, target)
        _flush_folder(folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise disk_failure(error, folder) from error


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_tensors` wrote; raises if it is not whole."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    data = (path / "state.safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        raise ValueError("its tensors are not those of its manifest")
    return load(data), manifest


def disk_failure(error: OSError, where: Path) -> RunFailed:
    said = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else (error.strerror or str(error))
    return RunFailed(
        f"cannot write to {where}: {said}. The last checkpoint there is whole; make room, then `plures resume`"
    )


def _write_flushed(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file at once: a reader sees the old or the new content, never half of it."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_flushed(new, content)
        os.replace(new, path)
    except OSError as error:
        raise disk_failure(error, path.parent) from error


def folders(folder: Path) -> list[Path]:
    """The folders of rounds, the oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir()) if folder.is_dir() else []


def read(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a sentence for each newer one that is torn."""
    torn = []
    for path in reversed(folders(folder)):
        try:
            tensors, manifest = read_tensors(path)
        except Exception as error:
            torn.append(f"checkpoint {path} cannot be read ({error}); taking the one before it")
            continue
        ids = tensors.pop("ids")
        parts = {
            prefix: {k.partition("/")[2]: x for k, x in tensors.items() if k.startswith(prefix + "/")}
            for prefix in ("server", "clients")
        }
        return Checkpoint(parts["server"], parts["clients"], ids, manifest), torn
    return None, torn


def restore(template: Tree, tensors: dict[str, Tensor]) -> Tree:
    """A tree like the template with the tensors of a checkpoint."""
    _, spec = tree.flatten(template)
    names = tree.names(template)
    if set(names) != set(tensors):
        raise RunFailed("the checkpoint holds other tensors than this method has; it is from another version")
    return tree.unflatten([tensors[name] for name in names], spec)


def restore_rows(store: ClientStore, checkpoint: Checkpoint) -> None:
    if len(checkpoint.ids):
        store.put(checkpoint.ids, restore(store.initial, checkpoint.clients))
