"""Kernels: scikit-learn's values, state spaces with the same covariances, derivatives where inputs meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.gaussian_process.kernels as sk
from numpy.testing import assert_allclose

from bayesrule.models.kernels import RBF, Constant, Linear, Matern12, Matern32, Matern52, Periodic

RANDOM = np.random.default_rng(0)
X, OTHER = RANDOM.normal(size=(20, 3)), RANDOM.normal(size=(7, 3))
SCALES = np.array([0.5, 1.0, 2.0])
PAIRS = {
    "RBF": (RBF(2.0, SCALES), 2.0 * sk.RBF(SCALES)),
    "Matern12": (Matern12(2.0, SCALES), 2.0 * sk.Matern(SCALES, nu=0.5)),
    "Matern32": (Matern32(1.0, 0.7), sk.Matern(0.7, nu=1.5)),
    "Matern52": (Matern52(1.0, SCALES), sk.Matern(SCALES, nu=2.5)),
    "Linear": (Linear(3.0) + 0.5, 3.0 * sk.DotProduct(0.0) + 0.5),
    "compound": (2.0 * RBF() * Linear() + Constant(1.5), 2.0 * sk.RBF() * sk.DotProduct(0.0) + sk.ConstantKernel(1.5)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_scikit_learns_kernels(name):
    ours, theirs = PAIRS[name]
    assert_allclose(ours(X), theirs(X), rtol=1e-12, atol=1e-14)
    assert_allclose(ours(X, OTHER), theirs(X, OTHER), rtol=1e-12, atol=1e-14)
    assert_allclose(ours.diagonal(X), theirs.diag(X), rtol=1e-12)


def test_scikit_learns_periodic_kernel():
    ours, theirs = Periodic(1.5, 0.6, 1.3), 1.5 * sk.ExpSineSquared(0.6, 1.3)
    assert_allclose(ours(X[:, 0]), theirs(X[:, :1]), rtol=1e-12)
    assert_allclose(ours.diagonal(X[:, 0]), theirs.diag(X[:, :1]), rtol=1e-12)


CHAINS = {
    "Matern12": Matern12(2.0, 0.7),
    "Matern32": Matern32(2.0, 0.7),
    "Matern52": Matern52(2.0, 0.7),
    "compound": 1.5 * Matern32() + Matern12(0.3, 0.2) + 0.5,
}


@pytest.mark.sampled("compound")
@pytest.mark.parametrize("name", CHAINS)
def test_state_spaces_have_the_kernels_covariance(name):
    """Times apart, close, and repeated; the covariance by running the state space forward."""
    times = np.sort(np.concatenate([RANDOM.uniform(0, 3, 10), [1.0, 1.0, 1.0 + 1e-9]]))
    space = CHAINS[name].state_space(times)
    walk, noise, row, stationary = (
        np.asarray(x) for x in (space.transition, space.noise, space.emission, space.covariance)
    )
    assert_allclose(
        walk @ stationary @ walk.swapaxes(1, 2) + noise, np.broadcast_to(stationary, walk.shape), atol=1e-13
    )
    joint = np.zeros((len(times), len(times)))
    for place in range(len(times)):
        state = stationary @ row
        for after in range(place, len(times)):
            joint[place, after] = joint[after, place] = row @ state
            state = walk[after] @ state if after + 1 < len(times) else state
    assert_allclose(joint, CHAINS[name](times), atol=1e-13)


@pytest.mark.extended
def test_short_steps_in_float32_have_the_noise_of_float64():
    """The variance of a step of 10⁻³ is 10⁻¹⁴ of the process's: as a difference it would be rounding error."""
    exact = np.asarray(Matern52().state_space(jnp.array([0.0, 1e-3])).noise[0])
    single = Matern52(np.float32(1), np.float32(1)).state_space(np.array([0, 1e-3], np.float32)).noise[0]
    assert single.dtype == jnp.float32
    assert 0 < exact[0, 0] < 2e-14
    assert_allclose(single, exact, rtol=1e-6)


@pytest.mark.sampled("Matern52", "Periodic")
@pytest.mark.parametrize("kernel", [RBF, Matern12, Matern32, Matern52, Periodic], ids=lambda kernel: kernel.__name__)
def test_derivatives_where_inputs_meet(kernel):
    """By differences, with an input that comes twice; distances of zero have no infinite slopes."""
    x = np.append(X[:4, 0], X[0, 0])
    total = lambda scale: jnp.sum(jnp.sin(kernel(1.3, scale)(x)))
    slope = jax.grad(total)(0.8)
    assert_allclose(slope, (total(0.8 + 1e-6) - total(0.8 - 1e-6)) / 2e-6, rtol=1e-7)
    assert np.all(np.isfinite(jax.grad(lambda x: jnp.sum(kernel()(x)))(jnp.asarray(x))))


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: RBF(-1.0), "variance must be above 0"),
        (lambda: RBF(1.0, np.ones((2, 2))), "lengthscale is a number or one for each dimension"),
        (lambda: RBF(1.0, np.ones(2))(X), "3 dimensions and 2 lengthscales"),
        (lambda: RBF()(X, X[:, :2]), "same number of dimensions, got 3 and 2"),
        (lambda: RBF()(np.ones((2, 2, 2))), "N numbers"),
        (lambda: RBF().state_space(np.arange(3.0)), "RBF has no state space"),
        (lambda: (Matern12() * Matern32()).state_space(np.arange(3.0)), "Times has no state space"),
        (lambda: Matern32().state_space(np.array([1.0, 0.0])), "sorted times"),
        (lambda: Matern32().state_space(X), "one dimension"),
    ],
)
def test_bad_input(act, words):
    with pytest.raises(ValueError, match=words):
        act()
