"""What Python users meet: public names, explicit keywords, objects as data and model, progress, and a quick start."""

import inspect
import io
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

import plures
from plures.errors import DataError, UsageError
from plures.runs.callbacks import ProgressLine
from plures.runs.config import Config

PUBLIC = """ADDONS METHODS NO_TERMS Addon AddonTerms Averaged Batch Callback Choice Dataset Each Federation Fitted
Method Opened Penalty Picture Plateau Result Same Shard Solver Task __version__ compare cross_entropy fine_tune fit
measure resume run setting tree tune with_penalties""".split()
QUICK = {"rounds": 2, "eval_every": 0}


def test_public_names_are_these_and_no_others():
    assert plures.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(plures, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plures.nothing  # noqa: B018
    assert set(PUBLIC) <= set(dir(plures))


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ("__version__",)])
def test_public_names_explain_themselves(name):
    found = getattr(plures, name)
    if inspect.isfunction(found) or inspect.isclass(found) or inspect.ismodule(found):
        assert inspect.getdoc(found)


def keywords(function):
    return {name: p for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


def test_keywords_of_run_are_the_options_of_a_config():
    own = keywords(plures.run)
    own["client_column"] = own.pop("client")  # as users of data frames say it
    assert set(own) == set(Config.model_fields) - {"method"} | {"out", "progress", "callback"}
    for name, field in Config.model_fields.items():
        if name not in ("method", "settings"):
            assert own[name].default == field.default, name


def test_keywords_of_compare_are_those_of_run():
    run, compare = keywords(plures.run), keywords(plures.compare)
    assert set(compare) == set(run) - {"seed", "callback"} | {"seeds", "equal"}
    shared = [name for name in compare if name in run]
    assert shared == [name for name in run if name in compare]
    for name in shared:
        assert compare[name].default == run[name].default and compare[name].annotation == run[name].annotation


@pytest.mark.parametrize("function", [plures.run, plures.compare, plures.resume, plures.tune])
def test_every_argument_is_explained(function):
    parameters = inspect.signature(function).parameters
    text = inspect.getdoc(function)
    for name, parameter in parameters.items():
        assert parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        assert parameter.annotation is not inspect.Parameter.empty
        assert f"\n    {name}: " in text, name


def test_a_wrong_keyword_is_an_error_of_python():
    with pytest.raises(TypeError, match="roundz"):
        plures.run("fedavg", roundz=3)


# Objects


def rows(n=60, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    return rng.normal(size=(n, 4)).astype(np.float32) + y[:, None], y


def test_arrays_are_data():
    x, y = rows()
    client = np.arange(60) % 5
    by_tuple = plures.run("fedavg", data=(x, y, client), **QUICK)
    by_dict = plures.run("fedavg", data={"x": x, "y": y, "client": client}, **QUICK)
    assert by_tuple.summary["clients"] == 5 and by_tuple.summary["partition"] == "natural"
    assert by_tuple.summary["digest"] == by_dict.summary["digest"]
    dealt = plures.run("fedavg", data=(x, y), clients=3, partition="iid", **QUICK)
    assert dealt.summary["clients"] == 3 and dealt.summary["data"] == "object:arrays"


def test_a_data_set_is_data():
    x, y = rows()
    data = plures.Dataset("mine", x, y.astype(np.int64), 3, len(y), None)
    found = plures.run("fedavg", data=data, clients=3, partition="iid", **QUICK)
    arrays = plures.run("fedavg", data=(x, y), clients=3, partition="iid", **QUICK)
    assert found.summary["data"] == "object:mine" and found.summary["digest"] == arrays.summary["digest"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((1,), "got 1 items"),
        ([1, 2], "torch Dataset, got int"),
        ({"x": np.zeros((3, 2))}, "no 'y'"),
        (3.5, "got float"),
    ],
)
def test_what_is_no_data_is_told_in_words(data, words):
    with pytest.raises((UsageError, DataError), match=words):
        plures.run("fedavg", data=data, **QUICK)


def small_net(n_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, n_classes))


