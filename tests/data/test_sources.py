import gzip
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plures.data import readers, sources
from plures.data.dataset import Dataset, check
from plures.data.sources import DATA, load
from plures.errors import DataError, UsageError

# --- digits ---


def test_digits_has_1797_images_of_8x8_pixels():
    data = load("digits")
    assert data.x.shape == (1797, 1, 8, 8) and data.x.dtype == np.float32


def test_digits_has_the_published_number_of_each_digit():
    data = load("digits")
    assert np.bincount(data.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data.n_classes == 10 and data.y.dtype == np.int64


def test_digits_scales_0_to_16_onto_minus_one_to_one():
    # The top row of the first image is 0 0 5 13 9 1 0 0.
    assert load("digits").x[0, 0, 0].tolist() == [-1, -1, -0.375, 0.625, 0.125, -0.875, -1, -1]


def test_digits_has_no_test_part_and_no_clients():
    data = load("digits")
    assert data.n_train == 1797 and data.client is None


def test_digits_needs_no_data_folder(tmp_path):
    assert len(load("digits", tmp_path / "nowhere").y) == 1797


# --- idx files ---


def idx(array) -> bytes:
    array = np.asarray(array, np.uint8)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


PIXELS = np.array([[[0, 51], [255, 102]], [[0, 0], [0, 0]], [[255, 255], [255, 255]]])  # 3 images of 2x2


def idx_files(**changed: bytes) -> dict[str, bytes]:
    """Three train images and one test image, by the names of the files without their endings."""
    files = {
        "train-images-idx3": idx(PIXELS),
        "train-labels-idx1": idx([7, 0, 9]),
        "t10k-images-idx3": idx(PIXELS[:1]),
        "t10k-labels-idx1": idx([3]),
    }
    return files | {name.replace("_", "-"): content for name, content in changed.items()}


def write_idx(folder: Path, files: dict[str, bytes], zipped: bool = True) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        if zipped:
            (folder / f"{name}-ubyte.gz").write_bytes(gzip.compress(content))
        else:
            (folder / f"{name}-ubyte").write_bytes(content)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_set_has_the_train_part_first(tmp_path, name):
    write_idx(tmp_path / name, idx_files())
    data = load(name, tmp_path)
    assert data.y.tolist() == [7, 0, 9, 3] and data.n_train == 3 and data.name == name


def test_idx_set_scales_pixels_onto_minus_one_to_one(tmp_path):
    write_idx(tmp_path / "mnist", idx_files())
    data = load("mnist", tmp_path)
    assert data.x.shape == (4, 1, 2, 2) and data.x.dtype == np.float32
    np.testing.assert_allclose(data.x[0, 0], [[-1, -0.6], [1, -0.2]], atol=1e-6)


def test_idx_set_is_read_unzipped_too(tmp_path):
    write_idx(tmp_path / "mnist", idx_files(), zipped=False)
    assert load("mnist", tmp_path).y.tolist() == [7, 0, 9, 3]


def test_idx_set_has_ten_classes_even_if_few_occur(tmp_path):
    write_idx(tmp_path / "mnist", idx_files(train_labels_idx1=idx([0, 0, 0])))
    assert load("mnist", tmp_path).n_classes == 10


def test_missing_file_error_names_the_folder_and_what_to_put_there(tmp_path):
    with pytest.raises(DataError) as caught:
        load("mnist", tmp_path)
    message = str(caught.value)
    assert str(tmp_path / "mnist") in message and "t10k-labels-idx1-ubyte.gz" in message and "PLURES_DATA" in message


def test_missing_file_error_names_the_one_file_that_is_missing(tmp_path):
    write_idx(tmp_path / "mnist", idx_files())
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=r"mnist needs t10k-labels-idx1-ubyte\.gz or t10k-labels-idx1-ubyte,"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    "content", [b"no gzip at all", gzip.compress(idx(PIXELS))[:-9], b""], ids=["other", "cut short", "empty"]
)
def test_corrupt_gzip_error_names_the_file(tmp_path, content):
    write_idx(tmp_path / "mnist", idx_files())
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    "content", [idx([1, 2, 3]), b"\0\0\x0d\x03" + idx(PIXELS)[4:], b"\0\0"], ids=["axes", "type", "short"]
)
def test_wrong_magic_number_error_names_the_file_and_both_numbers(tmp_path, content):
    write_idx(tmp_path / "mnist", idx_files(train_images_idx3=content))
    with pytest.raises(DataError, match=rf"train-images-idx3.* begins with {content[:4].hex()} instead of 00000803"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "length"), [(idx(PIXELS)[:-1], 27), (idx(PIXELS) + b"\0", 29)], ids=["short", "long"]
)
def test_wrong_length_error_names_the_file_and_both_lengths(tmp_path, content, length):
    # 16 bytes of header and 3 images of 4 pixels are 28 bytes.
    write_idx(tmp_path / "mnist", idx_files(train_images_idx3=content))
    with pytest.raises(DataError, match=rf"train-images-idx3.* has {length} bytes .* asks for 28"):
        load("mnist", tmp_path)


def test_idx_file_cut_short_in_its_header_is_named(tmp_path):
    write_idx(tmp_path / "mnist", idx_files(train_images_idx3=idx(PIXELS)[:9]))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz has 9 bytes"):
        load("mnist", tmp_path)


