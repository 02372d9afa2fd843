"""Text as tokens: words for classification, characters for predicting the next one."""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

PADDING, UNKNOWN = 0, 1  # tokens of words: padding, and words that are not in the vocabulary
OTHER = 0  # token of characters that are not in the vocabulary
WINDOW = 80  # characters per row

# Punctuation marks are words of their own; quotes, colons and semicolons only separate words. So does the backslash,
# which stands for the end of a line in AG News.
_WORD = re.compile(r"[.,()!?']|[^\s.,()!?'\";:\\]+")


class Tokenizer(NamedTuple):
    """How a model that was trained before reads text: it has tokens of its own, whatever the training rows are."""

    encode: Callable[[list[str]], np.ndarray]  # [text, length]: the tokens of each text, cut and padded
    n_tokens: int


def words(text: str) -> list[str]:
    """The words of a text in lower case; punctuation marks are separate words."""
    return _WORD.findall(text.lower())


def word_tokens(texts: Iterable[list[str]]) -> dict[str, int]:
    """A token for each word: frequent words have smaller tokens, equally frequent words are in alphabetical order."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: UNKNOWN + 1 + place for place, word in enumerate(ordered)}


def pad(texts: list[list[str]], tokens: dict[str, int], length: int) -> np.ndarray:
    """[text, length]: the tokens of the first words of each text, then padding."""
    rows = np.full((len(texts), length), PADDING, np.int64)
    for row, text in zip(rows, texts, strict=True):
        known = [tokens.get(word, UNKNOWN) for word in text[:length]]
        row[: len(known)] = known
    return rows


def alphabet(texts: Iterable[str]) -> str:
    """All characters of the texts, in Unicode order. The token of a character is its position, counted from 1."""
    found: set[str] = set()
    for text in texts:
        found.update(text)
    return "".join(sorted(found))


def windows(text: str, characters: str) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays [row, WINDOW]: the tokens of the text, cut without overlap, and the token that follows each of them.

    The end of the text is not used if it is shorter than a window and the character after it.
    """
    known, codes = _code_points(characters), _code_points(text)
    tokens = np.where(np.isin(codes, known), np.searchsorted(known, codes) + 1, OTHER)
    n_rows = max(len(tokens) - 1, 0) // WINDOW
    n_used = n_rows * WINDOW
    return tokens[:n_used].reshape(n_rows, WINDOW), tokens[1 : n_used + 1].reshape(n_rows, WINDOW)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
