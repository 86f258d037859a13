"""Methods that compute in the precision of the arrays which an object holds, whatever JAX is set to.

JAX rounds float64 to float32 unless its 64-bit mode is on. Estimators compute in double precision inside their own
methods, and hand out families whose arrays are NumPy's, in float64; a covariance of these that is computed in float32
may be off by per cents where the precision is ill-conditioned. So an object with float64 NumPy arrays runs its methods
in 64-bit mode and returns NumPy arrays. Objects of JAX arrays, and everything under `jit`, `grad` and `vmap`, are left
as they are, at the price of a look at the object's arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer


class OwnPrecision(type(eqx.Module)):
    """The metaclass of modules whose public methods and properties compute in the precision of their arrays."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> Any:
        methods = {key: _in_own_precision(value) for key, value in namespace.items() if not key.startswith("_")}
        return super().__new__(mcs, name, bases, {**namespace, **methods}, **options)


def _in_own_precision(attribute: Any) -> Any:
    """A method or a property that computes in the precision of its object; other attributes as they are."""
    if isinstance(attribute, property) and isinstance(attribute.fget, FunctionType):
        return property(_wrapped(attribute.fget), attribute.fset, attribute.fdel, attribute.__doc__)
    return _wrapped(attribute) if isinstance(attribute, FunctionType) else attribute


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        if jax.config.read("jax_enable_x64") or not _holds_double(self) or _is_traced((args, kwargs)):
            return method(self, *args, **kwargs)
        with jax.enable_x64(True):
            result = method(self, *args, **kwargs)
        if isinstance(result, jax.Array):
            return _to_numpy(result)[()]  # a number rather than an array without axes
        return jax.tree.map(_to_numpy, result)

    return compute


def _holds_double(value: Any) -> bool:
    """Whether an object holds an array of NumPy's in float64."""
    if isinstance(value, np.ndarray | np.generic):
        return value.dtype == np.float64
    if isinstance(value, eqx.Module):
        return any(_holds_double(field) for field in vars(value).values())
    if isinstance(value, dict):
        return any(_holds_double(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_holds_double(item) for item in value)


def _is_traced(arguments: Any) -> bool:
    """Whether an argument is traced, or the call is inside a function that JAX is compiling."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments)) or isinstance(lax.full((), 0), Tracer)


def _to_numpy(value: Any) -> Any:
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(value) if isinstance(value, jax.Array) and not is_key else value
