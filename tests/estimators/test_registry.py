"""The registry: every estimator describes itself, and the command line, the runs and the report follow it."""

import pytest
from typer.testing import CliRunner

from bayesrule import estimators
from bayesrule.cli import app
from bayesrule.estimators import base, registry
from bayesrule.tables.tasks import TASKS


@pytest.mark.parametrize("name", estimators.__all__)
def test_every_estimator_describes_itself(name):
    kind = registry.estimator_class(name)
    assert kind.__name__ == name
    assert kind.title
    assert set(kind.tasks) <= {*TASKS, *registry.TASKS_WITHOUT_TARGET}
    assert bool(kind.model) == bool(kind.tasks)


def test_every_task_has_a_default_model():
    assert {task: registry.default_model(task) for task in TASKS} == {
        "regression": "linear",
        "binary": "linear",
        "classes": "linear",
        "counts": "linear",
        "sequence": "state-space",
    }


def test_the_help_and_the_documentation_name_every_model(request):
    shown = CliRunner().invoke(app, ["fit", "--help"], env={"COLUMNS": "200"}).output
    text = (request.config.rootpath / "docs" / "command_line.md").read_text()
    for model in registry.models():
        assert model in shown
        assert f"`{model}`" in text


def test_a_new_estimator_is_added_in_one_place(monkeypatch):
    """A class that describes itself and is exported is all that the registry needs."""

    class Quantiles(base.Estimator):
        model = "quantiles"
        tasks = ("regression",)
        title = "quantile regression"

        def __init__(self, *, method="exact", random_state=None):
            self.method, self.random_state = method, random_state

    monkeypatch.setitem(estimators.EXPORTS, "Quantiles", "quantiles")
    monkeypatch.setitem(vars(estimators), "Quantiles", Quantiles)
    registry.models.cache_clear()
    try:
        assert registry.estimator_name("regression", "quantiles") == "Quantiles"
        assert registry.default_model("regression") == "linear"
        assert registry.title("Quantiles") == "quantile regression"
        built = registry.build_estimator("Quantiles", "fast", {}, 3)
        assert built.get_params() == {
            "method": "fast",
            "random_state": 3,
        }
    finally:
        registry.models.cache_clear()


def test_names_of_others_are_no_estimators():
    assert registry.estimator_class("Estimator") is None
    assert registry.title("SomebodyElses") == "SomebodyElses"
