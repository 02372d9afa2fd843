import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plures.data import text

# --- words ---


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ("Oil, up again.", ["oil", ",", "up", "again", "."]),
        ("It's (not) so!?", ["it", "'", "s", "(", "not", ")", "so", "!", "?"]),
        ('He said: "yes; no"', ["he", "said", "yes", "no"]),
        ("stepped-up $50 AT&T", ["stepped-up", "$50", "at&t"]),
        ("growing\\anger", ["growing", "anger"]),
        (" \t\n", []),
        ("", []),
    ],
)
def test_words_are_lower_case_with_punctuation_apart(given_text, expected):
    assert text.words(given_text) == expected


def test_frequent_words_have_small_tokens_and_equally_frequent_ones_follow_the_alphabet():
    assert text.word_tokens([["b", "c", "a"], ["c", "d"], ["d"]]) == {"c": 2, "d": 3, "a": 4, "b": 5}


def test_padded_cuts_long_texts_and_fills_short_ones():
    rows = text.pad([["a", "b", "a"], ["x"], []], {"a": 2, "b": 3}, 2)
    assert rows.tolist() == [[2, 3], [1, 0], [0, 0]] and rows.dtype == np.int64


# --- characters ---


def test_alphabet_has_all_characters_in_their_order():
    assert text.alphabet(["ba", "cab\n", ""]) == "\nabc"


def test_windows_are_labelled_with_the_character_that_follows():
    characters = "ab"
    x, y = text.windows("a" * 79 + "b" + "a" * 81, characters)
    assert x.shape == y.shape == (2, 80) and x.dtype == y.dtype == np.int64
    assert x[0].tolist() == [1] * 79 + [2] and y[0].tolist() == [1] * 78 + [2, 1]
    assert x[1].tolist() == y[1].tolist() == [1] * 80


@pytest.mark.parametrize(("length", "n_rows"), [(0, 0), (1, 0), (80, 0), (81, 1), (160, 1), (161, 2)])
def test_window_needs_the_character_after_it(length, n_rows):
    x, y = text.windows("a" * length, "a")
    assert x.shape == y.shape == (n_rows, 80)


@pytest.mark.parametrize("other", ["\0", "!", "b", "\U0001f600"])
def test_character_that_is_not_in_the_vocabulary_is_token_zero(other):
    x, _ = text.windows(("a" + other + "c") * 30, "ac")
    assert x[0, :3].tolist() == [1, text.OTHER, 2]


@given(st.text(min_size=81, max_size=200))
def test_windows_can_be_read_back(content):
    characters = text.alphabet([content])
    x, y = text.windows(content, characters)
    assert "".join(characters[token - 1] for token in x.ravel()) == content[: x.size]
    assert "".join(characters[token - 1] for token in y.ravel()) == content[1 : x.size + 1]