def test_label_out_of_range_error_names_the_file_and_the_row(tmp_path):
    write_idx(tmp_path / "mnist", idx_files(train_labels_idx1=idx([7, 10, 9])))
    with pytest.raises(DataError, match=r"train-labels-idx1-ubyte\.gz: the label of row 1 is 10; .* 0 to 9"):
        load("mnist", tmp_path)


def test_idx_set_with_more_labels_than_images_is_refused(tmp_path):
    write_idx(tmp_path / "mnist", idx_files(t10k_labels_idx1=idx([3, 4])))
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz has 2 labels for 1 images"):
        load("mnist", tmp_path)


def test_idx_set_with_images_of_two_sizes_is_refused(tmp_path):
    write_idx(tmp_path / "mnist", idx_files(t10k_images_idx3=idx(np.zeros((1, 2, 5)))))
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz has images of \(2, 5\) pixels.*\(2, 2\)"):
        load("mnist", tmp_path)


def test_idx_set_without_rows_is_refused(tmp_path):
    none = {"train_images_idx3": idx(np.zeros((0, 2, 2))), "train_labels_idx1": idx([])}
    none |= {"t10k_images_idx3": idx(np.zeros((0, 2, 2))), "t10k_labels_idx1": idx([])}
    write_idx(tmp_path / "mnist", idx_files(**none))
    with pytest.raises(DataError, match=r"mnist: .* at least one row"):
        load("mnist", tmp_path)


# --- CIFAR files ---


def record(labels: list[int], red: int, green: int, blue: int) -> bytes:
    return bytes(labels) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


def write_cifar10(folder: Path) -> None:
    """One picture in each file; the label is the number of the batch, 9 in the test batch."""
    folder.mkdir()
    for i in range(1, 6):
        (folder / f"data_batch_{i}.bin").write_bytes(record([i], 255, 0, 51))
    (folder / "test_batch.bin").write_bytes(record([9], 0, 0, 0))


def write_cifar100(folder: Path) -> None:
    folder.mkdir()
    (folder / "train.bin").write_bytes(record([19, 99], 255, 0, 51) + record([4, 0], 0, 0, 0))
    (folder / "test.bin").write_bytes(record([3, 42], 0, 0, 0))


def test_cifar10_has_its_batches_in_order_and_the_test_batch_last(tmp_path):
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    data = load("cifar10", tmp_path)
    assert data.y.tolist() == [1, 2, 3, 4, 5, 9] and data.n_train == 5 and data.n_classes == 10


def test_cifar100_has_fine_labels(tmp_path):
    write_cifar100(tmp_path / "cifar-100-binary")
    data = load("cifar100", tmp_path)
    assert data.y.tolist() == [99, 0, 42] and data.n_train == 2 and data.n_classes == 100


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_pictures_are_channel_height_width(tmp_path, name):
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    write_cifar100(tmp_path / "cifar-100-binary")
    x = load(name, tmp_path).x
    assert x.shape[1:] == (3, 32, 32) and x.dtype == np.float32
    np.testing.assert_allclose(x[0].mean((1, 2)), [1, -1, -0.6], atol=1e-6)


@pytest.mark.parametrize("length", [0, 3072, 3074])
def test_cifar_file_of_wrong_length_is_named_with_its_length(tmp_path, length):
    write_cifar10(tmp_path / "cifar-10-batches-bin")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").write_bytes(bytes(length))
    with pytest.raises(DataError, match=rf"data_batch_3\.bin has {length} bytes.* 3073"):
        load("cifar10", tmp_path)


def test_cifar_label_out_of_range_error_names_the_file_and_the_row(tmp_path):
    write_cifar100(tmp_path / "cifar-100-binary")
    (tmp_path / "cifar-100-binary" / "test.bin").write_bytes(record([0, 5], 0, 0, 0) + record([0, 100], 0, 0, 0))
    with pytest.raises(DataError, match=r"test\.bin: the label of row 1 is 100; .* 0 to 99"):
        load("cifar100", tmp_path)


@pytest.mark.parametrize(("name", "file"), [("cifar10", "data_batch_1.bin"), ("cifar100", "train.bin")])
def test_missing_cifar_error_names_the_file_and_the_folder(tmp_path, name, file):
    with pytest.raises(DataError) as caught:
        load(name, tmp_path)
    assert file in str(caught.value) and str(tmp_path / str(DATA[name].place)) in str(caught.value)


# --- FEMNIST ---


def write_femnist(folder: Path, **changed) -> None:
    """Two images of writer 0, of which one is for testing, and one test image of writer 1."""
    arrays = {
        "x": np.array([[[0, 51]] * 2, [[255, 102]] * 2, [[0, 0]] * 2], np.uint8),
        "y": np.array([61, 0, 7], np.uint8),
        "client": np.array([0, 0, 1], np.uint8),
        "is_test": np.array([1, 0, 1], np.uint8),
    }
    arrays |= changed
    np.savez(folder / "femnist.npz", **{key: value for key, value in arrays.items() if value is not None})


