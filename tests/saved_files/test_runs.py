"""Runs, posteriors of log densities, divided checkpoints and optimizers, as saved when `State` had twelve fields."""

import numpy as np
import pytest

import bayesrule as blr
from bayesrule.runs import watch
from saved_files import runs
from saved_files.expected import EXPECTED, assert_near
from saved_files.fits import course


@pytest.mark.parametrize("name", runs.RUNS)
def test_a_run_predicts_what_it_did(saved, name):
    folder = saved / "finished_runs"
    run = blr.load(folder / name)
    assert type(run.estimator).__name__ == name
    assert_near(runs.predictions(run, folder / runs.TABLE), EXPECTED["finished_runs"][name], 1e-12)


def test_a_killed_run_goes_on_to_what_it_would_have_been(saved, monkeypatch):
    folder, fit, starts = saved / "killed_run", watch.fit, []
    runs.moved_back(folder)

    def seen(rule, objective, start, *arguments, **more):
        starts.append(start)
        return fit(rule, objective, start, *arguments, **more)

    monkeypatch.setattr(watch, "fit", seen)
    runs.invoke("fit", "--resume", "-o", str(folder / "run"))
    assert 0 < starts[0].steps < runs.LONG_RUN_STEPS  # It went on, and did not begin again.
    run = blr.load(folder / "run")
    assert_near(runs.predictions(run, folder / runs.TABLE), EXPECTED["killed_run"], 1e-12)


@pytest.mark.parametrize("name", runs.INFERENCES)
def test_a_posterior_of_a_density_says_and_draws_what_it_did(saved, name):
    pytest.importorskip("numpyro" if name == "numpyro" else "jax")
    posterior = runs.INFERENCES[name][1](saved / "inferences" / f"{name}.npz")
    assert_near(runs.described(posterior), EXPECTED["inferences"][name], 1e-12)


def test_a_divided_checkpoint_goes_on(saved):
    pytest.importorskip("orbax.checkpoint")
    half = blr.ShardedCheckpoint(saved / "sharded").load(runs.one_device())
    assert half.steps == 4
    found = course(runs.sharded_fit(half, 6))
    found["objective"] = np.concatenate([half.trace["objective"], found["objective"]])
    assert_near(found, EXPECTED["sharded"], 1e-12)


@pytest.mark.parametrize("name", runs.OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_state_dict(saved, name):
    torch = pytest.importorskip("torch")
    values, state = torch.load(saved / "optimizers" / f"{name}.pt", weights_only=True)
    params = [torch.nn.Parameter(value) for value in values]
    optimizer = runs.optimizer_of(name, params)
    optimizer.load_state_dict(state)
    runs.train(optimizer, params, range(3, 6))
    np.testing.assert_allclose(params[0].detach().numpy(), EXPECTED["optimizers"][name], rtol=1e-12)
