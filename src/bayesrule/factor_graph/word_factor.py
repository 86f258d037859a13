"""The factor of a document's words, which says where a word is none of the topics' vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from . import expected_log
from .data import values_of
from .factor import Factor


class WordFactor(Factor):
    """`factors.words`. A word whose number is negative, or not below the topics' number of words, is an error.

    An index outside of an array is not an error in JAX: it is moved to the array's end, and its derivative is dropped.
    Under `jit`, where nothing can be raised, such a document's value is NaN (see `expected_log.words`).
    """

    def __init__(self, observed: str, words: str, *, documents: str, topics: str):
        Factor.__init__(self, expected_log.words, documents, topics, data=(words, observed), label="words")

    def check(self, name: str, blocks: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(dict(arrays))):
            return
        words, counts = (values_of(arrays[other]) for other in self.data)
        vocabulary = np.shape(jax.tree.leaves(blocks[self.blocks[1]])[0])[-1]
        unknown = ((words < 0) | (words >= vocabulary)) & (counts != 0)
        if np.any(unknown):
            numbers = np.unique(words[unknown])
            shown = ", ".join(str(number) for number in numbers[:5]) + (", …" if len(numbers) > 5 else "")
            raise ValueError(
                f"Factor {name!r}: {np.sum(counts[unknown]):g} of {np.sum(counts):g} occurrences are of words with the "
                f"numbers {shown}, and the topics are over the words 0, …, {vocabulary - 1}. Build the model with the "
                "vocabulary of the data, latent_dirichlet(counts.shape[1], topics), or leave the other words out, "
                f"counts[:, :{vocabulary}]."
            )
