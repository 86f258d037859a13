"""A Gaussian whose precision is a Kronecker product for each layer: the family of noisy K-FAC."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.scipy.linalg as linalg
from jaxtyping import Array, Bool, Float

from ...numerics.pytree import PyTree
from ...numerics.trees import floating, ravel, unravel, wide
from ...steps.step import Step
from .base import GaussianFamily
from .precision import GaussNewtonForms, Structure, T


class KroneckerFactors(eqx.Module):
    """Σ over the layers' blocks A ⊗ G + δI: trees like θ of A (I×I), G (O×O) and the number δ."""

    inputs: PyTree
    outputs: PyTree
    diagonal: PyTree


class KroneckerStructure(Structure):
    """Two factors for each leaf, and what a prior adds to the diagonal."""

    name = "kronecker"

    def of_factors(self, inputs: PyTree, outputs: PyTree) -> KroneckerFactors:
        """The blocks A ⊗ G, with no prior."""
        return KroneckerFactors(inputs, outputs, jax.tree.map(lambda g: jnp.zeros((), g.dtype), outputs))

    def of_diagonal(self, diagonal: PyTree) -> PyTree:
        # A leaf's factors hold one number on the diagonal: its entries' mean.
        return jax.tree.map(jnp.mean, diagonal)

    def of_matrix(self, matrix: Float[Array, "P P"], like: PyTree) -> PyTree:
        return self.of_diagonal(unravel(jnp.diagonal(matrix), like))

    def of_sandwich(self, jacobian: PyTree, middle: Float[Array, "B K K"]) -> Any:
        raise ValueError(
            "A KroneckerGaussian's factors come from the inputs and slopes of a network's layers, which a Jacobian "
            "does not show: leave linear=True out of the Objective."
        )

    def gauss_newton(self, forms: GaussNewtonForms[T]) -> T:
        return forms.kronecker(self.of_factors)

    def add(self, first: KroneckerFactors, second: PyTree) -> KroneckerFactors:
        total = jax.tree.map(jnp.add, first.diagonal, second)
        return KroneckerFactors(first.inputs, first.outputs, total)


KRONECKER = KroneckerStructure()


