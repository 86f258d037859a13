"""Rows and targets before a fit: standardised columns, classes as codes, weights of examples."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight


def standard(values: np.ndarray, counts: np.ndarray) -> tuple[Any, Any]:
    """The weighted mean and standard deviation of every column; a column that does not vary keeps its units.

    >>> standard(np.array([[1.0, 5.0], [3.0, 5.0], [9.0, 9.0]]), np.array([1.0, 1.0, 0.0]))
    (array([2., 5.]), array([1., 1.]))
    """
    shares = counts / counts.sum()
    mean = shares @ values
    scale = np.sqrt(shares @ (values - mean) ** 2)
    # Rounding leaves a constant column with a deviation that is no deviation.
    return mean, np.where(scale > 1e-12 * np.abs(mean), scale, 1.0)


def counted(counts: np.ndarray, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The rows that count for something, and what they count."""
    seen = counts > 0
    return (counts[seen], *(array[seen] for array in arrays))


def codes(y: Any, classes: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """The sorted classes, and each example's place among them; at least two classes, or a clear error.

    >>> [part.tolist() for part in codes(["yes", "no", "yes"])]
    [['no', 'yes'], [1, 0, 1]]
    """
    check_classification_targets(y)
    y = np.asarray(y)
    found = np.unique(y)
    if classes is None:
        classes = found
    else:
        classes = np.unique(np.asarray(classes))
        if not np.isin(found, classes).all():
            unknown = found[~np.isin(found, classes)]
            raise ValueError(f"y has classes that are not in classes=: {unknown.tolist()[:5]}.")
    if len(classes) < 2:
        raise ValueError(f"A classifier needs at least two classes in y, and there is one class: {classes.tolist()}.")
    return classes, np.searchsorted(classes, y)


def weights(
    X: np.ndarray, sample_weight: Any, class_weight: Any = None, classes: Any = None, labels: Any = None
) -> Any:
    """What each example counts: its own weight times its class's.

    `labels` are places among the `classes`; `class_weight` is None, "balanced" or a dict, as in scikit-learn.
    """
    counts = np.array(_check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True))
    if class_weight is not None:
        by_class = compute_class_weight(class_weight, classes=classes, y=classes[labels], sample_weight=counts)
        counts = counts * by_class[labels]
    if not counts.sum() > 0:
        raise ValueError("Every example has the weight 0: there is nothing to learn from.")
    return counts
