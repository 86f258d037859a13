"""What divides the mean's step, beside the formulas by hand."""

import numpy as np
import pytest

import bayesrule as blr


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_a_rate_is_in_units_of_the_divisor_at_the_start(root, damping):
    """At v = start the divisor is N whatever the damping; at another v it is N(f(v) + δ)/(f(start) + δ)."""
    size, start = 10.0, 2.0
    scaling = blr.Scaling(damping, root=root, start=start)
    f = np.sqrt if root else (lambda v: v)

    def divisor(v):
        precision = np.array([size * v])
        first = scaling.first(precision, size, 1.0, None)
        made = scaling.divisor(size, 1.0, None, first, 0.1, 0)
        return made.common * made(precision)

    np.testing.assert_allclose(divisor(start), size, rtol=1e-12)
    np.testing.assert_allclose(divisor(5.0), size * (f(5.0) + damping) / (f(start) + damping), rtol=1e-12)
