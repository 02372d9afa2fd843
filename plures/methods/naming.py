"""How users write methods: `fedrod:loss=ce`, `ditto+ala`, `my_methods:FedHalf:share=0.3`. It needs no torch."""

from typing import NamedTuple

from plures.errors import UsageError
from plures.methods import ADDONS, METHODS
from plures.registry import file_doc


class Named(NamedTuple):
    """A method or an add-on as a user writes it."""

    name: str  # of the registry, or module:Class
    settings: dict[str, str]

    @property
    def is_own(self) -> bool:
        """Whether it names code outside the registry."""
        return ":" in self.name


def parse(spec: str) -> list[Named]:
    """The method and its add-ons, each with its settings. A word after a colon without `=` is a class."""
    return [_parse_one(text) for text in spec.split("+")]


def _parse_one(text: str) -> Named:
    name, *rest = text.split(":")
    if rest and rest[0] and "=" not in rest[0] and "," not in rest[0]:
        name, rest = f"{name}:{rest[0]}", rest[1:]
    settings: dict[str, str] = {}
    for item in filter(None, ":".join(rest).split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"{text!r}: a setting is written key=value, got {item!r}")
        settings[key.strip()] = value.strip()
    return Named(name.strip(), settings)


def own_code(spec: str) -> list[str]:
    """The names of code outside the registries that a method is made of: module:Class."""
    return [one.name for one in parse(spec) if one.is_own]


def doc(name: str) -> str:
    """The text at the top of the file of a method or an add-on."""
    for registry in (METHODS, ADDONS):
        if name in registry:
            return registry.doc(name)
    return file_doc(name.partition(":")[0]) or name
