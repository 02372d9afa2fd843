"""Gather: all that a report shows, collected once for the page and for the figures of papers."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from plures.errors import PluresError, UsageError
from plures.learn.solver import Solver
from plures.methods.spec import chain, make_method
from plures.registry import load
from plures.report.insides.base import Opened, Picture
from plures.report.records import Group, RunRecord, find_run_folders, find_twins, group_runs, read_record
from plures.report.splits import SplitTable, gather_splits
from plures.runs.simulation import open_simulation


class Inside(NamedTuple):
    """What the models of one group show; of several seeds, those of the first."""

    group: Group
    pictures: list[Picture]


class Material(NamedTuple):
    groups: list[Group]
    splits: dict[str, SplitTable]
    insides: list[Inside]
    notes: list[str]  # sentences about what could not be shown

    @property
    def runs(self) -> list[RunRecord]:
        return [run for group in self.groups for run in group.runs]


def gather_material(given: list[Path]) -> Material:
    """Read the runs, and open those whose methods have something to show of their models."""
    notes: list[str] = []
    records, failure = [], UsageError("a report needs at least one run folder")
    for folder in find_run_folders(given):
        try:
            records.append(read_record(folder))
        except UsageError as error:  # one that has not ended does not stand in the way of the others
            failure = error
            notes.append(f"Left out: {error}")
    if not records:
        raise failure
    metrics = sorted({str(record.summary.get("metric", "accuracy")) for record in records})
    if len(metrics) > 1:
        raise UsageError(f"these runs go by different metrics ({', '.join(metrics)}); make a report for each")
    groups = group_runs(records)
    return Material(groups, gather_splits(groups, notes), gather_insides(groups, notes), notes)


def gather_insides(groups: list[Group], notes: list[str]) -> list[Inside]:
    """The pictures that each group's method and add-ons bring; what fails becomes a note."""
    out = []
    for group in groups:
        pictures: list[Picture] = []
        with note_failures(group.label, notes), ExitStack() as stack:
            if paths := find_insides(group.runs[0]):
                opened = _open_group(group, groups, stack, notes)
                for path in paths:
                    with note_failures(group.label, notes):
                        pictures += _make_pictures(path, opened, pictures)
        if pictures:
            out.append(Inside(group, pictures))
    return out


def find_insides(run: RunRecord) -> list[str]:
    """Where the pictures of a method and its add-ons are made, as module:function."""
    method = make_method(run.method, {}, Solver())
    return list(dict.fromkeys(layer.insides for layer in chain(method) if layer.insides))


def _open_group(group: Group, groups: list[Group], stack: ExitStack, notes: list[str]) -> Opened:
    """The first run of a group, open until the stack ends; that a checkpoint is torn becomes a note."""
    simulation = stack.enter_context(open_simulation(group.runs[0].folder, notes.append))
    return Opened(simulation, group.label, group.look, partial(_open_fedavg, group, groups, stack, notes))


def _open_fedavg(group: Group, groups: list[Group], stack: ExitStack, notes: list[str]) -> Opened | None:
    """FedAvg on the same split and seed, if it is among the groups."""
    for other in groups:
        if other is not group and find_twins(group.runs[0], "fedavg", other.runs[:1]):
            return _open_group(other, groups, stack, notes)
    return None


def _make_pictures(path: str, opened: Opened, known: list[Picture]) -> list[Picture]:
    """What one function brings; raises if it cannot be placed on a page beside the known ones."""
    pictures: list[Picture] = load(path, "insides")(opened)
    taken = [picture.name for picture in known]
    for picture in pictures:
        for name in (picture.name, picture.file or picture.name):
            if not re.fullmatch("[a-z][a-z0-9-]*", name):
                raise UsageError(f"{path}: a picture is named by small letters, digits and hyphens, got {name!r}")
        if picture.name in taken:
            raise UsageError(f"{path}: two pictures are named {picture.name!r}")
        taken.append(picture.name)
    return pictures


@contextmanager
def note_failures(label: str, notes: list[str], picture: Picture | None = None) -> Iterator[None]:
    """What fails in here becomes a note: pictures may be of the user's own code, and all else is to be shown."""
    try:
        yield
    except Exception as error:
        what = "" if picture is None else f"the picture {picture.name!r}: "
        said = str(error) if isinstance(error, PluresError) else f"{type(error).__name__}: {error}"
        notes.append(f"What is inside {label} is not shown: {what}{said}")