def test_femnist_has_writers_as_clients_and_its_own_test_rows_last(tmp_path):
    write_femnist(tmp_path)
    data = load("femnist", tmp_path)
    assert data.name == "femnist" and data.n_train == 1 and data.n_classes == 62
    assert data.y.tolist() == [0, 61, 7] and data.client is not None and data.client.tolist() == [0, 0, 1]
    assert data.x.shape == (3, 1, 2, 2)
    np.testing.assert_allclose(data.x[0, 0, 0], [1, -0.2], atol=1e-6)


def test_femnist_may_say_writer_and_name_them(tmp_path):
    names = np.array(["f01", "f02"])
    write_femnist(tmp_path, client=None, writer=np.array([0, 0, 1]), writer_name=names)
    data = load("femnist", tmp_path)
    assert data.client is not None and data.client.tolist() == [0, 0, 1] and data.client_names == ("f01", "f02")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"client": None}, "holds no 'client'"),
        ({"y": np.array([0, 62, 1])}, "the label of row 0 is 62; labels must be from 0 to 61"),
        ({"writer_name": np.array(["one"])}, "the client of row 2 is 1; .*'writer_name' for each"),
        ({"x": None}, "holds no 'x'"),
    ],
)
def test_femnist_error_names_the_file_and_the_fault(tmp_path, changed, words):
    write_femnist(tmp_path, **changed)
    with pytest.raises(DataError, match=rf"femnist\.npz.*{words}"):
        load("femnist", tmp_path)


def test_missing_femnist_error_names_the_file_and_the_folder(tmp_path):
    with pytest.raises(DataError) as caught:
        load("femnist", tmp_path)
    assert "femnist needs femnist.npz" in str(caught.value) and str(tmp_path) in str(caught.value)


# --- AG News ---


def write_agnews(folder: Path, train: str, test: str) -> None:
    (folder / "ag_news_csv").mkdir()
    (folder / "ag_news_csv" / "train.csv").write_text(train, "utf-8")
    (folder / "ag_news_csv" / "test.csv").write_text(test, "utf-8")


TRAIN_NEWS = '"3","Oil up","Oil, again."\n"1","","He said ""oil"" is up"\n'


def test_agnews_tokens_are_words_of_the_train_part_by_frequency(tmp_path):
    # oil 3 times, up twice, then once each: , . again he is said. 0 and 1 are padding and unknown words.
    write_agnews(tmp_path, TRAIN_NEWS, '"4","","New oil"\n')
    data = load("agnews", tmp_path)
    assert data.x[0, :7].tolist() == [2, 3, 2, 4, 6, 5, 0]
    assert data.x[1, :6].tolist() == [7, 9, 2, 8, 3, 0]
    assert data.x[2, :3].tolist() == [1, 2, 0]
    assert data.x.shape == (3, 200) and data.x.dtype == np.int64 and data.n_tokens == 10


def test_agnews_has_four_classes_from_0_and_the_train_part_first(tmp_path):
    write_agnews(tmp_path, TRAIN_NEWS, '"4","","New oil"\n')
    data = load("agnews", tmp_path)
    assert data.y.tolist() == [2, 0, 3] and data.n_train == 2 and data.n_classes == 4


def test_agnews_cuts_long_news(tmp_path):
    write_agnews(tmp_path, '"1","","' + "a " * 150 + "b " * 80 + '"\n', '"1","","a"\n')
    x = load("agnews", tmp_path).x
    assert x[0].tolist() == [2] * 150 + [3] * 50


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('"5","a","b"', "3 cells that begin with '5'"),
        ('"0","a","b"', "3 cells that begin with '0'"),
        ('"1","a"', "2 cells"),
        ('"Class","a","b"', "begin with 'Class'"),
        ('"1","a","b","c"', "4 cells"),
    ],
)
def test_agnews_error_names_the_file_and_the_line(tmp_path, line, words):
    write_agnews(tmp_path, TRAIN_NEWS, f'"1","","a"\n{line}\n')
    with pytest.raises(DataError, match=rf"test\.csv, line 2: .*{words}.* a class from 1 to 4"):
        load("agnews", tmp_path)


def test_agnews_without_train_rows_is_refused(tmp_path):
    write_agnews(tmp_path, "", '"1","","a"\n')
    with pytest.raises(DataError, match="agnews: 0 of 1 rows are for training"):
        load("agnews", tmp_path)


def test_missing_agnews_error_names_the_file_and_the_folder(tmp_path):
    with pytest.raises(DataError) as caught:
        load("agnews", tmp_path)
    assert "needs train.csv" in str(caught.value) and str(tmp_path / "ag_news_csv") in str(caught.value)


# --- Shakespeare ---


def test_shakespeare_predicts_the_next_character_of_each_speaker(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "play--B.txt").write_text("ab" * 130)  # 260 characters: 3 rows
    (tmp_path / "shakespeare" / "play--A.txt").write_text("bc\n" * 109)  # 327: 4 rows
    data = load("shakespeare", tmp_path)
    assert data.x.shape == data.y.shape == (7, 80) and data.n_train == 7
    assert data.client_names == ("play--A", "play--B")
    assert data.client is not None and data.client.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert data.n_classes == data.n_tokens == 5  # line end, a, b, c, and what is none of them
    assert data.x[0, :4].tolist() == [3, 4, 1, 3] and data.y[0, :4].tolist() == [4, 1, 3, 4]
    assert data.x[4, :3].tolist() == [2, 3, 2] and data.y[4, -2:].tolist() == [3, 2]