def test_a_module_is_a_model_and_its_weights_are_the_start():
    torch.manual_seed(3)
    net = small_net(10)
    result = plures.run("fedavg", model=net, clients=3, rounds=0)
    for name, x in net.state_dict().items():
        assert torch.equal(result.models[0][name], x)
    assert result.summary["model"] == "object:Sequential"


def test_a_function_that_makes_a_module_is_a_model():
    one, other = (plures.run("fedavg", model=small_net, clients=3, **QUICK) for _ in range(2))
    assert one.summary["digest"] == other.summary["digest"] and one.summary["model"] == "object:small_net"


def test_a_run_of_objects_is_resumed_with_the_objects(tmp_path):
    x, y = rows()

    class Stop(plures.Callback):
        def played(self, state, row):
            if row.round == 1:
                raise KeyboardInterrupt

    options = {"data": (x, y), "model": nn.Linear(4, 3), "clients": 3, "partition": "iid", "rounds": 3}
    whole = plures.run("ditto", **options)
    with pytest.raises(plures.errors.Interrupted):
        plures.run("ditto", out=tmp_path / "run", callback=Stop(), **options)
    with pytest.raises(DataError, match="give it again"):
        plures.resume(tmp_path / "run")
    with pytest.raises(UsageError, match="given its model as an object"):
        plures.resume(tmp_path / "run", data=(x, y))
    again = plures.resume(tmp_path / "run", data=(x, y), model=options["model"])
    assert again.summary["digest"] == whole.summary["digest"]


def test_objects_are_compared_too(tmp_path):
    x, y = rows()
    options = {"data": (x, y), "model": nn.Linear(4, 3), "clients": 3, "partition": "iid", "rounds": 2}
    found = plures.compare(["local", "ditto"], out=tmp_path / "c", seeds=(0, 1), **options)
    assert set(found) == {(m, s) for m in ("local", "ditto") for s in (0, 1)}
    again = plures.compare(["local", "ditto"], out=tmp_path / "c", seeds=(0, 1), **options)
    assert again["ditto", 1].summary["digest"] == found["ditto", 1].summary["digest"]


# Progress


def test_progress_is_one_line_that_is_written_again():
    out = io.StringIO()
    plures.run("fedavg", rounds=3, clients=3, callback=ProgressLine("fedavg", out))
    text = out.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n")
    *_, last = text.rstrip("\n").split("\r")
    assert "round 3/3" in last and "personal" in last and "0 s left" in last and "█" * 24 in last


def test_progress_is_asked_for_by_a_keyword(capsys):
    plures.run("fedavg", rounds=1, clients=3)
    assert capsys.readouterr().err == ""
    plures.run("fedavg", rounds=1, clients=3, progress=True)
    assert "round 1/1" in capsys.readouterr().err


# A quick start

STARTS = [["--help"], ["run", "--help"], ["federate", "--help"], ["federate", "start", "--help"], ["data", "list"]]
STARTS += [["list", what] for what in ("methods", "data", "models", "partitions", "presets")]
STARTS += [["show", "fedala"], ["show", "ditto+ala"]]
SCRIPT = """
import sys
from plures.cli.main import call
code = call(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""


@pytest.mark.parametrize("words", STARTS, ids=" ".join)
def test_help_lists_and_descriptions_come_without_torch(words):
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 3


def test_import_of_the_package_is_light():
    code = "import sys, plures; assert 'torch' not in sys.modules and 'numpy' not in sys.modules; plures.__version__"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_comes_at_once():
    """In less than half of the time that torch takes to be imported, however fast the machine is."""

    def seconds(*command):
        began = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True, timeout=60)
        return time.perf_counter() - began

    pairs = [(seconds("-c", "import torch"), seconds("-c", SCRIPT, "--help")) for _ in range(4)]
    torch, help = map(min, zip(*pairs, strict=True))
    assert help < 0.5 * torch
