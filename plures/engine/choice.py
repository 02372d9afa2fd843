"""Which engine runs, which of its passes are off, and how often it had to run eager."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

from plures.errors import UsageError, unknown

Pass = Literal[
    "clean",
    "join-products",
    "draws",
    "client-by-client",
    "channels-last",
    "winograd",
    "embedding-sums",
    "factored-gradients",
    "products",
    "late-updates",
    "in-place",
    "direct-calls",
    "look-ahead",
    "repeats",
]


class Engine(NamedTuple):
    """How steps are run: traced into a list of kernels, or eager; and the passes that are switched off."""

    kind: Literal["traced", "eager"] = "traced"
    off: tuple[str, ...] = ()
    why_eager: str = ""  # where it was not asked for

    @staticmethod
    def parse(text: str) -> "Engine":
        """`traced`, `eager`, or `traced:winograd=off,look-ahead=off`."""
        kind, _, rest = text.partition(":")
        if kind not in ("traced", "eager"):
            raise unknown("engine", kind, ("traced", "eager"))
        off = []
        for item in filter(None, rest.split(",")):
            name, _, value = item.partition("=")
            if name not in get_args(Pass):
                raise unknown("pass of the engine", name, get_args(Pass))
            if value != "off":
                raise UsageError(f"engine {text!r}: a pass is switched off by {name}=off, got {item!r}")
            off.append(name)
        return Engine("eager" if kind == "eager" else "traced", tuple(sorted(set(off))))

    def has(self, name: Pass) -> bool:
        """Whether a pass is on."""
        return self.kind == "traced" and name not in self.off

    def without(self, name: Pass) -> "Engine":
        """With one pass less."""
        return self._replace(off=tuple(sorted({*self.off, name})))


_current = Engine()


def current() -> Engine:
    """The engine that steps are compiled for now."""
    return _current


@contextmanager
def using(engine: Engine) -> Iterator[None]:
    """Compile steps for another engine in here."""
    global _current
    before, _current = _current, engine
    try:
        yield
    finally:
        _current = before


class Usage(NamedTuple):
    """How many stacked training steps ran traced and how many eager, and why."""

    traced: int = 0
    eager: int = 0
    why: tuple[str, ...] = ()  # each reason once

    def plus(self, other: "Usage") -> "Usage":
        """Both together."""
        return Usage(
            self.traced + other.traced, self.eager + other.eager, tuple(dict.fromkeys((*self.why, *other.why)))
        )

    def to_json(self) -> dict[str, Any]:
        return {"traced": self.traced, "eager": self.eager, "why": list(self.why)}


class Meter:
    """Adds up what is spent while it is open."""

    def __init__(self) -> None:
        self.usage, self.flops = Usage(), 0


_open: list[Meter] = []  # the last one counts


@contextmanager
def metered() -> Iterator[Meter]:
    """Count the steps and FLOPs of what is run in here. Meters may be nested: what an inner one counts, all count."""
    meter = Meter()
    _open.append(meter)
    try:
        yield meter
    finally:
        _open.pop()
        if _open:
            _open[-1].usage = _open[-1].usage.plus(meter.usage)
            _open[-1].flops += meter.flops


def count(n_steps: int, why_eager: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
    """Some steps were run: traced, or eager for a reason. Notes are kept beside the reasons."""
    if _open:
        n_traced = 0 if why_eager else n_steps
        _open[-1].usage = _open[-1].usage.plus(Usage(n_traced, n_steps - n_traced, (*why_eager, *notes)))


def is_metered() -> bool:
    """Whether anybody counts."""
    return bool(_open)


def count_flops(n: int) -> None:
    """Some arithmetic was done."""
    if _open:
        _open[-1].flops += n
