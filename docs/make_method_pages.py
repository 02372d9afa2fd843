"""Fills the tables of docs/methods/*.md from the code and draws the figures beside them.

    python docs/make_method_pages.py              all tables and all figures
    python docs/make_method_pages.py tables       the tables only
    python docs/make_method_pages.py fedala ...   the figures of these pages only

What stands between `<!-- settings -->` (or another word) and `<!-- end -->` in a page is written here; all else is
written by hand. Running it twice gives the same bytes.
"""

import dataclasses
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from plures import tree
from plures.data.batches import Batch
from plures.errors import UsageError
from plures.files import in_bytes
from plures.learn.solver import Solver
from plures.learn.task import Task
from plures.methods import ADDONS, METHODS
from plures.methods.base import Method, settings_of
from plures.methods.ingredients.layer_scores import scored_layers, scores
from plures.methods.messages import Same, one_of
from plures.methods.naming import doc
from plures.methods.spec import all_settings, make_method, setting_fields
from plures.runs.config import make_config
from plures.runs.describing import first_traffic
from plures.runs.scene import Objects, Scene, load_data, make_scene
from plures.runs.simulation import Simulation
from plures.runs.state import RunState
from plures.simulate.shapes import Shapes, shapes_of
from plures.simulate.stacking import run_group
from plures.simulate.work import generic_function, score_model
from plures.simulate.workers import one_thread

HERE = Path(__file__).parent
PAGES = HERE / "methods"
OPTIONS = {"data": "digits", "clients": 20, "partition": "dirichlet:0.1", "seed": 0}
ROUNDS = 12

# What a client is scored with, in words.
PERSONAL = {
    "local": "the one it trained alone",
    "fedavg": "the mean, one for all",
    "fedprox": "the mean, one for all",
    "scaffold": "the server's, one for all",
    "feddyn": "the server's, one for all",
    "fedsam": "the mean, one for all",
    "perfedavg": "the mean, after an epoch of small steps",
    "fedmeta": "the shared start, fine-tuned",
    "fedpermeta": "server's body, own head, fine-tuned",
    "pfedme": "its last envelope model",
    "ditto": "its own, held near the shared one",
    "fedper": "server's body, own head",
    "fedrep": "server's body, own head",
    "lgfedavg": "own body, server's head",
    "fedbn": "the mean, own BatchNorm",
    "fedamp": "trained from a mean of like models",
    "fedphp": "a moving average of its models",
    "fedfomo": "trained from models that helped it",
    "apple": "its own sum of all cores",
    "partialfed": "each layer received or own",
    "pfedhn": "made by the server's hypernetwork",
    "mtl": "its own, drawn to the mean of all",
    "apfl": "a mixture of own and shared model",
    "fedala": "a learned blend of own and received",
    "fedrod": "shared model plus a head of its own",
    "pfedla": "its own mixture of all, by layers",
    "heurpfedla": "such a mixture, with some own layers",
    "plgu-lf": "its own, with some layers replaced",
    "plgu-grep": "server's body, own head",
    "plgu-ghn": "made by the server's hypernetwork",
    "afml": "mean encoder, fine-tuned head",
}