def test_shakespeare_leaves_out_speakers_with_fewer_than_three_rows(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "long.txt").write_text("a" * 241)
    (tmp_path / "shakespeare" / "short.txt").write_text("z" * 240)  # the last row lacks the character after it
    data = load("shakespeare", tmp_path)
    assert readers.LEAST_WINDOWS == 3 and data.client_names == ("long",) and len(data.y) == 3


def test_missing_shakespeare_error_names_the_folder(tmp_path):
    with pytest.raises(DataError) as caught:
        load("shakespeare", tmp_path)
    assert "needs a .txt file" in str(caught.value) and str(tmp_path / "shakespeare") in str(caught.value)


# --- where named sets are searched ---


def test_data_dir_comes_before_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PLURES_DATA", str(tmp_path / "environment"))
    write_idx(tmp_path / "given" / "mnist", idx_files())
    assert load("mnist", tmp_path / "given").n_train == 3


def test_plures_data_comes_before_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PLURES_DATA", str(tmp_path / "environment"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_idx(tmp_path / "environment" / "mnist", idx_files())
    assert load("mnist").n_train == 3


def test_cache_folder_is_searched_without_plures_data(tmp_path, monkeypatch):
    monkeypatch.setenv("PLURES_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_idx(tmp_path / "cache" / "plures" / "mnist", idx_files())
    assert load("mnist").n_train == 3


def test_home_cache_folder_is_the_last_resort(tmp_path, monkeypatch):
    monkeypatch.delenv("PLURES_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.data_folder() == tmp_path / ".cache" / "plures"


# --- .npz files ---


def npz(tmp_path: Path, **arrays) -> str:
    path = tmp_path / "some.npz"
    np.savez(path, **arrays)
    return str(path)


X = np.array([[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]])
Y = np.array([2, 0, 2])


def test_npz_floats_become_float32_unscaled(tmp_path):
    data = load(npz(tmp_path, x=X, y=Y))
    assert data.x.dtype == np.float32 and data.x.tolist() == X.tolist()


def test_npz_has_one_class_more_than_its_largest_label(tmp_path):
    data = load(npz(tmp_path, x=X, y=Y.astype(np.uint8)))
    assert data.y.tolist() == [2, 0, 2] and data.y.dtype == np.int64 and data.n_classes == 3


def test_npz_without_is_test_and_client_is_all_train(tmp_path):
    data = load(npz(tmp_path, x=X, y=Y))
    assert data.n_train == 3 and data.client is None


def test_npz_bytes_of_height_and_width_become_scaled_images_with_a_channel(tmp_path):
    data = load(npz(tmp_path, x=PIXELS.astype(np.uint8), y=Y))
    assert data.x.shape == (3, 1, 2, 2) and data.x.dtype == np.float32
    np.testing.assert_allclose(data.x[0, 0], [[-1, -0.6], [1, -0.2]], atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 4), (3, 3, 2, 2)])
def test_npz_bytes_of_other_shapes_keep_their_shape(tmp_path, shape):
    data = load(npz(tmp_path, x=np.full(shape, 255, np.uint8), y=Y))
    assert data.x.shape == shape and (data.x == 1).all()


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.uint16])
def test_npz_integers_other_than_bytes_stay_tokens(tmp_path, kind):
    data = load(npz(tmp_path, x=np.array([[1, 2], [3, 4], [5, 6]], kind), y=Y))
    assert data.x.dtype == np.int64 and data.x.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert data.n_tokens == 7


def test_npz_floats_and_images_are_not_tokens(tmp_path):
    assert load(npz(tmp_path, x=X, y=Y)).n_tokens == 0
    assert load(npz(tmp_path, x=PIXELS.astype(np.uint8), y=Y)).n_tokens == 0


def test_npz_tokens_may_have_a_label_each(tmp_path):
    tokens = np.array([[1, 2], [3, 4], [5, 6]])
    data = load(npz(tmp_path, x=tokens, y=tokens + 1, is_test=np.array([1, 0, 0])))
    assert data.y.tolist() == [[4, 5], [6, 7], [2, 3]] and data.n_classes == 8 and data.n_train == 2


def test_npz_floats_of_height_and_width_get_no_channel(tmp_path):
    assert load(npz(tmp_path, x=PIXELS.astype(np.float64), y=Y)).x.shape == (3, 2, 2)


@pytest.mark.parametrize("kind", [np.bool_, np.uint8, np.int64])
def test_npz_test_rows_come_last_with_their_labels_and_clients(tmp_path, kind):
    is_test = np.array([1, 0, 1, 0], kind)
    path = npz(
        tmp_path,
        x=np.array([[0.0], [1], [2], [3]]),
        y=np.array([0, 1, 2, 3]),
        client=Y[[0, 1, 0, 1]] + 5,
        is_test=is_test,
    )
    data = load(path)
    assert data.x[:, 0].tolist() == [1, 3, 0, 2] and data.y.tolist() == [1, 3, 0, 2] and data.n_train == 2
    assert data.client is not None and data.client.tolist() == [5, 5, 7, 7] and data.client.dtype == np.int64


