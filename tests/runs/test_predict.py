"""Personal models in use: as modules, for predictions, and as files that other programs run."""

import io

import numpy as np
import pytest
import torch

import plures
from plures.cli.main import call
from plures.errors import DataError, UsageError
from plures.runs.predict import as_file, as_inputs, outputs
from plures.runs.scene import make_scene

pandas = pytest.importorskip("pandas", reason="pandas is not installed")


@pytest.fixture(scope="module")
def frame():
    rng = np.random.default_rng(0)
    a = rng.normal(size=60).round(2)
    kind = rng.choice(["u", "v", None], 60)
    return pandas.DataFrame(
        {"site": [f"s{k % 3}" for k in range(60)], "a": a, "kind": kind, "level": (2 * a + 5).round(2), "ill": a > 0}
    )


def run(frame, target, **options):
    drop = "ill" if target == "level" else "level"
    return plures.run("ditto", data=frame, client="site", target=target, drop=drop, rounds=5, **options)


def test_predictions_are_classes_by_name_and_numbers_in_their_units(frame):
    named, numbers = run(frame, "ill"), run(frame, "level", model="linear", lr=1.5)
    found = named.predict("s1", frame)
    assert set(found) <= {"True", "False"} and (found == frame["ill"].astype(str)).mean() > 0.8
    assert np.abs(numbers.predict(0, frame) - frame["level"]).mean() < 1


def test_model_of_a_client_is_a_plain_module(frame):
    result = run(frame, "level")
    module, scene = result.model("s2"), result.models.scene
    assert type(module).__module__ == "plures.models.small" and not module.training
    x = as_inputs(scene, frame)
    expected = outputs(scene, result.models[2], frame)
    assert np.allclose(module(x).detach().numpy(), expected, atol=1e-6)


def test_rows_without_a_column_of_the_model_are_refused(frame):
    result = run(frame, "level")
    with pytest.raises(DataError, match="no column 'kind'"):
        result.predict(0, frame[["site", "a"]])
    with pytest.raises(DataError, match="shape"):
        result.predict(0, np.zeros((2, 9)))
    with pytest.raises(UsageError, match="did you mean 's1'"):
        result.predict("s11", frame)


@pytest.mark.filterwarnings("ignore:.*torch.jit.load.*deprecated")
@pytest.mark.parametrize("model", ["linear", "mlp:16,8", "tabular:16,1"])
@pytest.mark.parametrize("target", ["ill", "level"])
def test_exports_predict_as_we_do(frame, target, model):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    result = run(frame, target, model=model)
    scene, own = result.models.scene, result.models[1]
    x = as_inputs(scene, frame)[:7]
    expected = outputs(scene, own, x)
    if target == "level":
        expected = expected * scene.population.target.scale + scene.population.target.shift
    script = torch.jit.load(io.BytesIO(as_file(scene, own, "torchscript")))
    assert np.abs(script(x).numpy() - expected).max() < 1e-5
    session = onnxruntime.InferenceSession(as_file(scene, own, "onnx"), providers=["CPUExecutionProvider"])
    assert np.abs(session.run(None, {"x": x.numpy()})[0] - expected).max() < 1e-5 * max(1, np.abs(expected).max())


def test_images_are_exported_too():
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    result = plures.run("fedper", clients=3, rounds=1, share=0.2)
    scene = result.models.scene
    x = scene.population.x[:5]
    session = onnxruntime.InferenceSession(as_file(scene, result.models[0], "onnx"), providers=["CPUExecutionProvider"])
    assert np.abs(session.run(None, {"x": x.numpy()})[0] - outputs(scene, result.models[0], x)).max() < 1e-5


def test_export_command_writes_every_format_with_the_schema_beside(frame, tmp_path, capsys):
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = ["--client-column", "site", "--target", "ill", "--drop", "level", "--rounds", "2"]
    assert call(["run", "ditto", "--data", str(tmp_path / "t.csv"), *options, "--out", str(tmp_path / "run")]) == 0
    for name, more in (("m.safetensors", []), ("m.pt", []), ("m.onnx", []), ("m.bin", ["--format", "onnx"])):
        out = tmp_path / name
        assert call(["export", str(tmp_path / "run"), "--client", "s1", "-o", str(out), *more]) == 0
        assert out.stat().st_size > 100
        assert out.with_suffix(".schema.toml").read_text() == (tmp_path / "run" / "schema.toml").read_text()
    capsys.readouterr()
    assert call(["export", str(tmp_path / "run"), "--client", "s1", "-o", str(tmp_path / "m.bin")]) == 2
    assert ".onnx" in capsys.readouterr().err
    assert call(["export", str(tmp_path / "run"), "--client", "s9", "-o", str(tmp_path / "m.pt")]) == 2
    assert "s9" in capsys.readouterr().err