class Deep(nn.Module):
    """Four layers, for figures that tell layers apart."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(math.prod(shape), 64), nn.Linear(64, 48)
        self.third, self.head = nn.Linear(48, 32), nn.Linear(32, n_classes)
        for layer in (self.first, self.second, self.third):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x.flatten(1)))
        return self.head(torch.relu(self.third(torch.relu(self.second(x)))))


class Normed(nn.Module):
    """One hidden layer of 64 with BatchNorm."""

    def __init__(self, shape: tuple[int, ...], n_classes: int) -> None:
        super().__init__()
        self.hidden, self.norm = nn.Linear(math.prod(shape), 64), nn.BatchNorm1d(64)
        self.head = nn.Linear(64, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.hidden(x.flatten(1)))))


DEEP, NORMED = "make_method_pages:Deep", "make_method_pages:Normed"


# Tables


def row_of(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join([row_of(*heads), "|" + "---|" * len(heads), *[row_of(*row) for row in rows]])


def allowed(field: dataclasses.Field[Any]) -> str:
    """What a setting may be, in words."""
    rule, kind = field.metadata, type(field.default)
    if rule["choices"]:
        return ", ".join(f"`{choice}`" for choice in rule["choices"])
    if kind is bool:
        return "`true`, `false`"
    if kind is str:
        return "words, see the meaning"
    words = "whole number" if kind is int else "number"
    least, most = rule["least"], rule["most"]
    if least > -math.inf and most < math.inf:
        return f"{words} from {least:g} to {most:g}"
    if least > -math.inf:
        return f"{words}, {least:g} or more"
    return words


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def settings_rows(fields: dict[str, dataclasses.Field[Any]], values: dict[str, Any]) -> str:
    """Name, default, what is allowed and what it means, for every setting."""
    if not fields:
        return "None."
    rows = [
        [f"`{name}`", shown(values[name]), allowed(field), searched(field, values[name]), field.metadata["help"]]
        for name, field in fields.items()
    ]
    return table(["name", "default", "allowed", "tuned", "meaning"], rows)


def searched(field: dataclasses.Field[Any], default: Any) -> str:
    """Where `plures tune` looks for better values; in brackets, if it does so only when the setting is named."""
    search = field.metadata["search"].including(default)
    words = ", ".join(shown(value) for value in search.values)
    if not search.values:
        words = f"{search.low:g} to {search.high:g}{', log' if search.is_log else ''}"
    return f"({words})" if search.must_be_named else words


def settings_table(method: Method) -> str:
    return settings_rows(setting_fields(method), all_settings(method))


def addon_settings(addon: str) -> str:
    fields = {field.name: field for field in settings_of(ADDONS[addon])}
    return settings_rows(fields, {name: field.default for name, field in fields.items()})


class Held(NamedTuple):
    """Something that is kept or that travels."""

    what: str
    n_bytes: int
    is_number: bool


class State(NamedTuple):
    """What is where in the first round of a method."""

    model: int  # bytes of one model
    server: list[Held]
    client: list[Held]
    down: list[Held]
    up: list[Held]
    bytes_down: int
    bytes_up: int
    own_message: bool  # each client its own


def kind_of(task: Task, names: list[str]) -> str:
    """Which part of a model these tensors are."""
    if len(names) == len(task.initial):
        return "model"
    if all(task.is_head(name) for name in names):
        return "head"
    if all(task.is_batch_norm(name) for name in names):
        return "BatchNorm"
    if not any(task.is_head(name) for name in names):
        return "body"
    return "all but BatchNorm" if not any(task.is_batch_norm(name) for name in names) else "part of the model"


RENAMED = dict.fromkeys(("optimizer", "net_optimizer", "embedding_momentum"), "optimizer's state")
ANONYMOUS = {"host": "", "kept": ""}  # fields that hold something of another name


def merged(parts: list[Held]) -> list[Held]:
    """Those of one name together."""
    found: dict[str, Held] = {}
    for part in parts:
        old = found.get(part.what)
        found[part.what] = part if old is None else old._replace(n_bytes=old.n_bytes + part.n_bytes)
    return list(found.values())


def held(task: Task, of: Any, label: str = "") -> list[Held]:
    """The parts of a tree, by the names of its fields."""
    if isinstance(of, Tensor):
        return [Held(RENAMED.get(label, label), of.nbytes, of.numel() == 1)]
    if isinstance(of, dict):
        known = [name for name in of if name in task.initial]
        rest = {name: x for name, x in of.items() if name not in known}
        found = []
        if known:
            kind = kind_of(task, known)
            named = kind if label in ("", kind) else label if kind == "model" else f"{label} ({kind})"
            found.append(Held(named, sum(of[name].nbytes for name in known), False))
        if rest and label and all(isinstance(x, Tensor) for x in rest.values()):
            return [*found, Held(label, tree.n_bytes(rest), False)]
        groups: dict[str, Any] = {}
        for name, x in rest.items():
            if name in ANONYMOUS:
                found += held(task, x)
                continue
            first, slash, last = name.partition("/")
            groups.setdefault(first, {})[last if slash else ""] = x
        for first, group in groups.items():
            found += held(task, group[""], first) if "" in group else [Held(first, tree.n_bytes(group), False)]
        return found
    if hasattr(of, "_fields"):
        if label in RENAMED:
            return [Held(RENAMED[label], tree.n_bytes(of), False)]
        fields = [(ANONYMOUS.get(name, name), getattr(of, name)) for name in of._fields]
        return merged([part for name, x in fields for part in held(task, x, name)])
    return [part for x in of for part in held(task, x, label)]


@cache
def scene_of(spec: str, model: str = "mlp", rounds: int = 20, unlike: bool = False, **options: Any) -> Scene:
    """Where a method is looked at; with `unlike`, clients' rows look different and their classes are alike."""
    config = make_config({**OPTIONS, "method": spec, "model": model, "rounds": rounds, **options})
    if not unlike:
        return make_scene(config)
    data, rng = load_data(config), np.random.default_rng(0)
    client = rng.permutation(len(data.y)) % 20
    gain, shift = rng.uniform(0.2, 2, 20), rng.normal(0, 1, 20)
    x = data.x * gain[client, None, None, None] + shift[client, None, None, None]
    config = config.model_copy(update={"partition": "natural"})
    return make_scene(config, objects=Objects(data=data._replace(x=x.astype(np.float32), client=client)))


def shapes_in(scene: Scene) -> Shapes:
    return shapes_of(scene.method, scene.task, scene.population.sizes())


@cache
def state_of(spec: str, model: str = "mlp") -> State:
    scene = scene_of(spec, model)
    task, shapes = scene.task, shapes_in(scene)
    bytes_down, bytes_up = first_traffic(scene, shapes)
    parts = [held(task, of) for of in (shapes.server, shapes.kept, shapes.train, shapes.upload)]
    return State(tree.n_bytes(task.initial), *parts, bytes_down, bytes_up, shapes.is_each)


