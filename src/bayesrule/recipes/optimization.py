"""Optimisation algorithms as the rule: Table 1's first block.

They minimise a function of θ, or an `Objective`; the rate is the rule's own ρ.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..curvature.gradient import Gradient
from ..curvature.hessian import Hessian
from ..families.gaussian.fixed import FixedGaussian
from ..families.gaussian.full import Gaussian
from ..families.latent.mixture import Mixture
from ..families.start import Start
from ..points.base import Delta
from ..points.sampling import MonteCarlo
from ..rule.multistart import Search
from ..rule.rule import Rule
from ..steps.guards import Backtracking, Retraction
from ..steps.schedule import Number
from ..steps.steps import Steps


def cooling(count: Any) -> Any:
    """A temperature schedule that falls from 1 to 10⁻³ in twenty steps."""
    # An int32 divided by an integer would be float32, also in double precision.
    return 10.0 ** (-3 * jnp.minimum(count * 0.05, 1.0))


def gradient_descent(rate: Number, *, momentum: Number | None = None) -> Rule:
    r"""Gradient descent, $θ ← θ − ρ∇\barℓ(θ)$ (section 1.3.1).

    A Gaussian with fixed covariance I and the delta method (`eq:blr_sgd1`). With `momentum` it is Polyak's heavy ball,
    $+ γ(θ_t − θ_{t−1})$ (`eq:sgd_momentum`).

    Args:
        rate: ρ, a number or a schedule (a function of the step count).
        momentum: γ of the heavy ball, between 0 and 1.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> result = blr.fit(blr.gradient_descent(0.5), lambda x: 0.5 * jnp.sum((x - 3) ** 2), jnp.zeros(1), steps=1)
    >>> float(result.q.mean[0])
    1.5

    Reference: Polyak, "Some methods of speeding up the convergence of iteration methods", 1964 (the heavy ball).
    """
    steps = Steps(rate, momentum=momentum)
    return Rule(FixedGaussian, Delta(), Gradient(), steps, name="gradient_descent", section="1.3.1")


def newton(rate: Number = 1.0) -> Rule:
    r"""Newton's method, $θ ← θ − [∇^2\barℓ(θ)]^{-1}∇\barℓ(θ)$ at ρ = 1 (section 1.3.2).

    A Gaussian and the delta method: $S ← (1−ρ)S + ρ∇^2\barℓ(m)$, $m ← m − ρS^{-1}∇\barℓ(m)$
    (`eq:von_1`, `eq:bp_delta`). The step is halved until S is positive definite and the loss does not
    worsen.

    Args:
        rate: ρ, a number or a schedule; at 1 the precision is the Hessian at the mean before the step.

    >>> import bayesrule as blr, jax.numpy as jnp
    >>> result = blr.fit(blr.newton(), lambda x: jnp.sum(jnp.cosh(x - 1)), jnp.zeros(2), steps=9, tolerance=1e-6)
    >>> result.reason, [round(float(x), 4) for x in result.q.mean]
    ('converged', [1.0, 1.0])

    Reference: Nocedal and Wright, "Numerical optimization", 2006, chapter 3.
    """
    guard = Backtracking(monotone=True)
    return Rule(Gaussian, Delta(), Hessian(), Steps(rate), guard, name="newton", section="1.3.2")


def von(rate: Number = 0.1, *, samples: int = 10) -> Rule:
    r"""Variational online Newton: Newton's method without the delta method (`eq:von_1`).

    $S ← (1−ρ)S + ρE_q[∇^2\barℓ]$, $m ← m − ρS^{-1}E_q[∇\barℓ]$, with the expectations by Monte Carlo. At its fixed
    point q is the best Gaussian approximation of the posterior, and its mean a minimum that is robust to perturbations.

    Args:
        rate: ρ, a number or a schedule.
        samples: How many draws of q each step averages; an even number is drawn in mirrored pairs.

    >>> import bayesrule as blr, jax.numpy as jnp, jax
    >>> q = blr.Gaussian(jnp.zeros(1), jnp.eye(1))
    >>> result = blr.fit(blr.von(0.5), lambda x: jnp.sum((x - 1) ** 2), q, steps=40, key=jax.random.key(0))
    >>> round(float(result.q.mean[0]), 3), round(float(result.q.precision[0, 0]), 3)
    (1.0, 2.0)

    Reference: Khan et al., "Variational adaptive-Newton method for explorative learning", 2017.
    """
    points = MonteCarlo(samples, antithetic=samples % 2 == 0)
    return Rule(Gaussian, points, Hessian(), Steps(rate), Retraction(), name="von", section="3.1")


def multimodal(
    rate: Number = 0.5,
    *,
    components: int = 12,
    bounds: Any = None,
    temperature: Number = cooling,
    patience: int = 60,
    memory: int = 256,
) -> Rule:
    r"""Multimodal optimisation: a mixture of Gaussians whose components take Newton-like steps (section 3.2).

    Every component moves on $\barℓ − τ\log r_k$ (`eq:exp-von1`, `eq:exp-von2`), which keeps it away from the others
    while τ, the weight of the entropy, is high. A component that has converged is recorded and restarted elsewhere, so
    `components` need not be the number of minima. `result.minima()` lists what was recorded.

    Args:
        rate: ρτ, the fraction of each precision that a step replaces: a number or a schedule.
        components: How many components move side by side.
        bounds: The box to search, `(low, high)`. Without it, pass starts to `fit`, along a leading axis of every array.
        temperature: τ as a function of a component's age in steps, in units of the standard deviation of $\barℓ$ over
            the first starts; by default it falls from 1 to 10⁻³ in twenty steps.
        patience: After how many steps a component that has not converged is restarted.
        memory: How many minima are recorded, the lowest ones.

    >>> import bayesrule as blr, jax.numpy as jnp, jax
    >>> bounds = jnp.array([-2.0]), jnp.array([2.0])
    >>> rule = blr.multimodal(0.5, components=4, bounds=bounds)
    >>> result = blr.fit(rule, lambda x: jnp.sum((x**2 - 1) ** 2 + x / 10), None, steps=40, key=jax.random.key(0))
    >>> [(round(float(m.position[0]), 3), round(m.value, 3)) for m in result.minima()]
    [(-1.012, -0.101), (0.987, 0.099)]

    Reference: Khan and Rue, "The Bayesian learning rule", JMLR 2023, section 3.2.
    """
    return Rule(
        Start(Mixture, component=Gaussian, learnt=False),
        Delta(),
        Hessian(),
        Steps(rate, temperature=temperature, units="fraction"),
        Backtracking(12, monotone=True),
        Search(bounds, newton(), components=components, patience=patience, memory=memory),
        name="multimodal",
        section="3.2",
    )