class KroneckerGaussian(GaussianFamily):
    r"""$N(m, S^{-1})$ with $S_l = \tilde A_l ⊗ \tilde G_l$ for each leaf l: the family of noisy K-FAC (section 4.4).

    A leaf (…, outputs) is laid out as a matrix of I×O entries, inputs by outputs: dense kernels (in, out),
    convolutions (height, width, in, out), biases 1×O. $\tilde A = A + π\sqrt{δ}I$ and
    $\tilde G = G + \sqrt{δ}I/π$ hold the prior's precision δ between them, with
    $π^2 = (\mathrm{tr}A/I)/(\mathrm{tr}G/O)$ (Martens and Grosse, 2015). It moves by projection: the factors are
    averaged, $A ← (1−ρτ)A + ρτA_t$, $G ← (1−ρτ)G + ρG_t$, with what `GaussNewton` or `GeneralizedGaussNewton` measure
    (Zhang et al., ICML 2018).

    >>> import jax.numpy as jnp
    >>> q = KroneckerGaussian({"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}, 4.0)
    >>> [round(float(v), 4) for v in q.variance()["b"]], q.inputs["w"].shape
    ([0.25, 0.25], (3, 3))

    Args:
        mean: m, any pytree.
        precision: the prior's precision δ, one number, or one for each leaf.
        inputs: A for each leaf, (I, I); zeros by default.
        outputs: G for each leaf, (O, O); zeros by default.
    """

    mean: PyTree
    inputs: PyTree
    outputs: PyTree
    prior: PyTree
    label: ClassVar[str] = "Gaussian (Kronecker-factored precision)"
    meaning: ClassVar[str] = "q(θ) = N(m, S⁻¹), S = A ⊗ G for each layer"
    update: ClassVar[str] = "A ← (1 − ρτ)A + ρτ A_t,  G ← (1 − ρτ)G + ρ G_t,  m ← m − ρ S⁻¹ E_q∇ℓ̄"
    structure: ClassVar[Structure] = KRONECKER

    def __init__(self, mean: PyTree, precision: Any = 1.0, *, inputs: PyTree = None, outputs: PyTree = None):
        self.mean = floating(mean)
        if jax.tree.structure(precision) == jax.tree.structure(self.mean):
            each = jax.tree.map(lambda s, m: jnp.mean(jnp.asarray(s)).astype(wide(m.dtype)), precision, self.mean)
        else:
            each = jax.tree.map(lambda m: jnp.asarray(precision, wide(m.dtype)), self.mean)
        zeros = lambda side: jax.tree.map(
            lambda m: jnp.zeros((_sides(m)[side], _sides(m)[side]), wide(m.dtype)), self.mean
        )
        self.inputs = zeros(0) if inputs is None else inputs
        self.outputs = zeros(1) if outputs is None else outputs
        self.prior = each

    def _leaves(self) -> list[tuple[Array, Array, Array]]:
        """m as a matrix, Ã and G̃, leaf by leaf."""
        trees = (self.mean, self.inputs, self.outputs, self.prior)
        parts = zip(*(jax.tree.leaves(tree) for tree in trees), strict=True)
        return [(m.reshape(_sides(m)), *_damped(a, g, d)) for m, a, g, d in parts]

    def _mapped(self, function: Any, *trees: PyTree) -> PyTree:
        """function(Ã, G̃, *matrices) for each leaf, as a leaf; the trees may have a leading axis in front."""
        leaves, treedef = jax.tree.flatten(self.mean)
        rest = [jax.tree.leaves(tree) for tree in trees]
        made = []
        for i, ((m, a, g), leaf) in enumerate(zip(self._leaves(), leaves, strict=True)):
            matrices = [tree[i].reshape((*tree[i].shape[: tree[i].ndim - leaf.ndim], *m.shape)) for tree in rest]
            out = function(a, g, *matrices)
            made.append(out.reshape((*out.shape[:-2], *leaf.shape)))
        return jax.tree.unflatten(treedef, made)

    @property
    def precision(self) -> Float[Array, "P P"]:
        """S, as a dense matrix over the ravelled θ."""
        return linalg.block_diag(*(jnp.kron(a, g) for _, a, g in self._leaves()))

    def transformed(self, noise: Float[Array, "... P"]) -> PyTree:
        def leaf(a: Array, g: Array, e: Array) -> Array:
            left, right = jnp.linalg.cholesky(a), jnp.linalg.cholesky(g)
            half = _left_solve(left, e, transposed=True)
            return jnp.swapaxes(_left_solve(right, jnp.swapaxes(half, -1, -2), transposed=True), -1, -2)

        lead = noise.ndim - 1
        deviation = self._mapped(leaf, unravel(noise, self.mean))
        return jax.tree.map(lambda m, e: m.reshape((1,) * lead + m.shape) + e.astype(m.dtype), self.mean, deviation)

    def times(self, theta: PyTree) -> PyTree:
        return self._mapped(lambda a, g, t: a @ t @ g, theta)

    def solve(self, theta: PyTree) -> PyTree:
        def leaf(a: Array, g: Array, t: Array) -> Array:
            left, right = jnp.linalg.cholesky(a), jnp.linalg.cholesky(g)
            half = _left_solve(left, _left_solve(left, t), transposed=True)
            return jnp.swapaxes(
                _left_solve(right, _left_solve(right, jnp.swapaxes(half, -1, -2)), transposed=True), -1, -2
            )

        return self._mapped(leaf, theta)

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        deviation = jax.tree.map(jnp.subtract, theta, self.mean)
        mine = jax.tree.leaves(self.mean)
        lead = jax.tree.leaves(deviation)[0].ndim - mine[0].ndim
        squares = jnp.sum(ravel(deviation, lead) * ravel(self.times(deviation), lead), axis=-1)
        return 0.5 * (self._log_det() - self.noise_size * math.log(2 * math.pi) - squares)

    def _log_det(self) -> Float[Array, ""]:
        half = lambda x: jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(x))))
        return 2 * sum((m.shape[1] * half(a) + m.shape[0] * half(g) for m, a, g in self._leaves()), start=jnp.zeros(()))

    def entropy(self) -> Float[Array, ""]:
        return 0.5 * (self.noise_size * (1 + math.log(2 * math.pi)) - self._log_det())

    def inside(self) -> Bool[Array, ""]:
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(self)]
        positive = [jnp.all(jnp.isfinite(jnp.linalg.cholesky(x))) for _, a, g in self._leaves() for x in (a, g)]
        return jnp.all(jnp.stack(finite + positive))

    def trace(self, curvature: KroneckerFactors) -> Float[Array, ""]:
        trees = (curvature.inputs, curvature.outputs, curvature.diagonal)
        total = jnp.zeros(())
        for (_, a, g), *part in zip(self._leaves(), *map(jax.tree.leaves, trees), strict=True):
            left, right = jnp.linalg.inv(a), jnp.linalg.inv(g)
            total += jnp.sum(left * part[0]) * jnp.sum(right * part[1]) + part[2] * jnp.trace(left) * jnp.trace(right)
        return total

    def variance(self) -> PyTree:
        diagonal = lambda x: jnp.diagonal(jnp.linalg.inv(x))
        return self._mapped(lambda a, g: diagonal(a)[:, None] * diagonal(g)[None, :])

    def covariance(self) -> Float[Array, "P P"]:
        return linalg.block_diag(*(jnp.kron(jnp.linalg.inv(a), jnp.linalg.inv(g)) for _, a, g in self._leaves()))

    def output_covariance(self, jacobian: PyTree) -> Float[Array, "B K K"]:
        return jnp.einsum("bkp,blp->bkl", ravel(self.solve(jacobian), 2), ravel(jacobian, 2))

    def prior_curvature(self, structure: Structure, like: PyTree) -> Any:
        return structure.of_matrix(self.precision, like)

    def prior_trace(self, other: GaussianFamily) -> Float[Array, ""]:
        return jnp.sum(self.precision * other.covariance())

    def moved(self, step: Step) -> Self:
        share, rate = step.precision_rate * step.temperature, step.precision_rate

        def mixed(old: PyTree, new: PyTree, weight: Any) -> PyTree:
            cast = lambda x, like: jnp.asarray(x, like.dtype)
            return jax.tree.map(lambda o, n: cast(1 - share, o) * o + cast(weight, o) * n.astype(o.dtype), old, new)

        measured: KroneckerFactors = step.curvature
        factors = (
            mixed(self.inputs, measured.inputs, share),
            mixed(self.outputs, measured.outputs, rate),
            mixed(self.prior, measured.diagonal, rate),
        )
        new = eqx.tree_at(lambda q: (q.inputs, q.outputs, q.prior), self, factors)
        push = new.solve(step.gradient)
        mean = jax.tree.map(lambda m, p: (m - jnp.asarray(step.rate, p.dtype) * p).astype(m.dtype), self.mean, push)
        return eqx.tree_at(lambda q: q.mean, new, mean)

    def with_scaled_precision(self, factor: Any) -> Self:
        scaled = lambda tree: jax.tree.map(lambda x: jnp.asarray(factor, x.dtype) * x, tree)
        return eqx.tree_at(lambda q: (q.outputs, q.prior), self, (scaled(self.outputs), scaled(self.prior)))

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½ gᵀS⁻¹g, the mean's part (the precision moves by projection)."""
        return 0.5 * jnp.sum(ravel(step.gradient) * ravel(self.solve(step.gradient)))