def test_npz_parts_keep_the_order_of_their_rows(tmp_path):
    x = np.arange(100.0)[:, None]
    data = load(npz(tmp_path, x=x, y=np.zeros(100, int), is_test=np.arange(100) % 2))
    assert data.x[:, 0].tolist() == [*range(0, 100, 2), *range(1, 100, 2)]


def test_npz_path_may_begin_with_the_home_folder(tmp_path, monkeypatch):
    npz(tmp_path, x=X, y=Y)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load("~/some.npz").y) == 3


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": Y}, "no 'x'"),
        ({"x": X}, "no 'y'"),
        ({"z": X}, "no 'x' and no 'y'"),
        ({"x": X, "y": Y[:2]}, r"'y' has shape \(2,\), but x has 3 rows"),
        ({"x": X, "y": Y, "client": np.arange(4)}, r"'client' has shape \(4,\), but x has 3 rows"),
        ({"x": X, "y": Y, "is_test": np.array([0, 1])}, r"'is_test' has shape \(2,\).* 3 rows"),
        ({"x": X, "y": Y, "is_test": np.array([0, 1, 2])}, "'is_test'.* needs 0 or 1"),
        ({"x": X, "y": Y, "is_test": np.array([0.0, 1, 0])}, "'is_test'.* type float64"),
        ({"x": X, "y": Y, "is_test": np.ones(3, int)}, "'is_test' is 1 for all 3 rows"),
        ({"x": X[:0], "y": Y[:0]}, r"x has shape \(0, 2\).* at least one row"),
        ({"x": X[:, :0], "y": Y}, r"x has shape \(3, 0\).* at least one row"),
        ({"x": X[:, 0], "y": Y}, r"'x' has shape \(3,\)"),
        ({"x": X, "y": Y[:, None]}, r"'y' has shape \(3, 1\)"),
        ({"x": X, "y": np.array(1)}, r"'y' has shape \(\)"),
        ({"x": X, "y": np.array([0, 1, -1])}, "the label of row 2 is -1; labels must be from 0"),
        ({"x": X, "y": np.array([0, 10**9, 1])}, "the label of row 1 is 1000000000"),
        ({"x": X, "y": np.array([0.0, 1, 2])}, "'y' has type float64; it must be integers"),
        ({"x": X, "y": np.array(["a", "b", "c"])}, "'y' has type <U1; it must be integers"),
        ({"x": X, "y": Y.astype(np.uint64)}, "'y' has type uint64"),
        ({"x": X, "y": Y, "client": np.array([0.5, 1, 2])}, "'client' has type float64; it must be integers"),
        ({"x": X.astype(complex), "y": Y}, "'x' has type complex128"),
        ({"x": X > 1, "y": Y}, "'x' has type bool"),
        ({"x": X.astype(np.uint64), "y": Y}, "'x' has type uint64"),
        ({"x": np.array([[0, 1], [2, -3], [0, 0]]), "y": Y}, "the token of row 1 is -3; tokens must be from 0"),
        ({"x": np.array([[0, 1], [2, 10**9], [0, 0]]), "y": Y}, "the token of row 1 is 1000000000"),
        (
            {"x": np.array([[0, 1]] * 3), "y": np.array([[0, 1, 2]] * 3)},
            r"'y' has shape \(3, 3\).* shape \(3, 2\) of x",
        ),
        ({"x": X.astype(object), "y": Y}, "'x' cannot be read.* Object arrays"),
        ({"x": X, "y": np.array([0, None, 1])}, "'y' cannot be read.* Object arrays"),
    ],
)
def test_npz_error_names_the_file_and_the_fault(tmp_path, arrays, words):
    with pytest.raises(DataError, match=rf"some\.npz.*{words}"):
        load(npz(tmp_path, **arrays))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_npz_error_counts_rows_that_are_not_finite_and_names_the_first(tmp_path, value):
    x = np.zeros((5, 2))
    x[1, 0] = x[3, 0] = x[3, 1] = value
    with pytest.raises(DataError, match=r"some\.npz: 2 of 5 rows of x .* the first is row 1\."):
        load(npz(tmp_path, x=x, y=np.zeros(5, int)))


def test_npz_error_names_rows_as_the_file_does_although_test_rows_move(tmp_path):
    x = np.array([[0], [0], [np.nan]])
    with pytest.raises(DataError, match="the first is row 2"):
        load(npz(tmp_path, x=x, y=Y, is_test=np.array([1, 1, 0])))


