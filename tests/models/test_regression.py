"""Predictions of generalised linear models against sums over their own posterior."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import roots_hermitenorm

import bayesrule as blr
from bayesrule.models import regression


def test_counts_vary_by_their_rates_too():
    """Mean and variance of a Poisson count whose log rate is N(m, v), by Gauss–Hermite sums over the rate."""
    q = blr.Gaussian({"w": jnp.array([0.4, -0.2])}, jnp.array([[2.0, 0.5], [0.5, 1.0]]))
    x = np.array([1.0, 0.7])
    m, v = x @ np.array([0.4, -0.2]), x @ np.linalg.solve(np.asarray(q.precision), x)
    nodes, weights = roots_hermitenorm(60)
    rate, weights = np.exp(m + np.sqrt(v) * nodes), weights / weights.sum()
    mean, variance = regression.predictive(q, jnp.asarray(x[None]), "poisson")
    assert float(mean[0]) == pytest.approx(weights @ rate)
    assert float(variance[0]) == pytest.approx(weights @ rate + weights @ rate**2 - (weights @ rate) ** 2)
