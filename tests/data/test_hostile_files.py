"""Files that are no rows, or too many of them: told in a sentence, and soon."""

import json
import os
import zipfile

import numpy as np
import pytest

import plures
from plures.cli.main import call
from plures.data import readers
from plures.errors import DataError

SMALL = ["run", "fedavg", "--clients", "3", "--rounds", "1", "--share", "0.2"]


@pytest.mark.parametrize("suffix", ["npz", "csv"])
def test_a_pipe_is_not_waited_for(tmp_path, suffix, capsys):
    os.mkfifo(tmp_path / f"rows.{suffix}")
    assert call(["run", "fedavg", "--data", str(tmp_path / f"rows.{suffix}"), "--rounds", "1"]) == 3
    assert "is not a" in capsys.readouterr().err


def test_an_archive_that_would_fill_the_memory_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    """2 GB of zeros in 2 MB; the header of the archive tells."""
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w", force_zip64=True) as x:
        np.lib.format.write_array_header_1_0(x, {"descr": "<f4", "fortran_order": False, "shape": (2 << 20, 256)})
        for _ in range(256):
            x.write(bytes(8 << 20))
    assert path.stat().st_size < 4 << 20
    with pytest.raises(DataError, match=r"would take 2\.1 GB when it is unpacked"):
        readers.read_arrays(path, "bomb.npz", ("x",))


def test_a_small_archive_that_packs_well_is_read(tmp_path):
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((1000, 100), np.float32))
    assert readers.read_arrays(tmp_path / "zeros.npz", "zeros.npz", ("x",))["x"].shape == (1000, 100)


def test_a_batch_wider_than_all_rows_is_as_wide_as_they_are():
    options = {"clients": 3, "rounds": 2, "share": 0.2, "eval_every": 0, "epochs": 2}
    wide, whole = (plures.run("fedavg", batch=batch, **options).summary["personal"]["mean"] for batch in (10**9, 4096))
    assert wide == pytest.approx(whole)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--batch", "1e12"), ("--batch", "1000000000000"), ("--epochs", "1000000000"), ("--lr", "1e300")],
)
def test_numbers_beyond_reason_are_refused_by_name(option, value, capsys):
    assert call([*SMALL, option, value]) == 2
    assert option.removeprefix("--") in capsys.readouterr().err


def test_a_model_that_is_no_class_is_refused(capsys):
    assert call([*SMALL, "--model", "math:pi"]) == 2
    assert "no class or function that makes a model" in capsys.readouterr().err


def test_a_summary_is_json_even_where_a_number_is_not_known(tmp_path):
    plures.run("fedavg", clients=3, rounds=1, share=1e-6, out=tmp_path / "run")

    def refuse(word):
        raise AssertionError(word)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=refuse)
    assert summary["personal"] is None or summary["personal"]["reweighted"] is None