def times(n_bytes: int, model: int) -> str:
    """In multiples of the model, without needless zeros."""
    value = n_bytes / model
    if value == 0:
        return "0"
    return "<0.01" if value < 0.005 else f"{value:.2f}".rstrip("0").rstrip(".")


def contents(parts: list[Held], model: int) -> str:
    """What it is made of, each with its multiple of the model; single numbers by name."""
    words = [part.what if part.is_number else f"{part.what} {times(part.n_bytes, model)}" for part in parts]
    return ", ".join(words) if words else "nothing"


def state_table(spec: str, model: str = "mlp") -> str:
    """What server and client keep and what travels, in multiples of the model."""
    state = state_of(spec, model)
    kind = "each client its own" if state.own_message else "the same for all"
    rows = []
    for where, parts, total in [
        ("server keeps", state.server, None),
        ("client keeps, never sent", state.client, None),
        (f"down, per client and round ({kind})" if state.down else "down", state.down, state.bytes_down),
        ("up, per client and round" if state.up else "up", state.up, state.bytes_up),
    ]:
        held_bytes = sum(part.n_bytes for part in parts)
        n_bytes = held_bytes if total is None else total
        what = contents(parts, state.model)
        if n_bytes < 0.99 * held_bytes:
            what += f", of which {times(n_bytes, state.model)} is sent"
        rows.append([where, what, times(n_bytes, state.model), in_bytes(n_bytes)])
    head = f"In multiples of the model, `{model}` on digits ({in_bytes(state.model)}), with 20 clients:"
    if ":" in model:
        head = head.replace(f"`{model}`", "one hidden layer of 64 with BatchNorm")
    return head + "\n\n" + table(["", "what", "models", "bytes"], rows)


def title_of(name: str) -> str:
    """The heading of a page: the method's name as its paper writes it."""
    return doc(name).partition(":")[0]


def idea_of(name: str) -> str:
    return doc(name).splitlines()[0].partition(": ")[2].rstrip(".")


def index_table() -> str:
    rows = []
    for name in METHODS:
        state = state_of(name)
        travels = f"{times(state.bytes_down, state.model)} down, {times(state.bytes_up, state.model)} up"
        rows.append([f"[`{name}`]({name}.md)", idea_of(name), travels, PERSONAL[name]])
    return table(["name", "idea", "travels (models)", "a client's own model"], rows)


@cache
def refusal(host: str, addon: str) -> str:
    """Why a host cannot take an add-on; empty where it can."""
    try:
        make_method(f"{host}+{addon}", {}, Solver())
    except UsageError as error:
        return str(error).partition(": ")[2]
    return ""


@cache
def stumbles(host: str, addon: str) -> bool:
    """Whether a pair that is not refused stops with an error in its first round, of few clients."""
    short = f"{host}+{addon}:c_epochs=1" if addon == "c" else f"{host}+{addon}"
    try:
        shapes_in(scene_of(short, clients=3))
    except UsageError:
        raise
    except Exception:
        return True
    return False


def cell(host: str, addon: str, tried: bool) -> str:
    if refusal(host, addon):
        return "-"
    return "fails" if tried and stumbles(host, addon) else "yes"


def hosts_table(tried: bool = True) -> str:
    rows = [[f"`{host}`", *[cell(host, addon, tried) for addon in ADDONS]] for host in METHODS]
    text = table(["", *[f"`+{addon}`" for addon in ADDONS]], rows)
    if "fails" in text:
        text += "\n\n`fails`: not refused, but its first round stops with an error. That is a defect."
    return text


def pairs_table(tried: bool = True) -> str:
    """Which add-on can be put on after which, around FedAvg."""
    rows = [[f"`+{first}`", *[cell(f"fedavg+{first}", addon, tried) for addon in ADDONS]] for first in ADDONS]
    return table(["", *[f"`+{addon}`" for addon in ADDONS]], rows)


