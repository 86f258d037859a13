"""The record of one measurement: E_q of the data's loss, its gradient and its curvature."""

from __future__ import annotations

from typing import Any

import equinox as eqx
from jaxtyping import Array

from ..numerics.pytree import PyTree


class Measurement(eqx.Module):
    """E_q of the data's loss and of its derivatives, in the terms that `q.moved` takes, without the regularizer."""

    value: Array
    """E_q ℓ, the data's part of the objective."""
    gradient: PyTree
    """E_q∇ℓ in the shape of θ for a Gaussian, ∇_μ E_q ℓ in the shape of μ for another exponential family."""
    curvature: Any
    """E_q∇²ℓ as the structure of q holds it; None where q holds none."""
    aux: PyTree = None
    """What the loss returned to carry along in the state, such as batch statistics."""
    latent_correction: Measurement | None = None
    """The same of −log q(z | θ), where θ is drawn by way of a latent z (a mixture's component, a Student-t's scale).
    The step adds it, times its temperature."""
    factors: Any = None
    """What q has computed of its precision on the way (`Family.factors`), where the next step begins there."""
