"""From the words of a user to a method: `fedrod:loss=ce`, `ditto+ala`, `my_methods:FedHalf:share=0.3`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from plures.errors import UsageError, unknown
from plures.learn.solver import Solver
from plures.methods import ADDONS, METHODS
from plures.methods.base import Method, settings_of
from plures.methods.naming import parse


def make_method(spec: str, settings: dict[str, Any], solver: Solver) -> Method:
    """The method that `spec` names, with its add-ons, settings and solver."""
    first, *addons = parse(spec)
    method = _with_settings(_made(METHODS.find(first.name), first.name), first.settings, spec)
    for addon in addons:
        made = ADDONS.find(addon.name)(host=method)
        method = _with_settings(made, addon.settings, spec)
    return _with_settings(method, settings, spec).with_solver(solver)


def _made(maker: Any, name: str) -> Method:
    """A method from its class, or from a function that makes it."""
    try:
        method = maker()
    except TypeError as error:
        raise UsageError(f"method {name!r} cannot be made without arguments: {error}") from error
    if not isinstance(method, Method):
        raise UsageError(f"method {name!r} is no method: it must be a subclass of plures.Method, or make one")
    return method


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


def _with_settings(method: Method, settings: dict[str, Any], spec: str) -> Method:
    for key, value in settings.items():
        if key not in setting_fields(method):
            raise unknown(f"setting of {spec}", key, setting_fields(method))
        method = _set(method, key, value)
    return method


def _set(method: Method, key: str, value: Any) -> Method:
    fields = {field.name: field for field in settings_of(type(method))}
    if key in fields:
        return dataclasses.replace(method, **{key: _typed(fields[key], value)})
    return dataclasses.replace(method, host=_set(method.host, key, value))  # type: ignore[call-arg, attr-defined]


def _typed(field: dataclasses.Field[Any], value: Any) -> Any:
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