def refusals_table() -> str:
    """Reasons, each with the pairs that it holds for."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for host in [*METHODS, *[f"fedavg+{addon}" for addon in ADDONS]]:
        for addon in ADDONS:
            if why := refusal(host, addon):
                reasons.setdefault(why, {}).setdefault(host, []).append(addon)
    rows = []
    for why, hosts in reasons.items():
        by_addons: dict[tuple[str, ...], list[str]] = {}
        for host, addons in hosts.items():
            by_addons.setdefault(tuple(addons), []).append(host)
        for addons, names in by_addons.items():
            rows.append([", ".join(f"`{x}`" for x in names), ", ".join(f"`{x}`" for x in addons), why])
    return table(["", "cannot take", "because"], rows)


def filled(page: str, words: str, text: str) -> str:
    """The page with the text between `<!-- words -->` and `<!-- end -->`."""
    pattern = re.compile(rf"(<!-- {re.escape(words)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"there is no place <!-- {words} -->")
    return pattern.sub(lambda match: f"{match[1]}{text}\n{match[2]}", page)


def write_tables() -> None:
    for name in METHODS:
        path = PAGES / f"{name}.md"
        page = filled(path.read_text("utf-8"), "settings", settings_table(METHODS[name]()))
        page = filled(page, "state", state_table(name))
        if name == "fedbn":
            page = filled(page, "state with BatchNorm", state_table(name, NORMED))
        if name == "fedrod":
            page = filled(page, "state of head=hyper", state_table("fedrod:head=hyper"))
        path.write_text(page, "utf-8")
    path = PAGES / "README.md"
    path.write_text(filled(path.read_text("utf-8"), "index", index_table()), "utf-8")
    path = PAGES / "addons.md"
    page = path.read_text("utf-8")
    for addon in ADDONS:
        page = filled(page, f"settings {addon}", addon_settings(addon))
    for words, text in {"hosts": hosts_table(), "pairs": pairs_table(), "refusals": refusals_table()}.items():
        page = filled(page, words, text)
    path.write_text(page, "utf-8")


# Short runs for the figures


Look = Callable[[RunState, Any], Any]


def played(
    spec: str, look: Look, rounds: int = ROUNDS, model: str = "mlp", every: bool = True, **options: Any
) -> list[Any]:
    """What `look(state, server before the round)` saw after every round, or after the last one."""
    found = []
    scene = scene_of(spec, model, rounds, **options)
    with one_thread(), torch.no_grad(), closing(Simulation(scene, None, lambda line: None)) as simulation:
        state = simulation.state
        for number in range(rounds):
            before = state.server
            simulation.play_round()
            if every or number == rounds - 1:
                found.append(look(state, before))
    return found


def at_end(spec: str, look: Callable[[RunState], Any], model: str = "mlp", **options: Any) -> Any:
    return played(spec, lambda state, _: look(state), model=model, every=False, **options)[0]


def clients_of(state: RunState) -> Any:
    """What all clients keep, stacked."""
    return state.store.rows(torch.tensor(state.eligible))


def accuracies(state: RunState, method: Method | None = None) -> np.ndarray:
    """Of every client's personal model on its own test rows, perhaps with other settings; per cent."""
    scene, method = state.scene, method or state.scene.method
    ids = state.scored
    message = method.serve(scene.task, state.server, torch.tensor(ids))
    shards = [scene.population.shards(ids, part, "figure", state.round) for part in ("train", "test")]
    states = state.store.rows(torch.tensor(ids))

    def score(received: Any, client: Any, train: Any, test: Any) -> Any:
        return score_model(method, scene.task, method.personalize(scene.task, received, client, train), test)

    found = run_group("vectorised", score, message, states, *shards)
    return (100 * found["hits"] / found["n"]).numpy()


def generic_accuracies(state: RunState) -> np.ndarray:
    """Of the one model for all on every client's test rows; per cent."""
    scene, ids = state.scene, state.scored
    model = scene.method.generic(scene.task, state.server)
    test = scene.population.shards(ids, "test", "figure", state.round)
    found = run_group("vectorised", generic_function(scene.task), Same(model), test)
    return (100 * found["hits"] / found["n"]).numpy()


@cache
def curve(spec: str, **options: Any) -> tuple[float, ...]:
    """Mean accuracy of personal models after every round."""
    return tuple(played(spec, lambda state, _: float(accuracies(state).mean()), **options))


def by_class(state: RunState) -> list[int]:
    """The clients, those with the same classes together."""
    labels, rows = state.scene.population.y.numpy(), state.scene.population.train
    return sorted(state.eligible, key=lambda i: (np.unique(labels[rows[i]]).tolist(), i))


def distance(a: Any, b: Any) -> np.ndarray:
    """Of each row of stacked models `a` from `b`, a model or a stack of them."""
    squares = [(x - b[name]).square().flatten(1).sum(1) for name, x in a.items() if not tree.is_statistic(name)]
    return torch.stack(squares).sum(0).sqrt().numpy()


def lengths(of: Any) -> np.ndarray:
    return distance(of, tree.zeros_like(of))


# Drawing


BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555"
SILENT = ("key", "round", "rounds", "n_clients", "steps", "me")  # book-keeping that a diagram leaves out
Axes = Any
GROUPED = {"partition": "pathological:2"}  # groups of clients with the same two classes


def plain(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)


def lines(axes: Axes, curves: dict[str, Any], y: str, band: bool = True, **legend: Any) -> None:
    """One line for each, over rounds; those with a row for each client as mean and range of the middle 80 %."""
    for (label, values), colour, dashes in zip(
        curves.items(), (RED, BLUE, GREEN, PINK, ORANGE), ("-", "--", ":", "-.", "-"), strict=False
    ):
        values = np.asarray(values)
        at = np.arange(1, len(values) + 1)
        if values.ndim == 2:
            low, high = np.percentile(values, [10, 90], axis=1)
            if band:
                axes.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)
            values = values.mean(1)
        axes.plot(at, values, color=colour, ls=dashes, lw=1.8, label=label)
    plain(axes, "round", y)
    axes.set_xlim(1, len(at))
    axes.legend(frameon=False, fontsize=8, **legend)