def test_npz_that_does_not_exist_is_a_data_error_with_its_path(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.npz does not exist"):
        load(str(tmp_path / "nothing.npz"))


@pytest.mark.parametrize("content", [b"", b"some text", b"PK\x03\x04 cut", b"\x80\x04K\x01."])
def test_npz_that_is_no_archive_is_named(tmp_path, content):
    (tmp_path / "some.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"some\.npz is not an \.npz file"):
        load(str(tmp_path / "some.npz"))


def test_npz_that_is_a_folder_is_named(tmp_path):
    (tmp_path / "some.npz").mkdir()
    with pytest.raises(DataError, match=r"some\.npz is not a file"):
        load(str(tmp_path / "some.npz"))


def test_npz_that_holds_a_single_array_is_refused(tmp_path):
    with (tmp_path / "some.npz").open("wb") as file:
        np.save(file, X)
    with pytest.raises(DataError, match=r"some\.npz holds a single array"):
        load(str(tmp_path / "some.npz"))


@pytest.mark.parametrize("content", [b"no array", b"\x93NUMPY\x01\x00\x04\x00{((\n"])
def test_npz_member_that_is_no_array_is_named(tmp_path, content):
    with zipfile.ZipFile(tmp_path / "some.npz", "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(DataError, match=r"some\.npz: 'x' "):
        load(str(tmp_path / "some.npz"))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_npz_cut_short_anywhere_is_a_data_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    content = Path(npz(folder, x=X, y=Y)).read_bytes()
    length = data.draw(st.integers(0, len(content) - 1))
    (folder / "cut.npz").write_bytes(content[:length])
    with pytest.raises(DataError, match=r"cut\.npz"):
        load(str(folder / "cut.npz"))


# --- folders with one file a client ---


def folder_of(tmp_path: Path, **files) -> str:
    """A folder with these files: text for .csv and .txt, arrays for .npz. `a_csv` is the file a.csv."""
    folder = tmp_path / "clients"
    folder.mkdir()
    for name, content in files.items():
        path = folder / ".".join(name.rsplit("_", 1))
        if isinstance(content, dict):
            np.savez(path, **content)
        else:
            path.write_text(content, "utf-8")
    return str(folder)


def owner(data: Dataset) -> list[int]:
    assert data.client is not None
    return data.client.tolist()


def test_folder_of_npz_files_has_a_client_for_each_in_the_order_of_their_names(tmp_path):
    path = folder_of(tmp_path, b_npz={"x": X, "y": Y}, a_npz={"x": X[:1] + 9, "y": Y[:1] + 3})
    data = load(path)
    assert data.client_names == ("a", "b") and owner(data) == [0, 1, 1, 1] and data.name == path
    assert data.y.tolist() == [5, 2, 0, 2] and data.n_classes == 6 and data.n_train == 4
    assert data.x[:, 0].tolist() == [9.5, 0.5, 2.5, 4.5]


def test_folder_of_npz_files_has_test_rows_last(tmp_path):
    first = {"x": X, "y": Y, "is_test": np.array([0, 1, 0])}
    second = {"x": X[:1], "y": Y[:1], "is_test": np.array([1])}
    data = load(folder_of(tmp_path, a_npz=first, b_npz=second))
    assert data.n_train == 2 and data.y.tolist() == [2, 2, 0, 2] and owner(data) == [0, 0, 0, 1]


def test_folder_of_npz_files_may_hold_tokens(tmp_path):
    tokens = {"x": np.array([[1, 4]]), "y": np.array([0])}
    assert load(folder_of(tmp_path, a_npz=tokens, b_npz={"x": tokens["x"] + 3, "y": tokens["y"]})).n_tokens == 8


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"x": X[:, :1], "y": Y}, r"b\.npz has rows of shape \(1,\) .* but a\.npz has \(2,\)"),
        ({"x": X.astype(int), "y": Y}, r"b\.npz has .* type int64 .* but a\.npz has .*float32"),
        ({"x": X, "y": Y, "is_test": np.zeros(3, int)}, "'is_test' is in only one of .*b.npz and a.npz"),
        ({"x": X}, r"b\.npz holds no 'y'"),
        ({"x": X * np.nan, "y": Y}, r"b\.npz: 3 of 3 rows of x hold NaN"),
        ({"x": X, "y": Y - 1}, r"b\.npz: the label of row 1 is -1"),
    ],
)
def test_folder_of_npz_files_error_names_the_file_and_the_fault(tmp_path, second, words):
    with pytest.raises(DataError, match=words):
        load(folder_of(tmp_path, a_npz={"x": X, "y": Y}, b_npz=second))


def test_folder_of_npz_files_error_names_the_file_with_a_wrong_is_test(tmp_path):
    good = {"x": X, "y": Y, "is_test": np.zeros(3, int)}
    with pytest.raises(DataError, match=r"b\.npz: 'is_test' has shape \(2,\)"):
        load(folder_of(tmp_path, a_npz=good, b_npz=good | {"is_test": np.zeros(2, int)}))


def test_folder_of_csv_files_without_header_has_the_label_in_the_last_column(tmp_path):
    data = load(folder_of(tmp_path, ann_csv="1.5,2,0\n-3,1e2,2\n", bob_csv="0,0,1\n\n"))
    assert data.x.tolist() == [[1.5, 2], [-3, 100], [0, 0]] and data.x.dtype == np.float32
    assert data.y.tolist() == [0, 2, 1] and data.y.dtype == np.int64 and data.n_classes == 3
    assert data.client_names == ("ann", "bob") and owner(data) == [0, 0, 1] and data.n_tokens == 0


@pytest.mark.parametrize("key", ["label", "y", " Label "])
def test_folder_of_csv_files_with_header_has_the_label_in_the_named_column(tmp_path, key):
    data = load(folder_of(tmp_path, ann_csv=f"height,{key},width\n1,0,2\n3,1,4\n"))
    assert data.x.tolist() == [[1, 2], [3, 4]] and data.y.tolist() == [0, 1]


