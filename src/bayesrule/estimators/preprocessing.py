"""Preparing the data of a fit by scikit-learn's conventions: scales of columns, codes of classes, example weights.

What depends on all rows is a summary that parts of the rows have too, and two summaries merge: `Moments`, `Labels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight


class Moments(NamedTuple):
    """The number of rows, their weight, and the weighted mean and sum of squares around it of every column.

    Attributes:
        rows: how many rows.
        size: the sum of their weights, a number, or one for each column where values are missing.
        mean: the means, less the origin.
        squares: the weighted sums of squares around the means.
        origin: one of the rows, from which columns far from 0 differ without rounding.
    """

    rows: int
    size: Any
    mean: Any
    squares: Any
    origin: Any

    @property
    def center(self) -> Any:
        """The means."""
        return self.origin + self.mean

    @property
    def scale(self) -> Any:
        """The standard deviations; 1 for a constant column."""
        scale = np.sqrt(self.squares / self.size)
        # By rounding, the computed deviation of a constant column may be slightly above 0.
        return np.where(scale > 1e-12 * np.abs(self.center), scale, 1.0)


def moments_of(values: np.ndarray, weights: np.ndarray) -> Moments:
    """The moments of weighted rows."""
    size = float(weights.sum())
    origin = values[np.argmax(weights > 0)]
    if size == 0:
        return Moments(len(values), 0.0, np.zeros_like(origin), np.zeros_like(origin), origin)
    values = values - origin
    mean = (weights / size) @ values
    return Moments(len(values), size, mean, weights @ (values - mean) ** 2, origin)


def observed_moments(values: np.ndarray) -> Moments:
    """The moments of every column's own values, of which some may be missing (NaN).

    >>> moments = observed_moments(np.array([[1.0, np.nan], [3.0, 7.0]]))
    >>> moments.size.tolist(), moments.center.tolist(), moments.squares.tolist()
    ([2.0, 1.0], [2.0, 7.0], [2.0, 0.0])
    """
    observed = ~np.isnan(values)
    size = observed.sum(axis=0).astype(float)
    origin = np.where(size > 0, values[np.argmax(observed, axis=0), np.arange(values.shape[1])], 0.0)
    values = np.where(observed, values - origin, 0.0)
    mean = values.sum(axis=0) / np.maximum(size, 1.0)
    squares = np.sum((values - mean) ** 2, axis=0, where=observed)
    return Moments(len(values), size, mean, squares, origin)


def merge_moments(one: Moments, other: Moments) -> Moments:
    """The moments of the rows of both: the difference of their means counts, and no large sums are subtracted.

    >>> rows = np.array([[1.0, 5.0], [3.0, 5.0], [8.0, 5.0]]) + 1e8
    >>> merged = merge_moments(moments_of(rows[:1], np.ones(1)), moments_of(rows[1:], np.ones(2)))
    >>> merged.squares.tolist(), float(merged.scale[1]), (merged.center - 1e8).tolist()
    ([26.0, 0.0], 1.0, [4.0, 5.0])
    """
    size = one.size + other.size
    share = np.where(size > 0, other.size / np.where(size > 0, size, 1.0), 0.0)
    difference = (other.origin - one.origin) + (other.mean - one.mean)
    squares = one.squares + other.squares + one.size * share * difference**2
    return Moments(one.rows + other.rows, size, one.mean + share * difference, squares, one.origin)


def mean_and_scale(values: np.ndarray, weights: np.ndarray) -> tuple[Any, Any]:
    """The weighted mean and standard deviation of every column; the scale of a constant column is 1.

    >>> mean_and_scale(np.array([[1.0, 5.0], [3.0, 5.0], [9.0, 9.0]]), np.array([1.0, 1.0, 0.0]))
    (array([2., 5.]), array([1., 1.]))
    """
    moments = moments_of(values, weights)
    return moments.center, moments.scale


class Labels(NamedTuple):
    """The classes of rows, sorted, the sum of each one's weights, and the number of rows."""

    classes: np.ndarray
    totals: Float[np.ndarray, " K"]
    rows: int


