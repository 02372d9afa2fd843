"""Run folders of version 0.1.0, stopped after two of four rounds, are resumed and end as that version would have.

A digest depends on the kernels that torch chooses for a processor. Where the first two rounds give the bits that are
in the folder, the end must have the digest that 0.1.0 recorded; elsewhere its numbers must be the same.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import plures
from plures.runs import checkpoint
from plures.runs.folders import open_config
from plures.runs.scene import make_scene
from plures.runs.simulation import Simulation
from tests.small import played

FOLDERS = Path(__file__).parent / "folders-0.1.0"
ENDS = json.loads((FOLDERS / "ends.json").read_text())


def has_the_same_bits_here(folder):
    """Whether two rounds, run here, give what is in the checkpoint."""
    run = played(Simulation(make_scene(open_config(folder), folder / "split.json"), None, print), 2)
    found, _ = checkpoint.read(folder / "checkpoint")
    now = checkpoint.stored("server", run.state.server)
    return all(torch.equal(x, now[f"server/{name}"]) for name, x in found.server.items())


@pytest.mark.parametrize("name", ENDS)
def test_a_folder_of_0_1_0_is_resumed_to_its_end(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(FOLDERS / name, folder)
    result = plures.resume(folder)
    assert [row["round"] for row in result.rounds] == [1, 2, 3, 4]
    assert result.summary["personal"]["mean"] == pytest.approx(ENDS[name]["mean"], abs=0.02)
    assert result.rounds[-1]["loss"] == pytest.approx(ENDS[name]["loss"], rel=1e-4)
    if has_the_same_bits_here(FOLDERS / name):
        assert result.summary["digest"] == ENDS[name]["digest"]