def test_folder_of_csv_files_with_another_header_has_the_label_in_the_last_column(tmp_path):
    data = load(folder_of(tmp_path, ann_csv="\ufeffheight,kind\n1,0\n3,1\n"))  # as some programs mark UTF-8
    assert data.x.tolist() == [[1], [3]] and data.y.tolist() == [0, 1]


def test_folder_of_csv_files_with_numbers_for_columns_has_a_header_if_it_names_the_label(tmp_path):
    assert load(folder_of(tmp_path, ann_csv="0,1,label\n5,6,1\n")).x.tolist() == [[5, 6]]


def test_folder_of_csv_files_without_header_may_label_rows_y_and_n(tmp_path):
    data = load(folder_of(tmp_path, ann_csv="5,6,y\n7,8,n\n"))
    assert data.x.tolist() == [[5, 6], [7, 8]] and data.y.tolist() == [1, 0]


def test_folder_of_csv_files_numbers_words_in_their_order_over_all_files(tmp_path):
    data = load(folder_of(tmp_path, ann_csv="1,dog\n2,cat\n", bob_csv="3,bee\n4,dog\n"))
    assert data.y.tolist() == [2, 1, 0, 2] and data.n_classes == 3


def test_folder_of_csv_files_takes_whole_numbers_with_a_point(tmp_path):
    assert load(folder_of(tmp_path, ann_csv="1,1.0\n2,0.0\n")).y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("1,2,0\n1,0\n", "line 2: 2 cells, the first line has 3"),
        ("1,0\n", r"has 2 columns .* but a\.csv has 3"),
        ("p,q,label\n1,2,0\n", r"has 3 columns and the header p,q,label, but a\.csv has 3 and no header"),
        ("1,nan,0\n", "line 1: 'nan' is not a finite number"),
        ("1,2,0\n1,inf,0\n", "line 2: 'inf' is not a finite number"),
        ("1,2,0\n\n1,1e39,0\n", "line 3: '1e39' is not a finite number"),
        ("1,2,0\n1,,0\n", "line 2: '' is not a finite number"),
        ("1,2,0\n1,two,0\n", "line 2: 'two' is not a finite number"),
        ("1,2,-1\n", "line 1: the label is -1; labels must be whole numbers from 0"),
        ("1,2,0.5\n", "line 1: the label is 0.5"),
        ("1,2,1000000\n", "line 1: the label is 1000000; labels must be whole numbers from 0 to 999999"),
        ("1,2,nan\n", "line 1: the label is nan"),
        ("1,2,cat\n", r"line 1: the label is 'cat', the first label of a\.csv is '1'"),
        ("1,2,\n", "line 1: the label is ''"),
        ("", "has no rows"),
        ("p,q,label\n", "has no rows"),
        ("1;2;0\n3;4;1\n", "line 2: 1 cells.* with commas between"),
    ],
)
def test_folder_of_csv_files_error_names_the_file_and_the_line(tmp_path, content, words):
    with pytest.raises(DataError, match=rf"b\.csv.*{words}"):
        load(folder_of(tmp_path, a_csv="1,2,1\n", b_csv=content))


def test_folder_of_csv_files_error_names_the_file_that_is_not_utf8(tmp_path):
    path = folder_of(tmp_path, a_csv="1,2,1\n")
    (Path(path) / "b.csv").write_bytes(b"1,2,\xff\n")
    with pytest.raises(DataError, match=r"b\.csv cannot be read as CSV in UTF-8"):
        load(path)


def test_folder_of_txt_files_predicts_the_next_character(tmp_path):
    data = load(folder_of(tmp_path, ann_txt="hé" * 200, bob_txt="short"))
    assert data.x.shape == (4, 80) and data.client_names == ("ann",) and data.n_tokens == data.n_classes == 7
    assert (data.x[:, 1:] == data.y[:, :-1]).all()


def test_folder_of_short_txt_files_is_refused(tmp_path):
    with pytest.raises(DataError, match="clients: none of 2 files has the 241 characters"):
        load(folder_of(tmp_path, a_txt="a" * 240, b_txt=""))


def test_folder_of_txt_files_error_names_the_file_that_is_not_utf8(tmp_path):
    path = folder_of(tmp_path, a_txt="a" * 300)
    (Path(path) / "b.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"b\.txt cannot be read as text in UTF-8"):
        load(path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "holds no file"),
        ({"a_csv": "1,0\n", "b_txt": "b"}, r"holds a\.csv and b\.txt"),
        ({"a_csv": "1,0\n", "notes_md": "b"}, r"holds a\.csv and notes\.md"),
        ({"a_md": "b"}, r"holds a\.md"),
    ],
)
def test_folder_without_files_of_one_kind_is_refused(tmp_path, files, words):
    with pytest.raises(DataError, match=rf"clients {words}; .* one kind \(\.npz, \.csv, \.txt\)"):
        load(folder_of(tmp_path, **files))


def test_folder_may_hold_hidden_files(tmp_path):
    path = folder_of(tmp_path, a_csv="1,0\n")
    (Path(path) / ".DS_Store").write_text("b")
    assert load(path).client_names == ("a",)


