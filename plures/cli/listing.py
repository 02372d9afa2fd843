"""What `plures list`, `plures data` and `plures show` print. Nothing here imports torch."""

from pathlib import Path

from plures.data import download
from plures.data.partition import PARTITIONS
from plures.data.sources import DATA, REGISTERED, data_folder
from plures.errors import unknown
from plures.files import in_bytes
from plures.methods import ADDONS, METHODS
from plures.methods.naming import doc, parse
from plures.models.names import MODELS
from plures.runs.describe import Description, Tensors, known_description
from plures.studies import preset

LISTS = ("methods", "data", "models", "partitions", "presets")
MOST_TENSORS = 40  # that are listed by name
SHOWN_WITH = "With model mlp on digits and 20 clients"


def print_list(what: str) -> None:
    """(name, one line) for each thing of a kind."""
    if what not in LISTS:
        raise unknown("list", what, LISTS)
    found = listing(what)
    width = max(len(name) for name, _ in found)
    for name, line in found:
        print(f"{name:{width}}  {line}")


def listing(what: str) -> list[tuple[str, str]]:
    """Names, each with a line about it."""
    if what == "methods":
        methods = [(name, METHODS.doc(name).partition("\n")[0].partition(": ")[2]) for name in METHODS]
        addons = [(f"+{name}", ADDONS.line(name)) for name in ADDONS]
        return [(name, line + _tasks(name)) for name, line in methods + addons]
    if what == "data":
        own = [
            ("FILE.csv", "your own table, or FILE.parquet; --target names the column to predict, see docs/data.md"),
            ("FILE.npz", "your own rows: arrays x and y, and if you like client and is_test"),
            ("FOLDER", "your own clients, one file each (.npz, .csv or .txt); or CLIENT/CLASS/ with images or texts"),
        ]
        others = [(name, REGISTERED.line(name)) for name in REGISTERED]
        return [(name, entry.description) for name, entry in DATA.items()] + others + own
    if what == "models":
        return [(name, MODELS.line(name)) for name in MODELS]
    if what == "partitions":
        return [(name, entry.description) for name, entry in PARTITIONS.items()]
    return [(name, one.title) for name, one in preset.load().items()]


def _tasks(name: str) -> str:
    """What a method or add-on can predict, if not everything."""
    known = known_description(name.replace("+", "fedavg+", 1) if name.startswith("+") else name)
    return " [classes only]" if known is not None and known.needs_classes else ""


def print_data(data_dir: Path | None) -> None:
    """The state of each data set, and where it is looked for."""
    width = max(map(len, DATA))
    for name in DATA:
        print(f"{name:{width}}  {download.status(name, data_dir)}")
    print(f"looked for in {data_folder(data_dir)}")


def get_data(name: str, data_dir: Path | None) -> None:
    """Check a data set, or fetch it."""
    download.get(name, data_dir, print)


def print_known_method(spec: str) -> bool:
    """Print what is known of a method without running it; False if that is not in the catalog."""
    found = known_description(spec)
    if found is None:
        return False
    print(about_method(spec, found, SHOWN_WITH))
    return True


def about_method(spec: str, found: Description, where: str) -> str:
    """The idea, the paper, the settings, and what travels and what stays."""
    base, *addons = [one.name for one in parse(spec)]
    lines = [doc(base), ""]
    for name in addons:
        lines += [f"Add-on {name}: {doc(name).splitlines()[0].partition(': ')[2]}", ""]
    lines.append("Settings")
    for setting in found.settings:
        allowed = f" ({' | '.join(setting.choices)})" if setting.choices else ""
        lines.append(f"  {setting.name} = {setting.default}{allowed}: {setting.help}")
    if not found.settings:
        lines.append("  none")
    kind = "each client its own" if found.is_each else "the same for all"
    lines += ["", where]
    lines += _tensors(f"down, per client and round ({kind})", found.down)
    lines += _tensors("up, per client and round", found.up)
    lines += _tensors("state kept by a client, never sent", found.kept)
    lines += [f"  state kept by the server: {in_bytes(found.server_bytes)}"]
    tasks = f"classes alone: {found.needs_classes}" if found.needs_classes else "classes, labels, numbers and counts"
    lines += ["", f"Predicts {tasks}"]
    return "\n".join(lines)


def _tensors(title: str, of: Tensors) -> list[str]:
    lines = [f"  {title}: {in_bytes(of.n_bytes) if of.shapes else 'nothing'}"]
    shown = list(of.shapes.items())[:MOST_TENSORS]
    lines += [f"    {name} {'x'.join(map(str, shape)) or 'number'}" for name, shape in shown]
    if len(of.shapes) > MOST_TENSORS:
        lines.append(f"    and {len(of.shapes) - MOST_TENSORS} more")
    return lines
