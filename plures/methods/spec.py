"""From the words of a user to a method: `fedrod:loss=ce`, `ditto+ala`, `my_methods:FedHalf:share=0.3`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from plures.errors import UsageError, unknown
from plures.learn.solver import Solver
from plures.methods import ADDONS, METHODS
from plures.methods.addons.base import Addon
from plures.methods.addons.fedopt import FedOpt
from plures.methods.base import Method, settings_of
from plures.methods.naming import parse

# Options of a run that a method may have for itself, as in `ditto:lr=0.01`, beside others in a comparison.
OWN_OPTIONS: dict[str, type] = {
    **{"lr": float, "lr_decay": float, "epochs": int, "steps": int, "batch": int, "momentum": float},
    **{"weight_decay": float, "clip": float, "optimizer": str, "server_optimizer": str, "server_lr": float},
}


def make_method(
    spec: str, settings: dict[str, Any], solver: Solver, server_optimizer: str = "sgd", server_lr: float | None = None
) -> Method:
    """The method that `spec` names, with its add-ons, settings and solver.

    server_optimizer, server_lr: how the server takes the mean update as a step, for methods that average.
    """
    first, *addons = parse(spec)
    method = _made(METHODS.find(first.name), first.name)
    if server_optimizer != "sgd" or server_lr not in (None, 1.0):
        method = _with_server_optimizer(method, server_optimizer, server_lr or 0.0)
    method = _with_settings(method, _own_settings(method, first.settings), spec)
    for addon in addons:
        made = ADDONS.find(addon.name)(host=method)
        method = _with_settings(made, _own_settings(made, addon.settings), spec)
    return _with_settings(method, settings, spec).with_solver(solver)


def _with_server_optimizer(method: Method, kind: str, lr: float) -> Method:
    """The method with an optimizer of the server, inside of all its add-ons."""
    if isinstance(method, Addon):
        return dataclasses.replace(method, host=_with_server_optimizer(method.host, kind, lr))
    return FedOpt(host=method, server_optimizer=kind, server_lr=lr)


def own_options(spec: str) -> dict[str, Any]:
    """Options of a run that a method has for itself: those in its name that are no settings of it."""
    first, *addons = parse(spec)
    layers: list[tuple[Method, dict[str, str]]] = [(_made(METHODS.find(first.name), first.name), first.settings)]
    for addon in addons:
        layers.append((ADDONS.find(addon.name)(host=layers[-1][0]), addon.settings))
    found: dict[str, Any] = {}
    for method, settings in layers:
        for key in settings.keys() - _own_settings(method, settings).keys():
            try:
                found[key] = OWN_OPTIONS[key](settings[key])
            except ValueError:
                raise UsageError(f"{spec}: {key} must be a number, got {settings[key]!r}") from None
    return found


def _own_settings(method: Method, settings: dict[str, str]) -> dict[str, str]:
    """The settings without those that are options of the run."""
    known = setting_fields(method)
    return {key: value for key, value in settings.items() if key in known or key not in OWN_OPTIONS}


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