def test_a_new_site_adapts_by_the_schema_of_the_run(frame, tmp_path, capsys):
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame[frame["site"] == "s1"].drop(columns="site").to_csv(tmp_path / "new.csv", index=False)
    options = ["--client-column", "site", "--target", "level", "--drop", "ill", "--rounds", "2"]
    assert call(["run", "ditto", "--data", str(tmp_path / "t.csv"), *options, "--out", str(tmp_path / "run")]) == 0
    out = str(tmp_path / "m.safetensors")
    code = call(["adapt", str(tmp_path / "run"), "--client-data", str(tmp_path / "new.csv"), "-o", out])
    assert code == 0, capsys.readouterr().err
    assert "root mean squared error" in capsys.readouterr().out


def test_schema_command_writes_what_the_run_will_read(frame, tmp_path, capsys):
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = ["--client-column", "site", "--target", "ill", "--drop", "level"]
    schema = tmp_path / "schema.toml"
    assert call(["data", "schema", str(tmp_path / "t.csv"), *options, "-o", str(schema)]) == 0
    config = {"data": str(tmp_path / "t.csv"), "client_column": "site", "target": "ill", "drop": "level"}
    scene = make_scene(plures.runs.config.make_config(config))
    assert schema.read_text() == scene.schema
    again = make_scene(plures.runs.config.make_config(config | {"data_schema": str(schema)}))
    assert torch.equal(again.population.x, scene.population.x)
    capsys.readouterr()


def test_a_comparison_with_another_schema_is_refused(frame, tmp_path):
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = {"data": tmp_path / "t.csv", "client": "site", "target": "ill", "drop": "level", "rounds": 1}
    plures.compare(["local", "fedavg"], out=tmp_path / "c", **options)
    text = (tmp_path / "c" / "local" / "schema.toml").read_text()
    (tmp_path / "other.toml").write_text(text.replace("mean = ", "mean = 1", 1))
    with pytest.raises(UsageError, match="another schema"):
        plures.compare(["local", "fedavg"], out=tmp_path / "c", data_schema=tmp_path / "other.toml", **options)


def test_data_of_each_client_may_be_given(frame):
    rng = np.random.default_rng(1)
    parts = {name: (rng.normal(size=(12, 4)).astype("float32"), rng.integers(0, 2, 12)) for name in ("ulm", "bonn")}
    result = plures.run("local", data=parts, rounds=1)
    assert [row["name"] for row in result.clients] == ["ulm", "bonn"]

    class Rows(torch.utils.data.Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.y)

        def __getitem__(self, k):
            return self.x[k], self.y[k]

    again = plures.run("local", data=[Rows(*part) for part in parts.values()], rounds=1)
    assert again.summary["digest"] == result.summary["digest"]


class HuggingFaceLike:
    """As much of a Hugging Face `Dataset` as is looked at."""

    def __init__(self, frame):
        self.frame, self.column_names = frame, list(frame.columns)

    def to_pandas(self):
        return self.frame


def test_a_data_set_with_columns_is_read_as_a_frame(frame):
    one, other = run(frame, "ill"), run(HuggingFaceLike(frame), "ill")
    assert one.summary["digest"] == other.summary["digest"]


def test_a_run_on_a_frame_is_resumed_when_it_is_given_again(frame, tmp_path):
    whole = run(frame, "ill", out=tmp_path / "whole")

    class Stop(plures.Callback):
        def played(self, state, row):
            if row.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(plures.errors.Interrupted):
        run(frame, "ill", out=tmp_path / "run", callback=Stop())
    again = plures.resume(tmp_path / "run", data=frame)
    assert again.summary["digest"] == whole.summary["digest"]
