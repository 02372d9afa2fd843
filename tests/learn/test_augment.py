"""Augmented images: what may happen to a pixel, and that it happens from the seed, in training alone."""

import pytest
import torch

import plures
from plures.errors import UsageError
from plures.learn.augment import MARGIN, augment, parse


def images(n=200):
    return torch.arange(1, 1 + n * 2 * 8 * 8, dtype=torch.float32).reshape(n, 2, 8, 8)


def test_flips_about_half_of_the_images_and_changes_nothing_else():
    x, key = images(), torch.tensor(3)
    new = augment(("flip",), x, key)
    flipped = [torch.equal(a, b.flip(2)) for a, b in zip(new, x, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(new, x, strict=True)]
    assert all(f != s for f, s in zip(flipped, same, strict=True)) and 70 < sum(flipped) < 130


def test_crops_are_windows_of_the_padded_image():
    x = images(60)
    new = augment(("crop",), x, torch.tensor(3))
    padded = torch.nn.functional.pad(x, [MARGIN] * 4)
    shifts = set()
    for image, wide in zip(new, padded, strict=True):
        places = [(i, j) for i in range(9) for j in range(9) if torch.equal(image, wide[:, i : i + 8, j : j + 8])]
        assert len(places) == 1
        shifts.add(places[0])
    assert len(shifts) > 30


def test_another_key_gives_other_images_and_the_same_key_the_same():
    x = images(20)
    a, b, c = (augment(("crop", "flip"), x, torch.tensor(key)) for key in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_words_for_it():
    assert parse("none") == () and parse("flip,crop") == ("crop", "flip")
    with pytest.raises(UsageError, match="crop"):
        parse("crops")


@pytest.mark.parametrize("method", ["fedavg", "fedala:cap=3", "fedrep"])
def test_executors_agree_on_augmented_images(method):
    options = {"clients": 3, "rounds": 2, "augment": "crop,flip", "share": 0.2, "eval_every": 0, "precision": "float64"}
    stacked, alone = (plures.run(method, executor=how, **options) for how in ("vectorised", "one_by_one"))
    for i in stacked.models:
        for name, x in stacked.models[i].items():
            torch.testing.assert_close(x, alone.models[i][name], atol=1e-10, rtol=0)


def test_training_sees_augmented_images_and_tests_do_not():
    def first_loss(**options):
        return plures.run("fedavg", clients=3, rounds=1, share=0.2, **options)

    plain, changed = first_loss(), first_loss(augment="flip")
    assert plain.rounds[0]["loss"] != changed.rounds[0]["loss"]
    plain, changed = first_loss(lr=0.0), first_loss(lr=0.0, augment="flip")
    assert plain.summary["personal"]["mean"] == changed.summary["personal"]["mean"]


def test_words_and_tables_are_refused():
    with pytest.raises(UsageError, match="augment is for images"):
        plures.run("fedavg", data=(torch.rand(40, 5).numpy(), [0, 1] * 20), clients=2, augment="crop", rounds=1)


def test_augmented_steps_are_traced():
    found = plures.run("fedavg", clients=3, rounds=1, share=0.2, augment="crop,flip")
    assert found.summary["engine"]["eager"] == 0 and found.summary["engine"]["traced"] > 0
