"""Checkpoints: safetensors and a manifest, written so that a torn one is never taken for a whole one.

A checkpoint is a folder named after its round. It is written under another name, flushed, and then
renamed. The manifest has the SHA-256 of every file, and its own. The last two are kept: if the newest cannot be
read, the one before it is taken. Clients are written and read some at a time, so that many of them
take no more memory than few.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from plures import tree
from plures.errors import RunFailed
from plures.files import disk_failure, flush_folder, sum_of, write_flushed
from plures.simulate.client_store import ClientStore
from plures.tree import Tree

BLOCK_BYTES = 64 << 20  # of clients' rows in one file

Tensors = dict[str, Tensor]


class Checkpoint(NamedTuple):
    folder: Path
    server: Tensors  # path -> tensor
    manifest: dict[str, Any]

    def blocks(self) -> Iterator[tuple[Tensor, Tensors]]:
        """Clients, and their rows: path -> rows."""
        for name in sorted(self.manifest["sha256"]):
            if name.startswith("clients"):
                tensors = load((self.folder / name).read_bytes())
                yield tensors.pop("ids"), _below("clients", tensors)

    def clients(self) -> tuple[Tensor, Tensors]:
        """All of them at once."""
        blocks = list(self.blocks())
        if not blocks:
            return torch.zeros(0, dtype=torch.int64), {}
        ids, rows = zip(*blocks, strict=True)
        return torch.cat(ids), {name: torch.cat([some[name] for some in rows]) for name in rows[0]}


def _below(prefix: str, tensors: Tensors) -> Tensors:
    return {name.partition("/")[2]: x for name, x in tensors.items() if name.startswith(prefix + "/")}


# Fields of states whose names have changed since 0.1.0. On disk, and in digests, they keep the names of 0.1.0, so
# that its run folders can be resumed and its digests compared.
STORED_AS = {
    "gradient": "slope",
    "optimizer": "speed",
    "net_optimizer": "net_speed",
    "embedding_momentum": "embedding_speed",
}


def stored(prefix: str, of: Tree) -> Tensors:
    """The tensors of a tree, on the CPU, by the paths that they have on disk, below a prefix."""
    pairs = zip(_stored_names(of), tree.leaves(of), strict=True)
    return {"/".join((prefix, *path)): x.contiguous().cpu() for path, x in pairs}


def _stored_names(of: Tree) -> Iterator[tuple[str, ...]]:
    """The path of every tensor. STORED_AS renames fields of states, never keys of dicts: those are names of a model."""
    parts: Iterable[tuple[Any, Tree]]
    if isinstance(of, dict):
        parts = of.items()
    elif isinstance(of, tuple | list):
        fields = [STORED_AS.get(str(name), str(name)) for name in getattr(of, "_fields", range(len(of)))]
        parts = zip(fields, of, strict=True)
    else:
        yield ()
        return
    for key, part in parts:
        for path in _stored_names(part):
            yield str(key), *path


def digest(server: Tree, store: ClientStore) -> str:
    """SHA-256 of the state: the server's tensors and every client's, by name."""
    total = hashlib.sha256()
    for name, x in sorted(stored("server", server).items()):
        total.update(name.encode() + _bytes(x))

    for ids, rows in store.written_rows(256):
        total.update(_bytes(ids))
        for name, x in sorted(stored("clients", rows).items()):
            total.update(name.encode() + _bytes(x))
    return total.hexdigest()


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def write(folder: Path, round: int, server: Tree, store: ClientStore, manifest: dict[str, Any]) -> None:
    """Write the checkpoint of a round, and drop all but the last two."""

    def parts() -> Iterator[tuple[str, Tensors]]:
        yield "state.safetensors", stored("server", server)
        a_row = max(1, tree.n_bytes(store.initial))
        for number, (ids, rows) in enumerate(store.written_rows(max(1, BLOCK_BYTES // a_row))):
            yield f"clients-{number:05d}.safetensors", stored("clients", rows) | {"ids": ids}

    write_parts(folder, round, parts(), manifest)
    for old in folders(folder)[:-2]:
        shutil.rmtree(old, ignore_errors=True)


def write_parts(folder: Path, round: int, parts: Iterable[tuple[str, Tensors]], manifest: dict[str, Any]) -> None:
    """Files of tensors and a manifest as a folder named after the round: whole, or not there at all."""
    target = folder / f"{round:06d}"
    new = folder / f".{round:06d}.new"
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        sums: dict[str, str] = {}
        for name, tensors in parts:
            data = save(tensors)
            sums[name] = hashlib.sha256(data).hexdigest()
            write_flushed(new / name, data)
        whole = manifest | {"round": round, "sha256": sums}
        write_flushed(new / "manifest.json", json.dumps(whole | {"check": sum_of(whole)}).encode())
        flush_folder(new)
        if target.exists():
            shutil.rmtree(target)
        os.replace(new, target)
        flush_folder(folder)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        raise disk_failure(error, folder) from error


def whole_manifest(path: Path) -> dict[str, Any]:
    """The manifest of what `write_parts` wrote; raises if anything of it is not whole."""
    manifest: dict[str, Any] = json.loads((path / "manifest.json").read_bytes())
    expected = manifest.pop("check", None)
    if expected != sum_of(manifest) and not (expected is None and str(manifest["plures"]).startswith("0.1.")):
        raise ValueError("its manifest has changed since it was written")
    for name, expected in manifest["sha256"].items():
        with open(path / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise ValueError("its tensors are not those of its manifest")
    return manifest


def read_state(path: Path) -> Tensors:
    """The first file of what `write_parts` wrote, checked."""
    whole_manifest(path)
    return load((path / "state.safetensors").read_bytes())


def folders(folder: Path) -> list[Path]:
    """The folders of rounds, the oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir()) if folder.is_dir() else []


def read(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and a sentence for each newer one that is torn."""
    torn = []
    for path in reversed(folders(folder)):
        try:
            manifest = whole_manifest(path)
            server = _below("server", load((path / "state.safetensors").read_bytes()))
        except Exception as error:
            torn.append(f"checkpoint {path} cannot be read ({error}); taking the one before it")
            continue
        return Checkpoint(path, server, manifest), torn
    return None, torn


def restore(template: Tree, tensors: dict[str, Tensor]) -> Tree:
    """A tree like the template with the tensors of a checkpoint, where those of the template are."""
    leaves, spec = tree.flatten(template)
    names = ["/".join(path) for path in _stored_names(template)]
    if set(names) != set(tensors):
        raise RunFailed("the checkpoint holds other tensors than this method has; it is from another version")
    return tree.unflatten([tensors[name].to(x.device) for name, x in zip(names, leaves, strict=True)], spec)


def restore_rows(store: ClientStore, checkpoint: Checkpoint) -> None:
    """Put the clients of a checkpoint into a store."""
    for ids, rows in checkpoint.blocks():
        store.put(ids, restore(store.initial, rows))
