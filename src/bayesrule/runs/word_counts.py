"""Counts of words of a column of text, for topics."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from ..tables.tables import Column, InputError, Table

_WORD = re.compile(r"[^\W\d_]{2,}")  # Letters of any script, at least two.
_MOST_WORDS = 2_000
_WORDS_OF_TEXT = 3.0  # on average, with which a column is text rather than labels


def split_words(text: str) -> list[str]:
    """The words of a text, in small letters.

    >>> split_words("Größe: 3 kg, isn't it?")
    ['größe', 'kg', 'isn', 'it']
    """
    return _WORD.findall(text.lower())


def text_column(table: Table, leave_out: str | None) -> Column | None:
    """The column with the longest texts; None if none has three words in the mean."""
    lengths = {
        name: float(np.mean([len(split_words(level)) for level in column.levels]))
        for name, column in table.columns.items()
        if column.codes is not None and name != leave_out and column.levels
    }
    longest = max(lengths, key=lambda name: lengths[name], default=None)
    return table.columns[longest] if longest is not None and lengths[longest] >= _WORDS_OF_TEXT else None


def fit_vocabulary(texts: Column) -> list[str]:
    """The most frequent words that at least two texts have and at most half of them, in the order of the alphabet.

    Words that most texts have (the, and, …) tell no topics apart.
    """
    documents = [set(split_words(label)) for label in texts.labels()]
    frequency = Counter(word for words in documents for word in words)
    most = max(2, len(documents) // 2)
    kept = [(count, word) for word, count in frequency.items() if 2 <= count <= most]
    if len(kept) < 2:
        raise InputError(f"The texts of {texts.name!r} share too few words for topics: give longer or more texts.")
    return sorted(word for _, word in sorted(kept, reverse=True)[:_MOST_WORDS])


def count_words(texts: Column, vocabulary: list[str]) -> np.ndarray:
    """How often every text has each word of the vocabulary, (texts, words); a missing text has none."""
    place = {word: index for index, word in enumerate(vocabulary)}
    counts = np.zeros((len(texts), len(vocabulary)))
    for row, label in enumerate(texts.labels()):
        for word in split_words(label):
            if word in place:
                counts[row, place[word]] += 1
    return counts
