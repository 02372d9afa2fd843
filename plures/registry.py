"""Registry: what can be asked for by name, from this package and from others, imported when it is asked for.

A line of a registry is `name -> module:attribute`. Other packages add lines by entry points, and a user names code
of their own as `module:attribute`. Reading names and one-line descriptions imports nothing heavy.
"""

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from plures.errors import UsageError, unknown

T = TypeVar("T")

_doubted: ContextVar[str] = ContextVar("doubted", default="")


@contextmanager
def doubting(folder: Path | str, trust: bool = False) -> Iterator[None]:
    """While a folder is read that a stranger may have made: code that it names is imported only with trust."""
    token = _doubted.set("" if trust else str(folder))
    try:
        yield
    finally:
        _doubted.reset(token)


class Registry(Mapping[str, T], Generic[T]):
    """Names -> objects. Those of this package come first, in their order; those of others follow."""

    def __init__(self, kind: str, group: str, lines: dict[str, str]) -> None:
        """`kind` is a word for messages; entry points of `group` add to the lines."""
        self.kind, self.group, self.lines = kind, group, lines

    @cached_property
    def others(self) -> dict[str, EntryPoint]:
        """What other packages have registered. A name of this package cannot be taken by another."""
        return {point.name: point for point in entry_points(group=self.group) if point.name not in self.lines}

    def __iter__(self) -> Iterator[str]:
        return iter((*self.lines, *self.others))

    def __len__(self) -> int:
        return len(self.lines) + len(self.others)

    def __contains__(self, name: object) -> bool:
        return name in self.lines or name in self.others

    def __getitem__(self, name: str) -> T:
        if name not in self:
            raise KeyError(name)
        return cast(T, load(self.path(name), self.kind))

    def path(self, name: str) -> str:
        """Where the object is: module:attribute."""
        return self.lines[name] if name in self.lines else self.others[name].value

    def find(self, name: str) -> T:
        """The object of this name, or the user's own, named as module:attribute."""
        if name in self:
            return self[name]
        if ":" in name:
            if folder := _doubted.get():
                raise UsageError(
                    f"{folder} names code that would be run: {self.kind} {name!r}. "
                    "If you trust this folder, add --trust"
                )
            return cast(T, load(name, self.kind))
        raise unknown(self.kind, name, self)

    def doc(self, name: str) -> str:
        """The text at the top of the file that the object is in, read without importing it."""
        return file_doc(self.path(name).partition(":")[0])

    def line(self, name: str) -> str:
        """The first line of the object's own docstring, read without importing it."""
        module_name, _, attribute = self.path(name).partition(":")
        return file_doc(module_name, attribute).partition("\n")[0]


def load(path: str, kind: str) -> Any:
    """The object that `module:attribute` names; a module may lie in the current folder."""
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = "; is it in this folder?" if error.name == module_name.partition(".")[0] else ""
        raise UsageError(f"{kind} {path!r}: cannot import {module_name!r} ({error}){where}") from error
    except ImportError as error:
        raise UsageError(f"{kind} {path!r}: cannot import {module_name!r} ({error})") from error
    if not hasattr(module, attribute):
        near = get_close_matches(attribute, dir(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"{kind} {path!r}: {module_name!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def find_dotted(path: str) -> Any:
    """What a dotted path names, as `torch.fx.Graph`; modules on the way are imported."""
    first, *rest = path.split(".")
    found, so_far = importlib.import_module(first), first
    for name in rest:
        so_far += "." + name
        found = getattr(found, name) if hasattr(found, name) else importlib.import_module(so_far)
    return found


def file_doc(module_name: str, attribute: str = "") -> str:
    """The docstring of a module, or of a class or function in it, read from its file."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return ""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    module = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    if not attribute:
        return ast.get_docstring(module) or ""
    kinds = (ast.ClassDef, ast.FunctionDef)
    found = [node for node in module.body if isinstance(node, kinds) and node.name == attribute]
    return (ast.get_docstring(found[0]) or "") if found else ""