def _sides(leaf: Array) -> tuple[int, int]:
    """The leaf as inputs by outputs."""
    return (math.prod(leaf.shape[:-1]), leaf.shape[-1]) if leaf.ndim > 1 else (1, leaf.size)


def _damped(inputs: Array, outputs: Array, prior: Array) -> tuple[Array, Array]:
    """Ã and G̃: the prior's precision shared out between the factors in the proportion of their sizes."""
    if inputs.shape == (1, 1):  # A is a number, and the product A ⊗ G + δI is exact
        scale = jnp.where(inputs > 0, inputs, 1.0)
        return scale, outputs + prior / scale * jnp.eye(outputs.shape[0], dtype=outputs.dtype)
    left, right = jnp.trace(inputs) / inputs.shape[0], jnp.trace(outputs) / outputs.shape[0]
    measured = (left > 0) & (right > 0)
    ratio = jnp.sqrt(jnp.where(measured, left, 1.0) / jnp.where(measured, right, 1.0))
    root = jnp.sqrt(prior)
    eye = lambda x: jnp.eye(x.shape[0], dtype=x.dtype)
    return inputs + ratio * root * eye(inputs), outputs + root / ratio * eye(outputs)


def _left_solve(factor: Array, matrix: Array, *, transposed: bool = False) -> Array:
    """L⁻¹X or L⁻ᵀX, over any leading axes of X."""
    rows, across = matrix.shape[-2:]
    columns = jnp.moveaxis(matrix.reshape((-1, rows, across)), 0, -1).reshape(rows, -1)
    solved = linalg.solve_triangular(factor, columns, lower=True, trans=1 if transposed else 0)
    return jnp.moveaxis(solved.reshape(rows, across, -1), -1, 0).reshape(matrix.shape)
