"""Leave-one-out predictive densities from draws of the posterior, by Pareto-smoothed importance sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...inference.importance import importance


class LeaveOneOut(NamedTuple):
    """What `posterior.loo()` returns.

    Attributes:
        pointwise: log p(y_i | all other observations) of every observation.
        khat: Pareto's k̂ of each; above 0.7 its value cannot be relied on.
        effective_parameters: p_loo, by how much the observations are better predicted with than without themselves.
    """

    pointwise: np.ndarray
    khat: np.ndarray
    effective_parameters: float

    @staticmethod
    def of(likelihood: Mapping[str, Any]) -> LeaveOneOut:
        """From the log likelihood of every observation under draws, along the first axis, by site."""
        if not likelihood:
            raise ValueError(
                "This model has no observed site: its likelihood is in a factor, which has no observations."
            )
        columns = np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x in likelihood.values()], axis=1)
        weighted = [importance(-column) for column in columns.T]
        pointwise = np.array([np.logaddexp.reduce(w.log_weights + c) for w, c in zip(weighted, columns.T, strict=True)])
        whole = np.logaddexp.reduce(columns, axis=0) - np.log(len(columns))
        return LeaveOneOut(pointwise, np.array([w.khat for w in weighted]), float(np.sum(whole - pointwise)))

    @property
    def elpd(self) -> float:
        """The sum over observations."""
        return float(np.sum(self.pointwise))

    @property
    def error(self) -> float:
        """Its standard error over observations."""
        return float(np.sqrt(len(self.pointwise)) * np.std(self.pointwise))

    def __str__(self) -> str:
        doubtful = int(np.sum(self.khat > 0.7))
        return f"elpd {self.elpd:.2f} ± {self.error:.2f}, p_loo {self.effective_parameters:.2f}, {doubtful} k̂ above 0.7"
