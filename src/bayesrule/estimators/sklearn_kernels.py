"""scikit-learn's kernels in a Gaussian process of this library: compiled, and differentiated in their hyper-parameters.

A kernel of `sklearn.gaussian_process.kernels` is a tree of objects that compute with NumPy. `convert` reads the tree
into a `ConvertedKernel`, which computes the same function of its hyper-parameters with JAX; a `WhiteKernel` among the
terms of a sum becomes the noise of the regression. `theta`, bounds and fixed hyper-parameters mean what they do in
scikit-learn, and `Conversion.restore` writes fitted values back into a kernel of scikit-learn's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..models.kernels import Inputs, Kernel, columns
from ..numerics.linalg import safe_sqrt

_HALF_INTEGERS = {0.5: 0, 1.5: 1, 2.5: 2}
_POLYNOMIALS = ((1.0,), (1.0, 1.0), (1.0, 1.0, 1 / 3))


class ConvertedKernel(Kernel):
    """A kernel of scikit-learn's as a function of its hyper-parameters.

    Args:
        values: all hyper-parameters but the noise, those that are fixed too, in the order of scikit-learn's `theta`.
        tree: the kernel as nested tuples, a name and then its parts; hyper-parameters are (first, last) in `values`.
    """

    values: Any
    tree: Any = eqx.field(static=True)

    def between(self, x: Float[Array, "N D"], other: Float[Array, "M D"]) -> Float[Array, "N M"]:
        return self._evaluate(self.tree, x, other)

    def diagonal(self, x: Inputs) -> Float[Array, " N"]:
        return self._evaluate_diagonal(self.tree, columns(x))

    def _value(self, place: tuple[int, int]) -> Array:
        """A hyper-parameter: a number, or one for each dimension."""
        first, last = place
        return self.values[first] if last == first + 1 else self.values[first:last]

    def _evaluate(self, tree: Any, x: Array, other: Array) -> Array:
        name, *parts = tree
        if name in ("sum", "product"):
            one, two = (self._evaluate(part, x, other) for part in parts)
            return one + two if name == "sum" else one * two
        if name == "power":
            return self._evaluate(parts[0], x, other) ** parts[1]
        if name == "constant":
            return jnp.broadcast_to(self._value(parts[0]), (len(x), len(other)))
        if name == "dot product":
            return self._value(parts[0]) ** 2 + x @ other.T
        if name == "periodic":
            # scikit-learn's is a function of the distance, also in several dimensions.
            scale, period = map(self._value, parts)
            distance = safe_sqrt(_squares(x, other, 1.0))
            return jnp.exp(-2 * (jnp.sin(math.pi * distance / period) / scale) ** 2)
        squares = _squares(x, other, self._value(parts[0]))
        if name == "rbf":
            return jnp.exp(-0.5 * squares)
        if name == "rational quadratic":
            weight = self._value(parts[1])
            return (1 + squares / (2 * weight)) ** -weight
        order = parts[1]  # "matern"
        distance = safe_sqrt((2 * order + 1) * squares)
        return jnp.exp(-distance) * sum(c * distance**j for j, c in enumerate(_POLYNOMIALS[order]))

    def _evaluate_diagonal(self, tree: Any, x: Array) -> Array:
        name, *parts = tree
        if name in ("sum", "product"):
            one, two = (self._evaluate_diagonal(part, x) for part in parts)
            return one + two if name == "sum" else one * two
        if name == "power":
            return self._evaluate_diagonal(parts[0], x) ** parts[1]
        if name == "constant":
            return jnp.broadcast_to(self._value(parts[0]), (len(x),))
        if name == "dot product":
            return self._value(parts[0]) ** 2 + jnp.sum(x**2, axis=1)
        return jnp.ones(len(x), self.values.dtype)


def _squares(x: Array, other: Array, scale: Any) -> Float[Array, "N M"]:
    """|(x − x′)/ℓ|² of all pairs, from differences, which keep the distances of close inputs."""
    return jnp.sum(((x[:, None] - other[None]) / scale) ** 2, axis=-1)


@dataclass(frozen=True)
class Conversion:
    """A kernel of scikit-learn's and what it was converted to.

    Args:
        original: scikit-learn's kernel.
        kernel: the same as a kernel of this library, without the noise.
        noise: the level of its WhiteKernel; None if it has none.
        is_noise: for each entry of all hyper-parameters, whether it is that level.
        is_free: whether it is not fixed.
        lower, upper: the bounds of each entry; those of a fixed one are its value.
    """

    original: Any
    kernel: ConvertedKernel
    noise: float | None
    is_noise: np.ndarray
    is_free: np.ndarray
    lower: np.ndarray
    upper: np.ndarray

    def limits(self, noise: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """The bounds of the kernel's hyper-parameters and (`noise`) of its noise, as `maximize` takes them."""
        parts = []
        for bounds in (self.lower, self.upper):
            limits: dict[str, Any] = {"kernel": eqx.tree_at(lambda k: k.values, self.kernel, bounds[~self.is_noise])}
            parts.append({**limits, "noise": float(bounds[self.is_noise][0])} if noise else limits)
        return parts[0], parts[1]

    def theta(self, kernel: Any, noise: Any) -> np.ndarray:
        """The logarithms of the hyper-parameters that are not fixed, from a converted kernel and its noise."""
        return np.log(self.gather(kernel.values, noise))

    def gather(self, values: Any, noise: Any) -> np.ndarray:
        """Entries for all hyper-parameters that are not fixed, from those of the kernel and of its noise."""
        every = np.empty(len(self.is_noise))
        every[~self.is_noise] = np.asarray(values, float)
        every[self.is_noise] = 0.0 if self.noise is None else float(noise)
        return every[self.is_free]

    def at(self, theta: Any) -> tuple[ConvertedKernel, float | None]:
        """The converted kernel and the noise for another `theta`."""
        theta = np.asarray(theta, float)
        if theta.shape != (int(self.is_free.sum()),):
            raise ValueError(
                f"theta= has the logarithms of the {int(self.is_free.sum())} hyper-parameters that are not fixed, got "
                f"the shape {theta.shape}."
            )
        every = np.empty(len(self.is_noise))
        every[~self.is_noise] = np.asarray(self.kernel.values)
        every[self.is_noise] = 0.0 if self.noise is None else self.noise
        every[self.is_free] = np.exp(theta)
        kernel = eqx.tree_at(lambda k: k.values, self.kernel, every[~self.is_noise])
        return kernel, None if self.noise is None else float(every[self.is_noise][0])

    def restore(self, kernel: Any, noise: Any) -> Any:
        """scikit-learn's kernel with these values of its hyper-parameters."""
        return self.original.clone_with_theta(self.theta(kernel, noise))


