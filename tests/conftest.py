"""Every test runs in float64 on the CPU unless it says otherwise."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_enable_x64", True)

# These make a reference's numbers, and need what made them.
collect_ignore = [
    "reference/make_ivon.py",
    "reference/make_bayespy.py",
    "reference/make_nuts.py",
    "reference/make_dynamax.py",
]
