"""Which estimator a task and a model's name stand for."""

from __future__ import annotations

import inspect
from typing import Any

from .. import estimators
from ..tables.tables import InputError

MODELS: dict[str, dict[str, str]] = {
    "linear": {
        "regression": "RidgeRegression",
        "binary": "LogisticRegression",
        "classes": "LogisticRegression",
        "counts": "PoissonRegression",
    },
    "mlp": {"regression": "MLPRegressor", "binary": "MLPClassifier", "classes": "MLPClassifier"},
    "binary-mlp": {"binary": "BinaryMLPClassifier", "classes": "BinaryMLPClassifier"},
    "gp": {
        "regression": "GaussianProcessRegressor",
        "binary": "GaussianProcessClassifier",
        "classes": "GaussianProcessClassifier",
    },
    "state-space": {"sequence": "LinearGaussianStateSpace"},
    "hmm": {"sequence": "GaussianHMM"},
}


def default_model(task: str) -> str:
    """The model that a task gets if none is asked for."""
    return "state-space" if task == "sequence" else "linear"


def estimator_name(task: str, model: str) -> str:
    """The class, or an error that says which models there are."""
    if model not in MODELS:
        raise InputError(f"There is no model {model!r}: there are {', '.join(MODELS)}.")
    if task not in MODELS[model]:
        fitting = [name for name, tasks in MODELS.items() if task in tasks]
        raise InputError(f"The model {model!r} does not do {task}: {', '.join(fitting)} would.")
    return MODELS[model][task]


def build(name: str, recipe: str | None, params: dict[str, Any], seed: int) -> Any:
    """The estimator with its settings; a wrong one is an error that lists the right ones."""
    kind = getattr(estimators, name)
    known = [one for one in inspect.signature(kind).parameters if one != "self"]
    wrong = [one for one in params if one not in known]
    if wrong:
        raise InputError(f"{name} has no setting {wrong[0]!r}: it has {', '.join(known)}.")
    settings = dict(params)
    if recipe is not None:
        slot = next((one for one in ("recipe", "method") if one in known), None)
        if slot is None:
            raise InputError(f"{name} has one algorithm only: leave --recipe out.")
        settings[slot] = recipe
    if "random_state" in known:
        settings.setdefault("random_state", seed)
    return kind(**settings)