def is_sklearn_kernel(kernel: Any) -> bool:
    """Whether this is a kernel of scikit-learn's, or a class derived from one."""
    return any(base.__module__.startswith("sklearn.gaussian_process") for base in type(kernel).__mro__)


def convert(kernel: Any) -> Conversion:
    """Convert a kernel of `sklearn.gaussian_process.kernels`.

    Constant, white, RBF, Matérn (ν = ½, 1½, 2½, ∞), rational quadratic, periodic (ExpSineSquared) and dot-product
    kernels, their sums, products and powers have a counterpart; others, and classes of one's own, raise.

    >>> from sklearn.gaussian_process.kernels import RBF, WhiteKernel
    >>> found = convert(2.0 * RBF(0.5) + WhiteKernel(0.1))
    >>> [round(float(value), 4) for value in found.kernel(np.array([[0.0], [1.0]]))[0]], found.noise
    ([2.0, 0.2707], 0.1)
    """
    if type(kernel).__name__ == "CompoundKernel":
        raise ValueError("kernel cannot be a CompoundKernel: give one kernel, which every class gets a copy of.")
    params, begin = kernel.get_params(), 0
    values, places, free, lower, upper = [], {}, [], [], []
    for hyper in kernel.hyperparameters:
        value = np.atleast_1d(np.asarray(params[hyper.name], float))
        places[hyper.name] = (begin, begin + len(value))
        begin += len(value)
        values.append(value)
        free.append(np.full(len(value), not hyper.fixed))
        bounds = np.stack([value, value], axis=1) if hyper.fixed else np.asarray(hyper.bounds, float)
        bounds = np.broadcast_to(bounds, (len(value), 2))
        lower.append(bounds[:, 0])
        upper.append(bounds[:, 1])
    terms, noise_name = _split_noise(kernel, "")
    is_noise = np.zeros(begin, bool)
    if noise_name is not None:
        is_noise[slice(*places[noise_name])] = True
    # Places among the values without the noise.
    shift = lambda index: int(index - is_noise[:index].sum())
    moved = {name: (shift(first), shift(last)) for name, (first, last) in places.items()}
    trees = [_tree(part, prefix, moved) for part, prefix in terms]
    if not trees:
        raise ValueError("kernel= is noise alone (WhiteKernel): add a kernel for the process, such as RBF().")
    tree = trees[0]
    for other in trees[1:]:
        tree = ("sum", tree, other)
    every = np.concatenate([np.zeros(0), *values])
    noise = None if noise_name is None else float(every[is_noise][0])
    flat = [np.concatenate([np.zeros(0, part_type), *parts]) for parts, part_type in ((free, bool), (lower, float))]
    converted = ConvertedKernel(every[~is_noise], tree)
    return Conversion(kernel, converted, noise, is_noise, flat[0], flat[1], np.concatenate([np.zeros(0), *upper]))


