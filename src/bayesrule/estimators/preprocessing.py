"""Preparing the data of a fit by scikit-learn's conventions: scales of columns, codes of classes, example weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight


def mean_and_scale(values: np.ndarray, weights: np.ndarray) -> tuple[Any, Any]:
    """The weighted mean and standard deviation of every column; the scale of a constant column is 1.

    >>> mean_and_scale(np.array([[1.0, 5.0], [3.0, 5.0], [9.0, 9.0]]), np.array([1.0, 1.0, 0.0]))
    (array([2., 5.]), array([1., 1.]))
    """
    shares = weights / weights.sum()
    mean = shares @ values
    scale = np.sqrt(shares @ (values - mean) ** 2)
    # By rounding, the computed deviation of a constant column may be slightly above 0.
    return mean, np.where(scale > 1e-12 * np.abs(mean), scale, 1.0)


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
    present = np.unique(y)
    if classes is None:
        classes = present
    else:
        classes = np.unique(np.asarray(classes))
        unknown = present[~np.isin(present, classes)]
        if len(unknown):
            raise ValueError(f"y has classes that are not in classes=: {unknown.tolist()[:5]}.")
    if len(classes) < 2:
        raise ValueError(f"A classifier needs at least two classes in y, and there is one class: {classes.tolist()}.")
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
        by_class = compute_class_weight(class_weight, classes=classes, y=classes[labels], sample_weight=weights)
        weights = weights * by_class[labels]
    if not weights.sum() > 0:
        raise ValueError("Every example has the weight 0, so that there is nothing to fit: give some a weight above 0.")
    return weights
