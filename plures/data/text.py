"""Text as tokens: words for classifying it, characters for predicting the next one."""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

PADDING, UNKNOWN = 0, 1  # the tokens before the words
OTHER = 0  # the token before the characters: any character that the vocabulary does not have
WINDOW = 80  # characters of a row

# Marks are words of their own; quotes, colons and semicolons only separate. So does the backslash, by
# which AG News writes the end of a line.
_WORD = re.compile(r"[.,()!?']|[^\s.,()!?'\";:\\]+")


def words(text: str) -> list[str]:
    """The words of a text in lower case, with punctuation apart."""
    return _WORD.findall(text.lower())


def word_tokens(texts: Iterable[list[str]]) -> dict[str, int]:
    """A token for each word, the more frequent the smaller, equally frequent ones in the order of the alphabet."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: UNKNOWN + 1 + place for place, word in enumerate(ordered)}


def padded(texts: list[list[str]], tokens: dict[str, int], length: int) -> np.ndarray:
    """[text, length] tokens: the first words of each text, then padding."""
    rows = np.full((len(texts), length), PADDING, np.int64)
    for row, text in zip(rows, texts, strict=True):
        known = [tokens.get(word, UNKNOWN) for word in text[:length]]
        row[: len(known)] = known
    return rows


def alphabet(texts: Iterable[str]) -> str:
    """All characters of the texts, in their order in Unicode. The token of each is its place, counted from 1."""
    found: set[str] = set()
    for text in texts:
        found.update(text)
    return "".join(sorted(found))


def windows(text: str, characters: str) -> tuple[np.ndarray, np.ndarray]:
    """[row, WINDOW] tokens of the text, cut without overlap, and of the character that follows each of them.

    What is left at the end of the text, less than a window and the character after it, is not used.
    """
    known, codes = _code_points(characters), _code_points(text)
    tokens = np.where(np.isin(codes, known), np.searchsorted(known, codes) + 1, OTHER)
    n_rows = max(len(tokens) - 1, 0) // WINDOW
    n_used = n_rows * WINDOW
    return tokens[:n_used].reshape(n_rows, WINDOW), tokens[1 : n_used + 1].reshape(n_rows, WINDOW)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
