"""Special functions against SciPy."""

import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
from scipy.special import digamma as reference

from bayesrule.numerics.special import digamma


def test_digamma_in_both_precisions():
    x = np.geomspace(1e-6, 1e9, 4000)
    assert_allclose(digamma(jnp.array(x)), reference(x), rtol=1e-12, atol=1e-12)
    single = x.astype(np.float32)
    exact = reference(single.astype(float))
    assert digamma(jnp.array(single)).dtype == jnp.float32
    assert np.max(np.abs(digamma(jnp.array(single)) - exact) / np.maximum(1, np.abs(exact))) < 1e-6