def _split_noise(kernel: Any, prefix: str) -> tuple[list[tuple[Any, str]], str | None]:
    """The terms of a sum without its WhiteKernel, with the prefixes of their hyper-parameters; and the noise's name."""
    name = type(kernel).__name__
    if name == "WhiteKernel":
        return [], f"{prefix}noise_level"
    if name != "Sum":
        return [(kernel, prefix)], None
    terms, noises = [], []
    for part in ("k1", "k2"):
        more, noise = _split_noise(getattr(kernel, part), f"{prefix}{part}__")
        terms += more
        noises += [noise] * (noise is not None)
    if len(noises) > 1:
        raise ValueError("kernel= has two WhiteKernels, of which only the sum matters: keep one.")
    return terms, noises[0] if noises else None


def _tree(kernel: Any, prefix: str, places: dict[str, tuple[int, int]]) -> Any:
    """A kernel without noise as nested tuples."""
    kind = type(kernel)
    name = kind.__name__ if kind.__module__.startswith("sklearn.gaussian_process") else ""
    place = lambda parameter: places[f"{prefix}{parameter}"]
    if name in ("Sum", "Product"):
        parts = (_tree(getattr(kernel, part), f"{prefix}{part}__", places) for part in ("k1", "k2"))
        return (name.lower(), *parts)
    if name == "Exponentiation":
        return ("power", _tree(kernel.kernel, f"{prefix}kernel__", places), float(kernel.exponent))
    if name == "ConstantKernel":
        return ("constant", place("constant_value"))
    if name == "RBF" or (name == "Matern" and kernel.nu == np.inf):
        return ("rbf", place("length_scale"))
    if name == "Matern" and kernel.nu in _HALF_INTEGERS:
        return ("matern", place("length_scale"), _HALF_INTEGERS[kernel.nu])
    if name == "RationalQuadratic":
        return ("rational quadratic", place("length_scale"), place("alpha"))
    if name == "ExpSineSquared":
        return ("periodic", place("length_scale"), place("periodicity"))
    if name == "DotProduct":
        return ("dot product", place("sigma_0"))
    if name == "Matern":
        raise ValueError(f"Matern(nu={kernel.nu}) has no closed form: use nu=0.5, 1.5, 2.5 or inf.")
    if name == "WhiteKernel":
        raise ValueError(
            "A WhiteKernel is the noise of y, so that it must be a term of the kernel's sum, as in RBF() + "
            "WhiteKernel(), not a factor."
        )
    raise ValueError(
        f"The kernel {kind.__name__} has no counterpart here, because it is a function in NumPy, which cannot be "
        "compiled or differentiated: use scikit-learn's ConstantKernel, RBF, Matern, RationalQuadratic, "
        "ExpSineSquared, DotProduct, WhiteKernel, their sums, products and powers, or a kernel of "
        "bayesrule.models.kernels."
    )