def accuracy_lines(axes: Axes, curves: dict[str, Any]) -> None:
    lines(axes, curves, "personal accuracy, %", loc="lower right")
    axes.set_ylim(0, 102)


def mesh(axes: Axes, values: Any, x: str, y: str, bar: str, **scale: Any) -> None:
    values = np.asarray(values)
    drawn = axes.pcolormesh(values, cmap="cividis", edgecolors="white", linewidth=0.2, **scale)
    axes.invert_yaxis()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    colour_bar = axes.figure.colorbar(drawn, ax=axes, fraction=0.05, pad=0.03)
    colour_bar.set_label(bar)
    colour_bar.outline.set_visible(False)
    for side in axes.spines.values():
        side.set_visible(False)


def matrix(axes: Axes, values: Any, state: RunState, bar: str, **scale: Any) -> None:
    """Client by client."""
    order = by_class(state)
    mesh(axes, np.asarray(values)[order][:, order], "from client", "to client", bar, **scale)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal")


def layer_mesh(axes: Axes, values: Any, layers: list[str], bar: str, **scale: Any) -> None:
    """Client by layer."""
    mesh(axes, values, "layer, from input to head", "client", bar, **scale)
    axes.set_xticks(np.arange(len(layers)) + 0.5, layers)
    axes.set_yticks([])
    axes.tick_params(length=0)


def scatter(axes: Axes, before: Any, after: Any, x: str, y: str) -> None:
    """One dot for each client, with the line where nothing changes."""
    lowest = min(np.min(before), np.min(after))
    low = max(0, 10 * math.floor(lowest / 10) - 5)
    axes.plot([low, 102], [low, 102], color=GREY, lw=1, ls="--")
    axes.scatter(before, after, s=28, color=BLUE, alpha=0.8, lw=0)
    axes.set_xlim(low, 103)
    axes.set_ylim(low, 103)
    axes.set_aspect("equal")
    plain(axes, x, y)
    axes.annotate("below: worse", (0.97, 0.03), xycoords="axes fraction", ha="right", fontsize=8, color=GREY)


def held_lines(parts: list[Held], model: int) -> list[str]:
    named = [p for p in parts if p.what not in SILENT and p.n_bytes]
    if not named:
        return ["nothing"]
    found = [p.what if p.n_bytes < 0.005 * model else f"{p.what} {times(p.n_bytes, model)}×" for p in named]
    return [*found[:3], f"and {len(found) - 3} more"] if len(found) > 4 else found


