"""Images and texts in folders, and windows of time series."""

import csv

import numpy as np
import pytest

import plures
from plures.cli.main import call
from plures.data.reading import Reading
from plures.data.sources import load
from plures.errors import DataError

image_of = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def draw(path, value, size=(8, 6), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    image_of.new(mode, size, value if mode == "L" else (value, 0, 255)).save(path)


@pytest.fixture
def images(tmp_path):
    for client in ("ulm", "bonn"):
        for label, value in (("cat", 0), ("dog", 255)):
            for k in range(4):
                draw(tmp_path / "im" / client / label / f"{k}.png", value)
    return tmp_path / "im"


def test_images_in_folders_have_clients_and_classes(images):
    data = load(str(images))
    assert data.x.shape == (16, 1, 6, 8) and data.client_names == ("bonn", "ulm") and data.class_names == ("cat", "dog")
    assert (data.x[data.y == 1] == 1).all() and (data.x[data.y == 0] == -1).all()
    result = plures.run("fedavg", data=images, rounds=3, lr=0.2)
    assert result.summary["personal"]["mean"] == 1


def test_one_image_in_colour_makes_all_of_them_so(images):
    draw(images / "ulm" / "dog" / "9.jpg", 10, mode="RGB")
    assert load(str(images)).x.shape == (17, 3, 6, 8)


def test_images_of_different_sizes_need_one(images, tmp_path, capsys):
    draw(images / "ulm" / "dog" / "9.png", 10, size=(20, 20))
    assert call(["run", "fedavg", "--data", str(images), "--rounds", "1", "--out", str(tmp_path / "r")]) == 3
    assert "9.png has 20 x 20 pixels" in capsys.readouterr().err
    assert load(str(images), None, Reading(image_size=5)).x.shape == (17, 1, 5, 5)


@pytest.mark.parametrize("content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n"])
def test_broken_images_are_refused_by_name(images, content):
    (images / "ulm" / "cat" / "bad.png").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.png is empty, or is no image"):
        load(str(images))


def test_a_manifest_says_whose_and_what_each_file_is(images):
    files = sorted(images.glob("*/*/*.png"))
    with open(images / "manifest.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["file", "client", "label"])
        out.writerows([path.relative_to(images), f"c{k % 4}", path.parent.name] for k, path in enumerate(files))
    data = load(str(images))
    assert data.client_names == ("c0", "c1", "c2", "c3") and len(data.y) == 16
    with open(images / "manifest.csv", "a") as file:
        file.write("../../secret.png,c0,cat\n")
    with pytest.raises(DataError, match=r"row 18: .* is not in the folder"):
        load(str(images))


def test_one_class_is_nothing_to_predict(tmp_path):
    draw(tmp_path / "a" / "cat" / "0.png", 3)
    with pytest.raises(DataError, match="all files are of the class 'cat'"):
        load(str(tmp_path))


def test_texts_in_folders_and_in_a_column_are_words_of_the_training_rows(tmp_path):
    rows = [
        ("ulm", "good", "a fine day"),
        ("ulm", "bad", "rain again"),
        ("bonn", "good", "sun, sun"),
        ("bonn", "bad", "x"),
    ]
    for k, (client, label, words) in enumerate(rows):
        path = tmp_path / "texts" / client / label / f"{k}.txt"
        path.parent.mkdir(parents=True)
        path.write_text(words)
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([["who", "what", "said"], *rows])
    folder = load(str(tmp_path / "texts"))
    table = load(str(tmp_path / "t.csv"), None, Reading(client="who", target="what", text="said"))
    assert folder.class_names == table.class_names == ("bad", "good")
    encoded = table.encode(np.array([0]))
    assert encoded.n_tokens == 2 + 3 and encoded.x.shape == (4, 3)  # padding, unknown; a, fine, day
    assert (encoded.x[1:, 0] == 1).all()  # words that no training row has
    many = [(f"c{k % 3}", ("up", "down")[k % 2], ("high rise", "low fall")[k % 2]) for k in range(24)]
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([["who", "what", "said"], *many])
    options = {"client": "who", "target": "what", "text_column": "said", "rounds": 30, "lr": 0.5}
    result = plures.run("fedavg", data=tmp_path / "t.csv", **options)
    assert result.summary["model"] == "fasttext" and result.summary["personal"]["mean"] == 1


# Series


def series(path, n=40, clients=("a", "b")):
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["site", "hour", "load", "kind"])
        for k in range(n):
            for site in clients:
                out.writerow([site, k, round(np.sin(k / 2) + (site == "b"), 4), "u" if k % 2 else "v"])
    return path


def test_windows_hold_the_rows_before_the_one_that_is_told(tmp_path):
    reading = Reading(client="site", target="load", time="hour", window=3)
    data = load(str(series(tmp_path / "s.csv", n=6)), None, reading)
    assert len(data.y) == 6 and "6 of 12 rows only tell others" in data.notes[-1]
    data = data.encode(np.arange(6))
    assert data.x.shape == (6, 4, 3)  # hour, two kinds and the load itself, of three rows
    values = data.y * data.target.scale + data.target.shift
    expected = [np.sin(k / 2) + site for site in (0, 1) for k in (3, 4, 5)]
    assert np.allclose(values, expected, atol=1e-4)
    of_load = [k for k in range(4) if len(np.unique(data.x[:3, k])) > 3]
    hours = data.x[0, 0]  # rising: the oldest comes first
    assert (np.diff(hours) > 0).all() and of_load


def test_a_series_is_forecast(tmp_path):
    path = series(tmp_path / "s.csv", n=80)
    options = {"client": "site", "target": "load", "time_column": "hour", "drop": "kind", "window": 8, "rounds": 40}
    result = plures.run("ditto", data=path, model="resnet1d:8,1", lr=0.02, metric="r2", **options)
    assert result.summary["metrics"]["r2"]["personal"]["pooled"] > 0.5
    split = result.models.scene.split
    for train, test in zip(split.train, split.test, strict=True):
        assert max(train) < min(test)  # rows are in the order of time


def test_windows_longer_than_any_series_are_refused(tmp_path):
    with pytest.raises(DataError, match="no client has more than 50 rows"):
        load(str(series(tmp_path / "s.csv", n=6)), None, Reading(client="site", target="load", window=50))