# --- names ---


def test_unknown_name_error_names_the_nearest_one():
    with pytest.raises(UsageError, match=r"unknown data 'mnits'.*'mnist'.*cifar100"):
        load("mnits")


def test_existing_file_of_another_kind_is_a_data_error(tmp_path):
    (tmp_path / "some.xlsx").write_text("1,2\n")
    with pytest.raises(DataError, match=r"some\.xlsx is not an \.npz or \.csv file or a folder"):
        load(str(tmp_path / "some.xlsx"))


def test_every_named_set_has_a_description_of_one_line():
    images, texts = ["digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "femnist"], ["agnews", "shakespeare"]
    assert list(DATA) == images + texts
    assert all(source.description and "\n" not in source.description for source in DATA.values())


# --- check ---


GOOD = Dataset("made", np.zeros((3, 2), np.float32), np.array([0, 1, 1]), 2, 2, np.array([0, 0, 1]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": np.array([0, 1])}, r"'y' has shape \(2,\), but x has 3 rows"),
        ({"client": np.array([0])}, r"'client' has shape \(1,\), but x has 3 rows"),
        ({"y": np.array([0, 1, 2])}, "the label of row 2 is 2; labels must be from 0 to 1"),
        ({"y": np.array([0, -1, 1])}, "the label of row 1 is -1"),
        ({"n_train": 0}, "0 of 3 rows are for training"),
        ({"n_train": 4}, "4 of 3 rows are for training"),
        ({"x": np.full((3, 2), np.nan, np.float32)}, "3 of 3 rows of x hold NaN or infinity.* row 0"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "at least one row"),
        ({"y": np.array([[0, 1], [0, 2], [1, 1]])}, "the label of row 1 is 2; labels must be from 0 to 1"),
        ({"y": np.zeros((3, 1, 1), int)}, r"'y' has shape \(3, 1, 1\)"),
        ({"y": np.zeros((2, 2), int)}, r"'y' has shape \(2, 2\), but x has 3 rows"),
        ({"client": np.zeros((3, 1), int)}, r"'client' has shape \(3, 1\)"),
        (
            {"x": np.array([[0, 1], [1, 1], [2, 5]]), "n_tokens": 5},
            "the token of row 2 is 5; tokens must be from 0 to 4",
        ),
    ],
)
def test_check_names_the_set_and_the_fault(changes, words):
    check(GOOD)
    with pytest.raises(DataError, match=f"made: .*{words}"):
        check(GOOD._replace(**changes))


def test_check_takes_a_label_for_each_position():
    check(GOOD._replace(y=np.array([[0, 1], [0, 0], [1, 1]])))


# --- the published files ---


def real(name: str) -> Dataset:
    folder = os.environ.get("PLURES_DATA")
    if not folder or not (Path(folder) / str(DATA[name].place)).exists():
        pytest.skip(f"needs {DATA[name].place} in $PLURES_DATA")
    return load(name)


@pytest.mark.parametrize(
    ("name", "shape", "n_train", "train", "test"),
    [
        (
            "mnist",
            (70000, 1, 28, 28),
            60000,
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
            [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        ),
        ("fashion-mnist", (70000, 1, 28, 28), 60000, [6000] * 10, [1000] * 10),
        ("cifar10", (60000, 3, 32, 32), 50000, [5000] * 10, [1000] * 10),
        ("cifar100", (60000, 3, 32, 32), 50000, [500] * 100, [100] * 100),
    ],
)
def test_published_set_has_its_shape_and_class_counts(name, shape, n_train, train, test):
    data = real(name)
    assert data.x.shape == shape and data.n_train == n_train
    assert np.bincount(data.y[:n_train]).tolist() == train
    assert np.bincount(data.y[n_train:]).tolist() == test


def test_published_femnist_has_writers_with_rows_of_all_classes():
    data = real("femnist")
    assert data.x.shape[1:] == (1, 28, 28) and data.client is not None and 0 < data.n_train < len(data.y)
    assert len(np.unique(data.y)) == 62 and len(np.unique(data.client)) > 100
    assert np.median(data.x) == -1  # bright ink on black


def test_published_agnews_has_balanced_classes_and_a_large_vocabulary():
    # The whole train part has 120,000 rows; a smaller one may do.
    data = real("agnews")
    assert np.bincount(data.y[data.n_train :]).tolist() == [1900] * 4
    assert np.ptp(np.bincount(data.y[: data.n_train])) == 0 and data.n_tokens > 30_000
    x = data.x[: data.n_train]
    frequency = np.bincount(x.ravel(), minlength=data.n_tokens)[2:]
    assert frequency.min() >= 0 and (np.diff(frequency[:100]) <= 0).all() and not (x == 1).any()


def test_published_shakespeare_has_many_speakers_and_about_80_characters():
    data = real("shakespeare")
    assert data.x.shape == data.y.shape == (len(data.y), 80) and 70 < data.n_classes < 100
    assert data.client is not None and len(data.client_names) > 500
    assert np.bincount(data.client).min() >= readers.LEAST_WINDOWS
    assert (data.x[:, 1:] == data.y[:, :-1]).all()
