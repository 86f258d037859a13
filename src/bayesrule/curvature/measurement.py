"""The record of one measurement: E_q of the data's loss, its gradient and its curvature."""

from __future__ import annotations

from typing import Any

import equinox as eqx
from jaxtyping import Array, PyTree


class Measurement(eqx.Module):
    """E_q of the data's loss and of its derivatives, in the terms that `q.moved` takes.

    `latent_correction` is the same of −log q(z | θ), where θ is drawn by way of a latent z (a mixture's component, a
    Student-t's scale): the step adds it, times its temperature.
    """

    value: Array
    gradient: PyTree
    curvature: Any
    aux: PyTree = None
    latent_correction: Measurement | None = None
