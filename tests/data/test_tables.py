"""Tables with any kind of cells: what is read, what is left out, and what is refused in words."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import plures
from plures.cli.main import call
from plures.data import schema as schemas
from plures.data.reading import Reading
from plures.data.schema import Cells
from plures.data.sources import load
from plures.data.tables import encode_rows, from_frame, plan_table, read_csv, table_dataset
from plures.errors import DataError, PluresError

PLAIN = "site,age,town,ill\na,10,Ulm,yes\na,20,Bonn,no\nb,30,,yes\nb,,Ulm,no\nb,50,Bonn,yes\n"


def written(tmp_path: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read(path: Path, train: list[int] | None = None, **reading):
    data = load(str(path), None, Reading(**reading))
    return data.encode(np.array(train) if train is not None else np.arange(len(data.y)))


def cells(*texts: str) -> Cells:
    known = list(dict.fromkeys(texts))
    return Cells(np.array([known.index(text) for text in texts], np.int32), known)


# What is read


def test_table_becomes_scaled_numbers_columns_of_words_and_columns_of_blanks(tmp_path):
    """Ages 10, 20, 30 and 50 have the mean 27.5 and the variance 218.75; towns Bonn, Ulm and a blank."""
    data = read(written(tmp_path, PLAIN), client="site", target="ill")
    age = (np.array([10, 20, 30, 27.5, 50]) - 27.5) / math.sqrt(218.75)
    assert np.allclose(data.x[:, 0], age, atol=1e-6)
    assert data.x[:, 1].tolist() == [0, 0, 0, 1, 0]  # where the age is blank
    assert data.x[:, 2:].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]]  # Bonn, Ulm, blank
    assert data.y.tolist() == [1, 0, 1, 0, 1] and data.class_names == ("no", "yes")
    assert data.client.tolist() == [0, 0, 1, 1, 1] and data.client_names == ("a", "b")


def test_scales_and_categories_come_from_training_rows_alone(tmp_path):
    data = read(written(tmp_path, PLAIN), train=[0, 1], client="site", target="ill")
    assert np.allclose(data.x[:2, 0], [-1, 1])  # mean 15, scale 5
    assert data.x[4, 0] == pytest.approx(7)
    assert data.x.shape == (5, 3)  # no training row has a blank
    assert data.x[2].tolist() == [3, 0, 0]  # its town is blank, which no training row is
    few = written(tmp_path, "site,town,n,ill\na,Ulm,1,y\na,Bonn,2,n\nb,Köln,3,y\n", "few.csv")
    data = read(few, train=[0, 1], client="site", target="ill")
    assert data.x[2, :2].tolist() == [0, 0] and any("'town'" in note and "1 cells" in note for note in data.notes)


def test_rows_without_a_target_are_left_out_and_counted(tmp_path):
    path = written(tmp_path, "site,a,y\na,1,2.5\na,2,\nb,3,NA\nb,4,7\nb,5,1\n")
    data = read(path, client="site", target="y")
    assert data.target.kind == "number" and len(data.y) == 3
    assert data.notes[0] == "2 of 5 rows are left out: 'y' is blank in them"
    assert np.allclose(data.y * data.target.scale + data.target.shift, [2.5, 7, 1])


def test_none_is_a_word_and_na_is_a_blank():
    assert not schemas.is_blank("None") and not schemas.is_blank("-")
    assert all(schemas.is_blank(text) for text in ("", "  ", "NA", "NaN", "null", "n/a"))


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (("1", "2.5", "", "-3e2"), "number"),
        (("2024-01-31", "2023-12-01 10:30", "NA"), "date"),
        (("1", "b", "2"), "words"),
        (("True", "False"), "words"),
        (("", ""), "words"),
    ],
)
def test_kind_of_a_column_is_found(texts, kind):
    assert schemas.find_kind(cells(*texts)) == (kind, None)


def test_dates_are_days_since_1970():
    assert schemas.as_days("1970-01-03") == 2 and schemas.as_days("1970-01-01T12:00") == 0.5
    assert schemas.as_days("1970-01-01 02:00+02:00") == 0
    assert schemas.as_days("1970-13-01") is None and schemas.as_days("31.01.1970") is None


@pytest.mark.parametrize(
    ("values", "task", "kind"),
    [
        ("yes no", None, "classes"),
        ("0 1", None, "classes"),
        ("1 2 3 4", None, "classes"),
        ("1.5 2 3", None, "number"),
        ("1 2 3", "number", "number"),
        ("0 4 2", "count", "count"),
        (" ".join(map(str, range(30))), None, "number"),
    ],
)
def test_task_follows_from_the_target(tmp_path, values, task, kind):
    rows = "".join(f"{'ab'[k % 2]},{k},{value}\n" for k, value in enumerate(values.split() * 2))
    path = written(tmp_path, "site,n,y\n" + rows)
    assert load(str(path), None, Reading(client="site", target="y", task=task)).target.kind == kind


def test_several_targets_are_labels(tmp_path):
    path = written(tmp_path, "site,n,cough,fever\na,1,1,0\na,2,yes,no\nb,3,FALSE,true\n")
    data = read(path, client="site", target="cough,fever")
    assert data.y.tolist() == [[1, 0], [1, 0], [0, 1]] and data.n_classes == 2 and data.target.kind == "labels"


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiter_is_found(tmp_path, delimiter):
    path = written(tmp_path, PLAIN.replace(",", delimiter))
    assert read(path, client="site", target="ill").x.shape == (5, 5)


def test_semicolons_may_come_with_decimal_commas(tmp_path):
    data = read(written(tmp_path, "site;a;y\nu;1,5;n\nu;2,5;y\nv;3,5;n\n"), client="site", target="y")
    assert np.allclose(data.x[:, 0], np.array([-1, 0, 1]) / math.sqrt(2 / 3))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_with_a_mark_are_read(tmp_path, encoding):
    data = read(written(tmp_path, PLAIN.replace("Ulm", "Köln").encode(encoding)), client="site", target="ill")
    assert "Köln" in data.schema


def test_clients_are_in_the_order_of_their_numbers(tmp_path):
    rows = "".join(f"site {k},{k},{k % 2}\n" for k in (10, 2, 1) for _ in range(2))
    data = load(str(written(tmp_path, "site,a,y\n" + rows)), None, Reading(client="site", target="y"))
    assert data.client_names == ("site 1", "site 2", "site 10")


def test_the_latest_rows_are_test_rows(tmp_path):
    rows = "".join(f"{'ab'[k % 2]},{k},2024-01-{28 - k:02d},{k % 3 == 0}\n" for k in range(16))
    path = written(tmp_path, "site,n,day,y\n" + rows)
    result = plures.run("local", data=path, client="site", target="y", time_column="day", rounds=1, out=tmp_path / "r")
    split = plures.runs.scene.partition.read_split(tmp_path / "r" / "split.json", 16, 2)
    assert result.summary["personal"]["scored"] == 2
    assert [rows.tolist() for rows in split.test] == [[0, 2], [1, 3]]  # the file begins with the latest


def test_parquet_and_frames_are_read_as_the_same_rows(tmp_path):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path = written(tmp_path, PLAIN)
    frame = pandas.read_csv(path)
    frame.to_parquet(tmp_path / "t.parquet")
    expected = read(path, client="site", target="ill")
    data = table_dataset("frame", from_frame("frame", frame), Reading(client="site", target="ill"))
    for found in (read(tmp_path / "t.parquet", client="site", target="ill"), data.encode(np.arange(5))):
        assert np.array_equal(found.x, expected.x) and np.array_equal(found.y, expected.y)
        assert found.schema == expected.schema


def test_folder_with_a_table_for_each_client(tmp_path):
    for name, rows in (("ulm", "1,Ost,1.5\n2,West,3\n"), ("bonn", "3,West,1\n4,,9.5\n")):
        written(tmp_path, "n,part,y\n" + rows, f"{name}.csv")
    data = read(tmp_path, target="y")
    assert data.client_names == ("bonn", "ulm") and data.client.tolist() == [0, 0, 1, 1]
    assert "(file)" not in data.schema.split("[[column]]", 1)[1]


def test_large_files_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(plures.data.tables, "CACHED_BYTES", 1)
    path = written(tmp_path, PLAIN)
    cache = tmp_path / "cache"
    first = plures.data.tables.read_table(path, cache)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(plures.data.tables, "read_csv", None)  # would fail
    again = plures.data.tables.read_table(path, cache)
    assert again.columns["town"].texts == first.columns["town"].texts
    assert np.array_equal(again.columns["town"].codes, first.columns["town"].codes)
    written(tmp_path, PLAIN.replace("Ulm", "Jena"))
    with pytest.raises(TypeError):  # another content is read again
        plures.data.tables.read_table(path, cache)


# Schemas


def test_schema_survives_being_written_and_read(tmp_path):
    data = read(written(tmp_path, PLAIN), client="site", target="ill")
    schema = schemas.from_toml("schema.toml", plures.files.parse_toml(data.schema))
    assert schemas.to_text(schema) == data.schema
    table = read_csv(tmp_path / "t.csv")
    x, unseen = encode_rows(schema.columns, table)
    assert np.array_equal(x, data.x) and unseen == []


def test_a_given_schema_is_followed_whatever_the_rows(tmp_path):
    path = written(tmp_path, PLAIN)
    schema = tmp_path / "schema.toml"
    schema.write_text(read(path, client="site", target="ill").schema.replace('"Ulm"', '"Jena"'))
    data = read(path, train=[0], client="site", target="ill", schema=str(schema))
    assert data.schema == schema.read_text()
    assert data.x[0, 2:].tolist() == [0, 0, 0]  # Ulm is not in the schema


def test_summaries_of_clients_join_to_that_of_all_rows():
    rng = np.random.default_rng(0)
    texts = [str(value) for value in rng.normal(5, 3, 40).round(3)] + [""] * 3
    words = list(rng.choice(["a", "b", "c"], 43))
    for kind, column in (("number", texts), ("words", words)):
        parts = [schemas.summarise("x", kind, cells(*column[k::3])) for k in range(3)]
        joined, whole = schemas.join(parts), schemas.summarise("x", kind, cells(*column))
        assert (joined.n, joined.n_blank, joined.counts) == (whole.n, whole.n_blank, whole.counts)
        assert joined.mean == pytest.approx(whole.mean) and joined.variance == pytest.approx(whole.variance)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("scale = ", "scale = -"), "scale above 0"),
        (('kind = "number"', 'kind = "wide"'), "'wide'"),
        (('"Bonn"', '"Ulm"'), "twice"),
        (("[target]", "[aim]"), "target"),
        (('classes = [\n    "no",\n    "yes",\n]', 'classes = ["no"]'), "1 classes"),
        (("mean = ", "mean = nan # "), "finite mean"),
    ],
)
def test_broken_schemas_are_refused_in_words(tmp_path, change, word):
    path = written(tmp_path, PLAIN)
    text = read(path, client="site", target="ill").schema
    assert change[0] in text
    (tmp_path / "s.toml").write_text(text.replace(*change, 1))
    with pytest.raises(DataError, match=word):
        read(path, client="site", target="ill", schema=str(tmp_path / "s.toml"))


def test_rare_words_are_other(tmp_path):
    rows = "".join(f"a,w{k if k < 150 else 0},{k % 2}\n" for k in range(160))
    data = read(written(tmp_path, "site,word,y\n" + rows), client="site", target="y")
    assert data.x.shape == (160, schemas.MOST_CATEGORIES + 1)
    assert (data.x.sum(1) == 1).all() and data.x[:, -1].sum() == 50


# What is refused

MANY = "".join(f"a,{k},{'yes' if k % 2 else 'no'}\n" for k in range(20))


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (PLAIN, ["--target", "il"], ["no column 'il'", "did you mean 'ill'"]),
        (PLAIN, ["--target", "ill", "--client-column", "sites"], ["no column 'sites'", "'site'"]),
        (PLAIN, ["--target", "ill", "--drop", "town,agee"], ["no column 'agee'"]),
        (PLAIN, ["--client-column", "site"], ["--target NAME", "age, town"]),
        (PLAIN, ["--client-column", "ill", "--target", "ill"], ["both the client"]),
        ("site,n,ill\na,1,yes\nb,2,yes\n", ["--target", "ill"], ["'ill' is 'yes' in all rows"]),
        ("site,n,ill\na,1,\nb,2,\n", ["--target", "ill"], ["'ill' is blank in all rows"]),
        ("n,ill\n" + MANY.replace("a,", "") + "x,yes\n", ["--target", "ill"], ["row 22", "column 'n'", "'x'"]),
        ("n,ill\n1,yes\ninf,no\n2,yes\n", ["--target", "ill"], ["row 3", "column 'n'", "'inf'"]),
        ("n,ill\n1,yes\n1e300,no\n2,yes\n", ["--target", "ill"], ["row 3", "column 'n'"]),
        ("n,ill\n1,yes\n2\n", ["--target", "ill"], ["row 3", "1 cells", "2 columns"]),
        ("n,ill,n\n1,yes,3\n", ["--target", "ill"], ["two columns are called 'n'"]),
        ("n,,ill\n1,2,yes\n", ["--target", "ill"], ["column 2", "no name"]),
        ("n,ill\n", ["--target", "ill"], ["no row"]),
        ("", ["--target", "ill"], ["empty"]),
        ("n,ill\n1,Köln\n".encode() + b"2,K\xf6ln\n", ["--target", "ill"], ["row 3", "0xf6", "UTF-8"]),
        ("site,n,y\na,1,-1\na,2,3\nb,3,2\n", ["--target", "y", "--task", "count"], ["row 2", "'-1'", "not a count"]),
        ("site,n,y\na,1,u\na,2,v\nb,3,w\n", ["--target", "y", "--task", "binary"], ["3 values", "two"]),
        ("site,n,y\na,1,u\na,2,v\nb,3,w\n", ["--target", "y", "--task", "number"], ["row 2", "'u'", "not a number"]),
        ("site,a,b\nx,1,2\ny,2,1\n", ["--target", "a,b"], ["column 'a'", "yes or no"]),
        ("site,day,y\na,soon,1\nb,later,0\n", ["--target", "y", "--time-column", "day"], ["'soon'", "2024-05-31"]),
        ("site,day,y\na,2024-01-01,1\nb,,0\n", ["--target", "y", "--time-column", "day"], ["row 3", "not be blank"]),
        ("y\n1\n0\n", ["--target", "y"], ["no column is left"]),
        ("a,y\n3,1\n3,0\n3,1\n3,0\n", ["--target", "y", "--clients", "2", "--partition", "iid"], ["one value"]),
        ("site,n,y\na,1,1\na,2,0\n", ["--target", "y", "--client-column", "site", "--window", "5"], ["--window"]),
    ],
)
def test_bad_tables_are_refused_with_file_row_and_column(tmp_path, capsys, text, options, said):
    path = written(tmp_path, text)
    code = call(["run", "fedavg", "--data", str(path), *options, "--rounds", "1", "--out", str(tmp_path / "run")])
    err = capsys.readouterr().err
    assert code == 3, err
    assert err.count("\n") == 1 and "Traceback" not in err
    for word in said:
        assert word in " ".join(err.split()), err
    assert not (tmp_path / "run").exists()


def test_values_that_are_not_in_the_schema_are_refused_or_other(tmp_path):
    path = written(tmp_path, PLAIN)
    schema = tmp_path / "schema.toml"
    schema.write_text(read(path, client="site", target="ill").schema)
    other = written(tmp_path, PLAIN.replace("yes", "maybe"), "other.csv")
    with pytest.raises(DataError, match=r"other\.csv, row 2, column 'ill': 'maybe' is not one of the classes"):
        read(other, schema=str(schema))
    other = written(tmp_path, PLAIN.replace("10", "ten"), "other.csv")
    with pytest.raises(DataError, match=r"other\.csv, row 2, column 'age': 'ten' is not a number"):
        read(other, schema=str(schema))
    other = written(tmp_path, PLAIN.replace("town", "city"), "other.csv")
    with pytest.raises(DataError, match="no column 'town'"):
        read(other, schema=str(schema))


def test_an_id_is_told(tmp_path):
    rows = "".join(f"a,p{k},{1000 + k},{k % 3},{k % 2}\n" for k in range(30))
    data = load(str(written(tmp_path, "site,patient,case,n,y\n" + rows)), None, Reading(client="site", target="y"))
    assert [note.split("'")[1] for note in data.notes] == ["patient", "case"]
    assert "--drop patient" in data.notes[0]


def test_a_client_with_one_class_or_one_row_is_served_all_the_same(tmp_path):
    rows = "".join(f"{'abc'[min(k // 10, 2)]},{k % 7},{'yes' if k % 2 and k < 10 else 'no'}\n" for k in range(21))
    path = written(tmp_path, "site,n,ill\n" + rows)
    result = plures.run("ditto", data=path, client="site", target="ill", rounds=2)
    assert [row["n_test"] for row in result.clients] == [2, 2, 0]
    assert result.summary["personal"]["scored"] == 2


NAMES = st.text(st.characters(exclude_characters='"\n\r', exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)
CELLS = st.one_of(
    st.integers(-(10**12), 10**12).map(str),
    st.floats(allow_nan=True, allow_infinity=True).map(repr),
    st.sampled_from(["", "NA", "yes", "no", "2024-05-31", "2024-02-30", "None", "x,y", 'a "b"', "1e400", "=1+1", "٣"]),
    st.text(max_size=6),
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_table_is_read_or_refused_in_words(tmp_path_factory, data):
    """Columns of any kind, with any names and any blanks: no traceback."""
    names = data.draw(st.lists(NAMES, min_size=1, max_size=4))
    rows = data.draw(st.lists(st.lists(CELLS, min_size=len(names), max_size=len(names)), max_size=12))
    target, client = data.draw(st.sampled_from(names)), data.draw(st.sampled_from([None, *names]))
    folder = tmp_path_factory.mktemp("any")
    path = folder / "t.csv"
    with open(path, "w", newline="", encoding="utf-8", errors="replace") as file:
        writer = plures.data.tables.csv.writer(file)
        writer.writerows([names, *rows])
    reading = Reading(client=client, target=target, task=data.draw(st.sampled_from([None, "number", "classes"])))
    try:
        found = load(str(path), None, reading)
        found = found.encode(np.arange(max(1, len(found.y) // 2)))
    except PluresError as error:
        assert str(error)
        return
    plures.data.dataset.check(found)
    assert len(found.x) == len(found.y) and np.isfinite(found.x).all()


def test_plan_names_what_is_left_out():
    table = from_frame("f", _Frame({"site": ["a", "", "b"], "n": [1, 2, 3], "y": ["u", "v", "w"]}))
    plan = plan_table(table, Reading(client="site", target="y"))
    assert plan.notes == ("1 of 3 rows are left out: 'site' is blank in them",) and plan.table.n_rows == 2


class _Frame:
    """As much of a data frame as is needed."""

    def __init__(self, columns):
        self.data, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return np.array(self.data[name], dtype=object)

    def __len__(self):
        return len(next(iter(self.data.values())))