def labels_of(y: Any, weights: np.ndarray) -> Labels:
    """The classes of labels, and their weights."""
    check_classification_targets(y)
    classes, index = np.unique(np.asarray(y), return_inverse=True)
    return Labels(classes, np.bincount(index, weights, minlength=len(classes)), len(index))


def merge_labels(one: Labels, other: Labels) -> Labels:
    """The classes of both.

    >>> merge_labels(labels_of(["b", "a", "b"], np.ones(3)), labels_of(["c", "b"], np.array([0.5, 2.0])))
    Labels(classes=array(['a', 'b', 'c'], dtype='<U1'), totals=array([1. , 4. , 0.5]), rows=5)
    """
    classes, index = np.unique(np.concatenate([one.classes, other.classes]), return_inverse=True)
    totals = np.bincount(index, np.concatenate([one.totals, other.totals]), minlength=len(classes))
    return Labels(classes, totals, one.rows + other.rows)


def check_classes(present: np.ndarray, classes: Any = None) -> np.ndarray:
    """The sorted classes of a classifier: those of y, or all that were named, at least two.

    Args:
        present: the sorted classes of y.
        classes: all classes, if y may lack some.
    """
    if classes is None:
        classes = present
    else:
        classes = np.unique(np.asarray(classes))
        unknown = present[~np.isin(present, classes)]
        if len(unknown):
            raise ValueError(f"y has classes that are not in classes=: {unknown.tolist()[:5]}.")
    if len(classes) < 2:
        raise ValueError(f"A classifier needs at least two classes in y, and there is one class: {classes.tolist()}.")
    return classes


def drop_unweighted(weights: np.ndarray, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The weights and arrays without the rows whose weight is 0."""
    weighted = weights > 0
    return (weights[weighted], *(array[weighted] for array in arrays))


def encode_classes(y: Any, classes: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The sorted classes, and the index of each label among them.

    Args:
        y: the labels, of at least two classes.
        classes: all classes, if y may lack some.

    >>> [part.tolist() for part in encode_classes(["yes", "no", "yes"])]
    [['no', 'yes'], [1, 0, 1]]
    """
    check_classification_targets(y)
    y = np.asarray(y)
    classes = check_classes(np.unique(y), classes)
    return classes, np.searchsorted(classes, y)


def example_weights(
    X: np.ndarray, sample_weight: Any, class_weight: Any = None, classes: Any = None, labels: Any = None
) -> Any:
    """The weight of each example: its `sample_weight` times the weight of its class.

    Args:
        X: the rows.
        sample_weight: a weight for each row, or None for 1.
        class_weight: None, "balanced" or a dict, as in scikit-learn.
        classes: the classes.
        labels: the index of each row's class among them.
    """
    weights = np.array(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))
    if class_weight is not None:
        totals = np.bincount(labels, weights, minlength=len(classes))
        weights = weights * class_weights(class_weight, classes, totals)[labels]
    check_total_weight(weights.sum())
    return weights


def class_weights(class_weight: Any, classes: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """The weight of each class as scikit-learn has it, from the weights of all of its rows.

    Args:
        class_weight: "balanced" or a dict.
        classes: the classes.
        totals: the sum of the weights of each one's rows.
    """
    with np.errstate(divide="ignore"):  # of a class without weight, whose rows count for nothing in any case
        weights = compute_class_weight(class_weight, classes=classes, y=classes, sample_weight=totals)
    return np.where(np.isfinite(weights), weights, 0.0)


def check_total_weight(total: Any) -> None:
    """Raise unless some example counts."""
    if not total > 0:
        raise ValueError("Every example has the weight 0, so that there is nothing to fit: give some a weight above 0.")