def diagram(axes: Axes, name: str, model: str = "mlp") -> None:
    """Server, client, what they keep, and what travels."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    state = state_of(name, model)
    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    axes.axis("off")

    def box(low: float, high: float, colour: str) -> None:
        shape = FancyBboxPatch(
            (0.4, low), 9.2, high - low, boxstyle="round,pad=0.1", fc=colour + "22", ec=colour, lw=1.4
        )
        axes.add_patch(shape)

    def write(x: float, y: float, text: str, **how: Any) -> None:
        axes.text(x, y, text, **{"va": "top", "fontsize": 8.5, "linespacing": 1.35, **how})

    def arrow(x: float, start: float, end: float, colour: str) -> None:
        axes.add_patch(FancyArrowPatch((x, start), (x, end), arrowstyle="-|>", mutation_scale=14, color=colour, lw=1.8))

    box(6.75, 9.8, BLUE)
    write(0.7, 9.65, "server", weight="bold")
    write(3.4, 9.65, "keeps\n" + "\n".join(held_lines(state.server, state.model)))
    box(0.2, 3.75, RED)
    write(0.7, 3.6, "client", weight="bold")
    write(3.4, 3.6, "keeps, never sent\n" + "\n".join(held_lines(state.client, state.model)))
    write(0.7, 0.35, f"own model: {PERSONAL[name]}", va="bottom", style="italic", fontsize=8)
    if not state.down and not state.up:
        write(5, 5.25, "nothing travels", ha="center", va="center")
        return
    whose = "its own" if state.own_message else "one for all"
    for x, start, end, colour, total, parts, more in [
        (0.9, 6.6, 3.9, BLUE, state.bytes_down, state.down, f"down, {whose}:"),
        (5.6, 3.9, 6.6, RED, state.bytes_up, state.up, "up:"),
    ]:
        arrow(x, start, end, colour)
        named = [p.what for p in parts if p.what not in SILENT and p.n_bytes >= 0.005 * state.model]
        what = textwrap.fill(f"({', '.join(named)})", 24)
        label = f"{more}\n{times(total, state.model)}× the model\n{what}"
        write(x + 0.4, 5.25, label, va="center")


def curves_panel(name: str, **options: Any) -> Callable[[Axes], None]:
    """Personal accuracy over rounds, against FedAvg and Local on the same split."""

    def draw(axes: Axes) -> None:
        specs = {title_of(name): name, "FedAvg": "fedavg", "Local": "local"}
        accuracy_lines(axes, {label: curve(spec, **options) for label, spec in specs.items()})

    return draw


def fedavg_panel(axes: Axes) -> None:
    found = {
        "FedAvg": curve("fedavg"),
        "its local models (pm=local)": curve("fedavg:pm=local"),
        "Local": curve("local"),
    }
    accuracy_lines(axes, found)


def local_panel(axes: Axes) -> None:
    accuracy_lines(axes, {"Local": curve("local"), "FedAvg": curve("fedavg")})


def fedprox_panel(axes: Axes) -> None:
    def moves(state: RunState, before: Any) -> np.ndarray:
        return distance(clients_of(state).model, before)

    found = {f"mu={mu}": played(f"fedprox:pm=local,mu={mu}", moves) for mu in ("0", "0.1", "1", "5")}
    lines(axes, found, "way of a client in a round (mean)", band=False)
    axes.set_ylim(bottom=0)


def scaffold_panel(axes: Axes) -> None:
    def sizes(state: RunState, _: Any) -> tuple[np.ndarray, float, np.ndarray]:
        own, all_ = clients_of(state).control, state.server.control
        return lengths(own), float(tree.dot(all_, all_).sqrt()), distance(own, all_)

    own, all_, turn = zip(*played("scaffold", sizes), strict=True)
    lines(axes, {"control of a client": own, "what turns it: c - c_i": turn, "mean control": all_}, "length")


def feddyn_panel(axes: Axes) -> None:
    alpha = all_settings(METHODS["feddyn"]())["alpha"]

    def sizes(state: RunState, _: Any) -> tuple[np.ndarray, float]:
        drift = state.server.drift
        return lengths(clients_of(state).gradient), alpha * float(tree.dot(drift, drift).sqrt())

    own, all_ = zip(*played("feddyn", sizes), strict=True)
    lines(axes, {"gradient of a client": own, "mean gradient h": all_}, "length")


def fedsam_panel(axes: Axes) -> None:
    """The loss of the shared model a step uphill, over all training rows."""
    far = np.linspace(0, 1.0, 21)

    def uphill(state: RunState) -> list[float]:
        scene, model = state.scene, state.server
        rows = torch.from_numpy(np.concatenate(scene.population.train))
        x, y = scene.population.x[rows], scene.population.y[rows]
        batch = Batch(x, y, torch.ones(len(rows)), torch.bincount(y).float(), torch.tensor(0))
        gradients = torch.func.grad(scene.task.loss)(model, batch)
        unit = tree.scale(1 / tree.dot(gradients, gradients).sqrt(), gradients)
        return [float(scene.task.loss(tree.axpy(float(r), unit, model), batch)) for r in far]

    for spec, label, colour, dashes in [
        ("fedavg:weights=uniform", "FedAvg", BLUE, "--"),
        ("fedsam", "FedSAM, rho=0.05", RED, "-"),
        ("fedsam:rho=0.2", "FedSAM, rho=0.2", GREEN, ":"),
    ]:
        axes.plot(far, at_end(spec, uphill), color=colour, ls=dashes, lw=1.8, label=label)
    plain(axes, "steps uphill from the shared model (length)", "loss over all training rows")
    axes.set_xlim(0, far[-1])
    axes.legend(frameon=False, fontsize=8)


def adaptation_panel(name: str, setting: str, epochs: str) -> Callable[[Axes], None]:
    """Accuracy of each client before and after adaptation."""

    def draw(axes: Axes) -> None:
        def both(state: RunState) -> tuple[np.ndarray, np.ndarray]:
            return accuracies(state, dataclasses.replace(state.scene.method, **{setting: 0})), accuracies(state)

        before, after = at_end(name, both)
        scatter(axes, before, after, "before adaptation, %", f"after {epochs}, %")

    return draw


def afml_panel(axes: Axes) -> None:
    epochs = range(0, 11)

    def over_epochs(state: RunState) -> list[np.ndarray]:
        return [accuracies(state, dataclasses.replace(state.scene.method, pers=n)) for n in epochs]

    found = np.array(at_end("afml", over_epochs))
    low, high = np.percentile(found, [10, 90], axis=1)
    axes.fill_between(epochs, low, high, color=BLUE, alpha=0.15, lw=0, label="middle 80 % of clients")
    axes.plot(epochs, found.mean(1), color=RED, lw=1.8, marker="o", ms=4, label="mean")
    plain(axes, "epochs of personalisation", "personal accuracy, %")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def distance_panel(name: str, setting: str, rates: dict[str, float]) -> Callable[[Axes], None]:
    """How far personal models are from the shared one."""

    def draw(axes: Axes) -> None:
        def far(state: RunState, before: Any) -> np.ndarray:
            return distance(clients_of(state).model, state.server)

        found = {f"{setting}={x}": played(f"{name}:{setting}={x}", far, lr=lr) for x, lr in rates.items()}
        lines(axes, found, "distance of personal from shared model")
        axes.set_ylim(bottom=0)

    return draw


def fedamp_panel(axes: Axes) -> None:
    def look(state: RunState) -> tuple[np.ndarray, RunState]:
        return state.scene.method.weights(state.server.models, state.server.seen).numpy(), state

    weights, state = at_end("fedamp", look, **GROUPED)
    np.fill_diagonal(weights, np.nan)
    matrix(axes, weights, state, "weight (own left white)", vmin=0)


def fedfomo_panel(axes: Axes) -> None:
    affinity, state = at_end("fedfomo", lambda state: (state.server.affinity.numpy(), state), **GROUPED)
    matrix(axes, affinity, state, "sum of weights so far")


def apple_panel(axes: Axes) -> None:
    """What the weights gained since their start, the shares of rows."""

    def look(state: RunState) -> tuple[np.ndarray, RunState]:
        sizes = state.scene.population.sizes()
        return (clients_of(state).weights - sizes / sizes.sum()).numpy(), state

    gained, state = at_end("apple:models=19", look, **GROUPED)
    matrix(axes, gained, state, "weight of a core, less its start")


def pfedla_panel(axes: Axes) -> None:
    """The weights of the head."""

    def look(state: RunState) -> tuple[np.ndarray, RunState]:
        ids = torch.tensor(state.eligible)
        host = state.scene.method.host
        return host.weights(state.server.mixers, ids)[:, -1].numpy(), state

    weights, state = at_end("pfedla", look, **GROUPED)
    matrix(axes, weights, state, "weight in the head (plain mean: 0.05)")


def heurpfedla_panel(axes: Axes) -> None:
    """How often each client kept each layer."""

    def look(state: RunState, before: Any) -> np.ndarray:
        message = state.scene.method.send(state.scene.task, before, torch.tensor(state.eligible))
        return message.tree["layers kept"].numpy()

    kept = np.mean(played("heurpfedla", look, model=DEEP), axis=0)
    layers = list(scene_of("heurpfedla", DEEP).task.layers)
    layer_mesh(axes, kept, layers, "share of rounds in which it is kept", vmin=0, vmax=1)


def partialfed_panel(axes: Axes) -> None:
    def keeps(state: RunState) -> np.ndarray:
        return clients_of(state).logits.softmax(-1)[:, :, 1].numpy()

    shares = at_end("partialfed:warm_up=3", keeps, model=DEEP)
    layers = list(scene_of("partialfed", DEEP).task.layers)
    layer_mesh(axes, shares, layers, "inclination to keep the own layer", vmin=0.25, vmax=0.75)


def plgu_panel(spec: str, own: str, **scale: Any) -> Callable[[Axes], None]:
    """The scores of the layers, by which clients perturb the next round."""

    def draw(axes: Axes) -> None:
        def look(state: RunState) -> tuple[np.ndarray, list[str]]:
            scene, task = state.scene, state.scene.task
            method = getattr(scene.method, "host", scene.method)
            ids = torch.tensor(state.eligible)
            message = scene.method.send(task, state.server, ids)
            kept = clients_of(state)
            models = getattr(getattr(kept, "host", kept), own)
            found = []
            for i in range(len(ids)):
                received = one_of(message, i)
                layer_of = scored_layers(task, received, method.score_norm_layers)
                how = (layer_of, method.score, method.scale, torch.tensor(True))
                found.append(scores(task, tree.row(models, i), received, *how).numpy())
            return np.array(found), list(dict.fromkeys(layer_of.values()))

        values, layers = at_end(spec, look, model=DEEP)
        layer_mesh(axes, values, layers, "score (mean one)", **scale)

    return draw


def mtl_panel(axes: Axes) -> None:
    """How far the models are from their mean."""

    def far(state: RunState, _: Any) -> np.ndarray:
        models = clients_of(state).model
        return distance(models, tree.map(lambda x: x.mean(0), models))

    found = {"default": played("mtl", far)}
    found |= {f"strength={value}": played(f"mtl:strength={value}", far) for value in ("0.01", "0.1")}
    lines(axes, found, "distance of models from their mean")
    axes.set_ylim(bottom=0)


def apfl_panel(axes: Axes) -> None:
    alphas = np.array(played("apfl", lambda state, _: clients_of(state).alpha.numpy()))
    at = np.arange(1, len(alphas) + 1)
    axes.plot(at, alphas, color=BLUE, lw=0.9, alpha=0.6)
    axes.plot(at, alphas.mean(1), color=RED, lw=2.2, label="mean")
    plain(axes, "round", "alpha: share of the own model")
    axes.set_xlim(1, len(at))
    axes.set_ylim(0, 1.02)
    axes.plot([], [], color=BLUE, lw=0.9, label="a client")
    axes.legend(frameon=False, fontsize=8, loc="lower left")


def fedala_panel(axes: Axes) -> None:
    def blends(state: RunState) -> np.ndarray:
        return torch.cat([x.flatten() for x in clients_of(state).blend.values()]).numpy()

    values = at_end("fedala", blends)
    axes.hist(values, bins=25, range=(0, 1), color=BLUE, weights=np.full(len(values), 100 / len(values)))
    plain(axes, "blend of a weight (0: own, 1: received)", "share of the head's weights, %")
    axes.set_yscale("log")


def fedrod_panel(axes: Axes) -> None:
    generic, personal = at_end("fedrod", lambda state: (generic_accuracies(state), accuracies(state)))
    scatter(axes, generic, personal, "generic model, %", "personal model, %")


def addons_diagram(axes: Axes) -> None:
    """Where each add-on takes hold of a client's round."""
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    axes.set_xlim(0, 10)
    axes.set_ylim(0, 10)
    axes.axis("off")
    steps = [
        ("received model", ""),
        ("where training starts", "+ala  +c"),
        ("loss and steps", "+prox  +sam  +brm\n+scaffold  +feddyn"),
        ("upload and merge", "+scaffold  +feddyn"),
        ("personal model", "+ft  +ala  +c"),
    ]
    for k, (what, addons) in enumerate(steps):
        y = 9.1 - 2.05 * k
        axes.add_patch(
            FancyBboxPatch((0.3, y - 0.55), 4.6, 1.1, boxstyle="round,pad=0.1", fc=BLUE + "22", ec=BLUE, lw=1.3)
        )
        axes.text(2.6, y, what, ha="center", va="center", fontsize=9)
        axes.text(5.4, y, addons, va="center", fontsize=9, color=RED, weight="bold")
        if k:
            axes.add_patch(
                FancyArrowPatch((2.6, y + 1.35), (2.6, y + 0.65), arrowstyle="-|>", mutation_scale=12, color=GREY)
            )


