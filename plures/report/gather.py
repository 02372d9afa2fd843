"""All that a report shows, gathered once: for the page and for the figures of papers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from plures.errors import PluresError, RunFailed, UsageError
from plures.learn.solver import Solver
from plures.methods.addons.ala import Ala
from plures.methods.base import Method
from plures.methods.fedrod import FedRoD
from plures.methods.pfedla import PFedLA
from plures.methods.plgu_lf import PlguLf
from plures.methods.spec import chain, choose
from plures.report import states
from plures.report.runs import Group, Run, groups, read, run_folders, twins
from plures.report.states import Alpha, Blends, Heads, Kept, Paths, Profile, SplitTable, Surface
from plures.runs.folders import open_scene
from plures.runs.simulation import Simulation as Live
from plures.runs.simulation import open_simulation as open_run

MOST_SPLITS = 6


class Inside(NamedTuple):
    """What the models of one group show; of several seeds, those of the first."""

    group: Group
    alpha: Alpha | None = None
    blends: Blends | None = None
    paths: Paths | None = None
    path_of: tuple[Group, ...] = ()  # the groups whose ways these are
    heads: Heads | None = None
    profiles: tuple[tuple[str, Profile], ...] = ()
    surfaces: tuple[tuple[str, Surface], ...] = ()
    kept: Kept | None = None


class Material(NamedTuple):
    groups: list[Group]
    splits: dict[str, SplitTable]
    insides: list[Inside]
    notes: list[str]  # sentences about what could not be shown

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]


def gather(given: list[Path]) -> Material:
    """Read the runs, and open those whose models have something to show."""
    found = groups([read(folder) for folder in run_folders(given)])
    if not found:
        raise UsageError("a report needs at least one run folder")
    notes: list[str] = []
    return Material(found, splits(found, notes), insides(found, notes), notes)


def splits(found: list[Group], notes: list[str]) -> dict[str, SplitTable]:
    """Every split that is among the runs, up to some."""
    runs = [run for group in found for run in group.runs]
    different = list({run.same: run for run in runs}.values())
    out: dict[str, SplitTable] = {}
    for run in different[:MOST_SPLITS]:
        label = f"{run.summary['data']}, {run.summary['partition']}, seed {run.summary['seed']}"
        try:
            out[label] = states.split_table(open_scene(run.folder))
        except PluresError as error:
            notes.append(f"The split of {run.folder.name} is not shown: {error}")
    return out


@contextmanager
def opened(run: Run) -> Iterator[Live]:
    live = open_run(run.folder, lambda line: None)
    try:
        yield live
    finally:
        live.close()


def insides(found: list[Group], notes: list[str]) -> list[Inside]:
    out = []
    for group in found:
        run = group.runs[0]
        kinds = {type(layer) for layer in chain(_method(run))}
        if not any(issubclass(kind, (PFedLA, Ala, FedRoD, PlguLf)) for kind in kinds):
            continue
        try:
            with opened(run) as live:
                out.append(_inside(group, live, kinds, found))
        except (PluresError, RuntimeError) as error:
            notes.append(f"What is inside {group.label} is not shown: {error}")
    return out


def _method(run: Run) -> Method:
    try:
        return choose(run.method, {}, Solver())
    except PluresError:
        return Method()  # of another version, or the user's own


def _inside(group: Group, live: Live, kinds: set[type], found: list[Group]) -> Inside:
    inside = Inside(group)
    if any(issubclass(kind, PFedLA) for kind in kinds):
        inside = inside._replace(alpha=states.alpha(live))
    if Ala in kinds:
        inside = inside._replace(blends=states.blends(live))
        inside = _with_paths(inside, live, found)
    if FedRoD in kinds:
        inside = inside._replace(heads=states.heads(live))
    if PlguLf in kinds:
        profiles, surfaces = states.landscape(live)
        named = [(group.label, one) for one in profiles]
        other = _twin(group, found)
        if other is not None:
            with opened(other.runs[0]) as plain:
                named += [(other.label, one) for one in states.landscape(plain)[0][:1]]
        inside = inside._replace(
            profiles=tuple(named),
            surfaces=tuple((group.label, one) for one in surfaces),
            kept=states.kept_layers(live),
        )
    return inside


def _with_paths(inside: Inside, live: Live, found: list[Group]) -> Inside:
    """The way of one client under ALA, and under FedAvg where it is among the runs."""
    own = _way(live)
    if own is None:
        return inside
    ways, of = [own], [inside.group]
    other = _twin(inside.group, found)
    if other is not None:
        with opened(other.runs[0]) as plain:
            without = _way(plain)
        if without is not None:
            ways.append(without)
            of.append(other)
    return inside._replace(paths=states.paths(live, ways), path_of=tuple(of))


def _way(live: Live) -> states.Way | None:
    try:
        return states.way(live)
    except RunFailed:  # its pictures are from another version
        return None


def _twin(group: Group, found: list[Group]) -> Group | None:
    """FedAvg on the same split and seed."""
    first = group.runs[0]
    for other in found:
        if other is not group and twins(first, "fedavg", other.runs[:1]):
            return other
    return None
