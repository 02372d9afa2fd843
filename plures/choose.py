"""From the words of a user to a method: `fedrod:loss=ce`, `ditto+ala`, and its settings."""

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from .errors import UsageError, unknown
from .fit import Solver
from .method import Method, settings_of
from .methods import METHODS
from .parts import PARTS


def choose(spec: str, settings: dict[str, Any], solver: Solver) -> Method:
    """The method that `spec` names, wearing its parts, with its settings and solver."""
    name, *worn = spec.split("+")
    base, own = _named(name)
    if base not in METHODS:
        raise unknown("method", base, METHODS)
    method = _with(METHODS[base](), own, spec)
    for text in worn:
        part, own = _named(text)
        if part not in PARTS:
            raise unknown("worn part", part, PARTS)
        method = _with(PARTS[part](host=method), own, spec)
    return _with(method, settings, spec).with_solver(solver)


def chain(method: Method) -> Iterator[Method]:
    """A method, its host, the host of that, and so on."""
    yield method
    host = getattr(method, "host", None)
    if host is not None:
        yield from chain(host)


def all_settings(method: Method) -> dict[str, Any]:
    """Every setting with its value, the outermost first."""
    found: dict[str, Any] = {}
    for layer in chain(method):
        for field in settings_of(type(layer)):
            found.setdefault(field.name, getattr(layer, field.name))
    return found


def setting_fields(method: Method) -> dict[str, dataclasses.Field[Any]]:
    """Every setting with its field, the outermost first."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for layer in chain(method):
        for field in settings_of(type(layer)):
            found.setdefault(field.name, field)
    return found


def doc(name: str) -> str:
    """The text at the top of a method's file."""
    return inspect.cleandoc(sys.modules[METHODS[name].__module__].__doc__ or "")


def _named(text: str) -> tuple[str, dict[str, str]]:
    name, _, rest = text.partition(":")
    own: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"{text!r}: a setting is written key=value, got {item!r}")
        own[key.strip()] = value.strip()
    return name.strip(), own


def _with(method: Method, settings: dict[str, Any], spec: str) -> Method:
    for key, value in settings.items():
        if key not in setting_fields(method):
            raise unknown(f"setting of {spec}", key, setting_fields(method))
        method = _set(method, key, value)
    return method


def _set(method: Method, key: str, value: Any) -> Method:
    fields = {field.name: field for field in settings_of(type(method))}
    if key in fields:
        return dataclasses.replace(method, **{key: _typed(method, fields[key], value)})
    return dataclasses.replace(method, host=_set(method.host, key, value))  # type: ignore[call-arg, attr-defined]


def _typed(method: Method, field: dataclasses.Field[Any], value: Any) -> Any:
    """Words of the command line as the type of the field; other values as they are."""
    kind: Any = type(field.default)
    if isinstance(value, int) and not isinstance(value, bool) and kind is float:
        return float(value)
    if not isinstance(value, str) or kind is str:
        return value
    if kind is bool and value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return kind(value) if kind is not bool else value
    except ValueError:
        return value  # the method's own check says what is wrong
