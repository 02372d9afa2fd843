"""Space: the settings and options of a method that are searched, each with its range, and where the search starts.

A user can give other ranges in a TOML file: a table for each method, by its name, and one called `all` for every method
that has what it names. An entry is a range, {low = 0.01, high = 1, log = true}; a list of values; or a single value,
which is held and not searched.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from plures.errors import UsageError, unknown
from plures.files import read_toml
from plures.methods.naming import parse
from plures.methods.search import Search
from plures.methods.spec import OWN_OPTIONS, all_settings, own_options, setting_fields
from plures.runs.config import Config, search_of
from plures.runs.scene import method_of, with_own_options

COMMON = ("lr", "epochs")  # options of a run that are searched for every method, if no others are named
ALL = "all"  # the table of a space file that is for every method
Given = dict[str, dict[str, Any]]  # of a space file


class Dimension(NamedTuple):
    """A setting or an option that is searched."""

    search: Search
    default: Any


class Space(NamedTuple):
    """What is searched of a method, and what is held at another value than its default."""

    searched: dict[str, Dimension]
    held: dict[str, Any]

    def default(self) -> dict[str, Any]:
        """Where the search starts: what a run without tuning has."""
        return {name: one.default for name, one in self.searched.items()}

    def spec(self, method: str, values: dict[str, Any]) -> str:
        """The method with these values in its name, as it can be given to any command."""
        changed = {name: value for name, value in values.items() if value != self.searched[name].default}
        return with_settings(method, self.held | changed)


def with_settings(method: str, values: dict[str, Any]) -> str:
    """A method with settings, and options of its own, written into its name."""
    if not values:
        return method
    words = ",".join(f"{name}={_word(value)}" for name, value in values.items())
    return f"{method}{',' if parse(method)[-1].settings else ':'}{words}"


def _word(value: Any) -> str:
    """A value as it is typed; a plus sign would begin an add-on."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}".replace("e+", "e") if isinstance(value, float) else str(value)


def read_space(path: Path | None) -> Given:
    """The tables of a space file; none without a file."""
    found = {} if path is None else read_toml(path)
    for name, table in found.items():
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {name} stands alone; write it under [all] or under the name of a method")
    return found


def for_method(config: Config, method: str) -> Config:
    """The config of a method: of the settings, those that it has."""
    plain = config.model_copy(update={"method": method, "settings": {}})
    known = setting_fields(method_of(plain))
    return plain.model_copy(update={"settings": {key: x for key, x in config.settings.items() if key in known}})


def check_names(methods: Sequence[str], named: Sequence[str], given: Given, config: Config) -> None:
    """Refuse names of settings and options that no method has, and options that are named without a range."""
    known: set[str] = set()
    for method in methods:
        known |= set(setting_fields(method_of(config.model_copy(update={"method": method, "settings": {}}))))
    for name in config.settings:
        if name not in known:
            raise unknown(f"setting of {', '.join(methods)}", name, known)
    known |= {name for name in OWN_OPTIONS if search_of(name) is not None}
    for name in given.get(ALL, {}):
        if name not in known and name not in OWN_OPTIONS:
            raise unknown(f"setting or option of {', '.join(methods)}", name, known)
    for name in named:
        if name not in known:
            raise unknown(f"setting or option with a range of {', '.join(methods)}", name, known)


def space_of(method: str, config: Config, named: Sequence[str], given: Given) -> Space:
    """What is searched of a method. What stands in its name, or was set for it, is held.

    named: options that are searched besides the method's own settings, and settings that are searched only if named.
    given: ranges of a space file.
    """
    config = with_own_options(for_method(config, method))
    made = method_of(config)
    values, fields = all_settings(made), setting_fields(made)
    fixed = {*config.settings, *own_options(method), *[key for part in parse(method) for key in part.settings]}
    wanted = given.get(ALL, {}) | given.get(method, {})
    for name in given.get(method, {}):
        if name not in fields and name not in OWN_OPTIONS:
            raise unknown(f"setting or option of {method}", name, [*fields, *OWN_OPTIONS])
    ranges: dict[str, Search | None] = {name: field.metadata["search"] for name, field in fields.items()}
    options = {name: search_of(name) for name in OWN_OPTIONS if name not in fields}
    other = "epochs" if config.steps is not None else "steps"  # the one that says nothing here
    searched: dict[str, Dimension] = {}
    held: dict[str, Any] = {}
    for name in [*options, *fields]:
        own = options.get(name) if name in options else ranges[name]
        default = getattr(config, name) if name in options else values[name]
        if name in wanted and name not in fixed:
            entry = _entry(method, name, wanted[name])
            if not isinstance(entry, Search):
                held[name] = entry
                continue
            searched[name] = Dimension(entry.including(default), default)
        elif own is None and name in named and name in fields:
            raise UsageError(f"{method}: {name} has no range; give one in a space file, as {name} = [1, 2, 5]")
        elif name in fixed or own is None or name == other or (own.factor and not default):
            continue
        elif name in named or (name in fields and not own.must_be_named):
            searched[name] = Dimension(own.including(default), default)
    return Space(searched, held)


def _entry(method: str, name: str, value: Any) -> Any:
    """A range of a space file, or a value that is held."""
    if isinstance(value, list):
        if not value:
            raise UsageError(f"space of {method}: {name} has no values")
        return Search(values=tuple(value))
    if not isinstance(value, dict):
        return value
    wrong = set(value) - {"low", "high", "log"}
    if wrong or not {"low", "high"} <= set(value):
        raise UsageError(
            f"space of {method}: {name} is written {{low = 0.01, high = 1, log = true}}, as a list of values, or as "
            f"one value that is held; got {value!r}"
        )
    low, high, is_log = value["low"], value["high"], bool(value.get("log", False))
    if not low < high or (is_log and low <= 0):
        least = "low above 0 and below high" if is_log else "low below high"
        raise UsageError(f"space of {method}: {name} needs {least}, got low {low} and high {high}")
    return Search(low, high, is_log)