def addons_panel(axes: Axes) -> None:
    """The same host with each add-on."""
    names = ["fedavg", *[f"fedavg+{addon}" for addon in ADDONS]]
    values = [at_end(spec, lambda state: float(accuracies(state).mean())) for spec in names]
    at = np.arange(len(names))[::-1]
    axes.barh(at, values, color=[GREY, *[BLUE] * len(ADDONS)], height=0.7)
    for y, value in zip(at, values, strict=True):
        axes.text(value + 1, y, f"{value:.0f}", va="center", fontsize=8)
    axes.set_yticks(at, names)
    axes.set_xlim(0, 108)
    plain(axes, f"personal accuracy after {ROUNDS} rounds, %", "")
    axes.grid(visible=False, axis="y")


PANELS: dict[str, Callable[[Axes], None]] = {
    "local": local_panel,
    "fedavg": fedavg_panel,
    "fedprox": fedprox_panel,
    "scaffold": scaffold_panel,
    "feddyn": feddyn_panel,
    "fedsam": fedsam_panel,
    "perfedavg": adaptation_panel("perfedavg", "pm_epochs", "an epoch of small steps"),
    "fedmeta": adaptation_panel("fedmeta", "pers", "5 epochs"),
    "fedpermeta": adaptation_panel("fedpermeta", "pers", "5 epochs of the head"),
    "pfedme": distance_panel("pfedme", "lam", {"5": 0.09, "15": 0.03, "30": 0.015}),
    "ditto": distance_panel("ditto", "lam", {"0.01": 0.1, "0.1": 0.1, "1": 0.1}),
    "fedbn": curves_panel("fedbn", model=NORMED, unlike=True),
    "fedamp": fedamp_panel,
    "fedfomo": fedfomo_panel,
    "apple": apple_panel,
    "partialfed": partialfed_panel,
    "mtl": mtl_panel,
    "apfl": apfl_panel,
    "fedala": fedala_panel,
    "fedrod": fedrod_panel,
    "pfedla": pfedla_panel,
    "heurpfedla": heurpfedla_panel,
    "plgu-lf": plgu_panel("plgu-lf:personal=1", "model", norm="log"),
    "plgu-grep": plgu_panel("plgu-grep", "body"),
    "plgu-ghn": plgu_panel("plgu-ghn", "model", norm="log"),
    "afml": afml_panel,
}


def draw(name: str, folder: Path = PAGES) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": "plures", "svg.fonttype": "none", "font.size": 9, "axes.axisbelow": True}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 3.7), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=[1, 1.05])
        if name == "addons":
            addons_diagram(left)
            addons_panel(right)
        else:
            diagram(left, name, NORMED if name == "fedbn" else "mlp")
            PANELS.get(name, curves_panel(name))(right)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
        if folder != PAGES:
            figure.savefig(folder / f"{name}.png", dpi=110)


def names_to_draw(words: list[str]) -> Iterator[str]:
    for name in words or [*METHODS, "addons"]:
        if name not in METHODS and name != "addons":
            raise SystemExit(f"no page {name}")
        yield name


def main() -> None:
    words = sys.argv[1:]
    if words in ([], ["tables"]):
        write_tables()
    if words != ["tables"]:
        for name in names_to_draw(words):
            draw(name)


if __name__ == "__main__":
    main()
