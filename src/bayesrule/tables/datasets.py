"""Data by name: small data sets that come with scikit-learn, and two series from textbooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources

import numpy as np

from .tables import Column, InputError, Table


@dataclass(frozen=True)
class Dataset:
    """A table by name, with the column to predict (and, for a series, the column of times)."""

    name: str
    description: str
    target: str
    load: Callable[[], Table]
    time: str | None = None


def _sklearn(name: str, target: str, *, labelled: bool = False) -> Callable[[], Table]:
    def load() -> Table:
        from sklearn import datasets

        bunch = getattr(datasets, f"load_{name}")()
        columns = {
            str(feature): Column(str(feature), numbers=np.asarray(bunch.data[:, index], float))
            for index, feature in enumerate(bunch.feature_names)
        }
        if labelled:
            columns[target] = Column.of_text(target, [str(bunch.target_names[label]) for label in bunch.target])
        else:
            columns[target] = Column(target, numbers=np.asarray(bunch.target, float))
        return Table(columns, name)

    return load


def _series(name: str, *columns: str) -> Callable[[], Table]:
    def load() -> Table:
        text = resources.files("bayesrule.tables").joinpath(f"{name}.csv").read_text(encoding="utf-8")
        values = np.loadtxt(text.splitlines(), delimiter=",", skiprows=1, comments="#")
        return Table({label: Column(label, numbers=values[:, index]) for index, label in enumerate(columns)}, name)

    return load


DATASETS = {
    entry.name: entry
    for entry in (
        Dataset(
            "breast_cancer",
            "569 tumours, 30 measurements of their cells: malignant or benign",
            "diagnosis",
            _sklearn("breast_cancer", "diagnosis", labelled=True),
        ),
        Dataset(
            "iris",
            "150 flowers, 4 lengths: one of three species",
            "species",
            _sklearn("iris", "species", labelled=True),
        ),
        Dataset(
            "wine", "178 wines, 13 chemical measurements: one of three growers", "grower", _sklearn("wine", "grower")
        ),
        Dataset(
            "digits", "1,797 images of 8×8 pixels: the digit that was written", "digit", _sklearn("digits", "digit")
        ),
        Dataset(
            "diabetes",
            "442 patients, 10 measurements: the progression of the disease in a year",
            "progression",
            _sklearn("diabetes", "progression"),
        ),
        Dataset(
            "coal",
            "British coal-mining disasters in each year from 1851 to 1962",
            "disasters",
            _series("coal", "year", "disasters"),
        ),
        Dataset(
            "nile",
            "the flow of the Nile at Aswan in each year from 1871 to 1970",
            "flow",
            _series("nile", "year", "flow"),
            "year",
        ),
    )
}


def dataset(name: str) -> Dataset:
    """The data set of this name."""
    if name not in DATASETS:
        raise InputError(f"There is no data set {name!r}: the data sets are {', '.join(DATASETS)}.")
    return DATASETS[name]
