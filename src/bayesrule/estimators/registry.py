"""The registry of estimators: which class does which task, what it is called, and how it is built.

Nothing is listed here. Every estimator class describes itself by the attributes `model`, `tasks`, `title` and
`explain` (see `Estimator`), and the registry reads them off the classes that `bayesrule.estimators` exports. The
command line, the runs and the report all ask the registry, so that a new estimator is added in one place: a class with
these attributes, and its name in `bayesrule/estimators/__init__.py`.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from .. import estimators
from ..tables.tables import InputError
from .base import Estimator

TASKS_WITHOUT_TARGET = ("clusters", "topics", "factors")
"""The tasks that predict no column: each is what one model finds in a table. The others are
`bayesrule.tables.tasks.TASKS`."""


def estimator_class(name: str) -> type[Estimator] | None:
    """The exported estimator class of this name, or None if there is none."""
    return getattr(estimators, name) if name in estimators.EXPORTS else None


@cache
def models() -> dict[str, dict[str, type[Estimator]]]:
    """For every name that `--model` accepts, the class that does each of its tasks.

    The order is that of `bayesrule.estimators.EXPORTS`; the first model that does a task is its default.
    """
    by_model: dict[str, dict[str, type[Estimator]]] = {}
    for name in estimators.EXPORTS:
        kind: type[Estimator] = getattr(estimators, name)
        for task in kind.tasks:
            by_model.setdefault(kind.model, {})[task] = kind
    return by_model


def task_without_target(model: str | None) -> str | None:
    """The task of a model that predicts no column ("clusters" for "mixture"); None for the models that predict one."""
    return next((task for task in models().get(model or "", {}) if task in TASKS_WITHOUT_TARGET), None)


def default_model(task: str) -> str:
    """The model that is fitted for a task if none is named: the first one that does it."""
    return next(model for model, by_task in models().items() if task in by_task)


def estimator_name(task: str, model: str) -> str:
    """The name of the class that fits `model` for `task`; otherwise an error that lists the models there are."""
    if model not in models():
        raise InputError(f"There is no model {model!r}: the models are {', '.join(models())}.")
    if task not in models()[model]:
        able = [name for name, by_task in models().items() if task in by_task]
        raise InputError(f"The model {model!r} cannot do {task}: use --model {' or '.join(able)}.")
    return models()[model][task].__name__


def title(name: str) -> str:
    """What a report calls the estimator with this class name; the name itself if it is not one of ours."""
    kind = estimator_class(name)
    return name if kind is None or not kind.title else kind.title


def build_estimator(name: str, recipe: str | None, params: dict[str, Any], seed: int) -> Any:
    """Make an estimator from the settings of a run.

    Args:
        name: the class's name.
        recipe: the algorithm, passed as `recipe=` or `method=`, whichever the class has; None for its default.
        params: keyword arguments of the class.
        seed: `random_state`, unless `params` has one.
    """
    kind: Any = getattr(estimators, name)
    known = [parameter for parameter in inspect.signature(kind).parameters if parameter != "self"]
    unknown = [parameter for parameter in params if parameter not in known]
    if unknown:
        raise InputError(f"{name} has no parameter {unknown[0]!r}: it has {', '.join(known)}.")
    settings = dict(params)
    if recipe is not None:
        algorithm = next((parameter for parameter in ("recipe", "method") if parameter in known), None)
        if algorithm is None:
            raise InputError(f"{name} has only one algorithm: leave --recipe out.")
        settings[algorithm] = recipe
    if "random_state" in known:
        settings.setdefault("random_state", seed)
    return kind(**settings)
