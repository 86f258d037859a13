"""Files name classes by their public names, and hold whatever a state holds; tests/saved_files has those of old."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.fitting import checkpoint
from bayesrule.models import kernels


def logistic(w, example):
    x, y = example
    return jnp.logaddexp(0.0, -y * (x @ w))


def test_files_name_no_module(tmp_path):
    blr.save(tmp_path / "q.npz", {"q": blr.Gaussian(jnp.zeros(2)), "kernel": kernels.RBF(1.0, 2.0)})
    header = json.loads(str(np.load(tmp_path / "q.npz")["header"]))
    text = json.dumps(header)
    assert '"class": "Gaussian"' in text
    assert '"class": "kernels.RBF"' in text
    assert "bayesrule." not in text
    loaded = blr.load(tmp_path / "q.npz")
    assert isinstance(loaded["kernel"], kernels.RBF)


@pytest.mark.parametrize("name", ["fit", "cli", "Rule.step", "os.system", "kernels.Kernel.__init__", "no such class"])
def test_a_file_can_name_nothing_but_the_data_types(tmp_path, name):
    header = json.dumps({"format": 2, "value": {"dict": [["value", {"class": name, "fields": []}]]}})
    np.savez(tmp_path / "bad.npz", header=np.array(header))
    with pytest.raises(ValueError, match="not one of the library's own types"):
        blr.load(tmp_path / "bad.npz")


def concrete_subclasses(kind):
    for sub in kind.__subclasses__():
        if not inspect.isabstract(sub):
            yield sub
        yield from concrete_subclasses(sub)


KERNELS = sorted(
    {kind for kind in concrete_subclasses(kernels.Kernel) if kind.__module__ == kernels.__name__} - {kernels.Matern},
    key=lambda kind: kind.__name__,
)
FAMILIES = sorted(
    {kind for kind in concrete_subclasses(blr.Family) if kind.__module__.startswith("bayesrule.families")},
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", [*FAMILIES, *KERNELS, blr.State, blr.Info], ids=lambda kind: kind.__name__)
def test_every_family_and_kernel_can_be_named_in_a_file(kind):
    assert checkpoint._class_named(checkpoint._public_name(kind)) is kind


@pytest.mark.extended
def test_kernels_come_back_from_a_file(tmp_path):
    tree = kernels.RBF(1.0, jnp.array([2.0, 3.0])) + 0.5 * kernels.Matern32(1.0, 2.0) + kernels.Linear()
    blr.save(tmp_path / "kernel.npz", tree)
    loaded = blr.load(tmp_path / "kernel.npz")
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    np.testing.assert_array_equal(loaded(jnp.ones((3, 2))), tree(jnp.ones((3, 2))))


STATES = {
    "Kronecker factors": blr.vogn(0.1, relative=False).replace(family=blr.KroneckerGaussian),
    "low rank": blr.slang(0.1, rank=1),
    "momentum": blr.gradient_descent(0.1, momentum=0.9),
    "mixture": blr.newton(0.1).replace(family=blr.Mixture),
}


@pytest.mark.parametrize("name", STATES)
def test_what_states_hold_besides_families_comes_back(name, tmp_path):
    """tests/recipes/test_every_recipe.py saves the states of all recipes at their defaults; these hold other types."""
    objective = blr.Objective(logistic, size=24, regularizer=1.0)
    start = {"w": jnp.ones((2, 1))}
    if name == "mixture":
        parts = [blr.Gaussian(jnp.array([shift, 0.0]), jnp.eye(2)) for shift in (-1.0, 1.0)]
        start = blr.Mixture(jnp.array([0.5, 0.5]), jax.tree.map(lambda *x: jnp.stack(x), *parts))
    state = STATES[name].init(start, objective)
    blr.save(tmp_path / "state.npz", (state, jax.random.key(3)))
    loaded, key = blr.load(tmp_path / "state.npz")
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, loaded, state)
    assert key == jax.random.key(3)


def test_every_saved_name_has_its_class():
    for name in checkpoint._OTHERS:
        kind = checkpoint._class_named(name)
        assert kind is not None
        assert checkpoint._public_name(kind) == name
    with pytest.raises(ValueError, match="no public name"):
        checkpoint._public_name(type(blr.Objective(logistic, size=1, regularizer=1.0).regularizer))
