"""Data in parts: the steps, the bound and the verdict are those of the same data in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PyTree

import bayesrule as blr
from bayesrule.fitting import parts_driver
from bayesrule.fitting.parts import Parts, StreamParts, count_part, pad_part
from bayesrule.models.mixture import gaussian_mixture
from bayesrule.models.topics import documents, latent_dirichlet
from bayesrule.numerics.programs import release_programs
from bayesrule.objectives.batches import Weighted

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(90, 3)) + np.array([0.0, 2.0, -1.0])
Y = (RANDOM.uniform(size=90) < 1 / (1 + np.exp(-X @ np.array([1.0, -0.5, 0.3])))).astype(float)


class Pieces(Parts):
    """Parts of any sizes, empty ones too."""

    def __init__(self, data: PyTree, *cuts: int):
        self.data, self.edges = data, cuts
        self.rows = len(jax.tree.leaves(data)[0])
        self.count = count_part(data)

    def head(self, count: int) -> PyTree:
        return jax.tree.map(lambda x: x[:count], self.data.examples if isinstance(self.data, Weighted) else self.data)

    def pieces(self) -> Iterator[PyTree]:
        edges = [0, *self.edges, self.rows]
        for first, last in pairwise(edges):
            if last > first:
                cut = jax.tree.map(lambda x, first=first, last=last: x[first:last], self._bare)
                yield cut if not isinstance(self.data, Weighted) else Weighted(*cut, np.sum(cut[1]))

    @property
    def _bare(self) -> PyTree:
        return (self.data.examples, self.data.weights) if isinstance(self.data, Weighted) else self.data

    def carry(self, function, kept, *arguments) -> tuple[PyTree, list]:
        pieces = list(self.pieces())
        both = [
            function(piece, own, *arguments) for piece, own in zip(pieces, kept or [None] * len(pieces), strict=True)
        ]
        total = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *(one for one, _ in both))
        return total, [own for _, own in both]

    def total(self, function, *arguments) -> PyTree:
        every = [function(piece, *arguments) for piece in self.pieces()]
        return jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *every)


def logistic(size: float, regularizer: float = 1.0) -> blr.Objective:
    loss = lambda f, y: jnp.logaddexp(0.0, f) - y * f
    return blr.Objective(loss, output=lambda w, x: x @ w, linear=True, size=size, regularizer=regularizer)


def largest_difference(one: PyTree, other: PyTree) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.max(np.abs(a - b) / (1 + np.abs(np.asarray(b))))) for a, b in pairs)


RULES = {
    "newton": blr.newton(),
    "quadrature": blr.newton(rate=0.5).replace(points=blr.Quadrature(7)),
    "random points": blr.von(0.3),
    "diagonal": blr.oggn(0.5),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", RULES)
def test_steps_are_those_of_one_piece(name: str) -> None:
    rule, objective = RULES[name], logistic(len(X))
    options = {"steps": 12, "tolerance": 1e-10, "key": jax.random.key(1)}
    whole = blr.fit(rule, objective, jnp.zeros(3), (X, Y), **options)
    parts = blr.fit(rule, objective, jnp.zeros(3), Pieces((X, Y), 7, 7, 60), **options)
    assert parts.reason == whole.reason
    assert largest_difference(parts.state, whole.state) < 1e-11
    for quantity in ("objective", "bound", "decrement"):
        np.testing.assert_allclose(parts.trace[quantity], whole.trace[quantity], rtol=1e-9, atol=1e-9)
    if name != "random points":
        assert parts.bound == pytest.approx(whole.bound, abs=1e-9)
    else:
        assert abs(parts.bound - whole.bound) < 5 * parts.bound_error


@pytest.mark.extended
def test_line_search_is_that_of_one_piece() -> None:
    """From far away full Newton steps overshoot, and are halved until the loss does not worsen."""
    loss = lambda w, e: jnp.sum(jnp.log(jnp.cosh(w - e)))
    objective, start = blr.Objective(loss, size=20, regularizer=1e-3), jnp.full(2, 4.0)
    data = RANDOM.normal(size=(20, 2))
    rule = blr.newton().replace(guard=blr.Backtracking(monotone=True))
    whole = blr.fit(rule, objective, start, data, steps=20, tolerance=1e-10)
    parts = blr.fit(rule, objective, start, Pieces(data, 1, 11), steps=20, tolerance=1e-10)
    assert np.min(whole.trace["fraction"]) < 1
    np.testing.assert_array_equal(parts.trace["fraction"], whole.trace["fraction"])
    assert largest_difference(parts.q, whole.q) < 1e-11


def test_weights_and_padding() -> None:
    weights = RANDOM.uniform(0.5, 2.0, len(X))
    data = Weighted((X, Y), weights, np.sum(weights))
    whole = blr.fit(blr.newton(), logistic(np.sum(weights)), jnp.zeros(3), data, steps=20, tolerance=1e-10)
    parts = blr.fit(blr.newton(), logistic(np.sum(weights)), jnp.zeros(3), Pieces(data, 5), steps=20, tolerance=1e-10)
    assert largest_difference(parts.q, whole.q) < 1e-12
    padded = pad_part((X[:5], Y[:5]), 8)
    assert padded.weights.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert float(padded.count) == 5
    whole = blr.fit(blr.newton(), logistic(90), jnp.zeros(3), (X, Y), steps=20, tolerance=1e-10)
    blocks = StreamParts(blr.stream((X, Y)), 40)
    streamed = blr.fit(blr.newton(), logistic(90), jnp.zeros(3), blocks, steps=20, tolerance=1e-10)
    assert largest_difference(streamed.q, whole.q) < 1e-12


MIXED = np.concatenate([RANDOM.normal(size=(40, 2)), RANDOM.normal(size=(50, 2)) + 3.0])


@pytest.mark.sampled("em")
@pytest.mark.parametrize(
    ("rule", "priors"),
    [(blr.em(order="parallel"), "flat"), (blr.vmp(order="parallel"), "default"), (blr.vmp(), "default")],
    ids=["em", "parallel", "in turn"],
)
def test_mixture(rule: blr.Rule, priors: str) -> None:
    model = gaussian_mixture(MIXED, 2, priors=priors)
    whole = blr.fit(rule, model, None, {"y": MIXED}, steps=8)
    parts = blr.fit(rule, model, None, Pieces({"y": MIXED}, 33, 34), steps=8)
    assert largest_difference(parts.q, whole.q) < 1e-11
    np.testing.assert_allclose(parts.trace["bound"], whole.trace["bound"], rtol=1e-11)
    assert parts.bound == pytest.approx(whole.bound, rel=1e-11)


@pytest.mark.extended
def test_topics_are_those_of_one_piece_where_documents_converge() -> None:
    rows, model = documents(RANDOM.poisson(1.0, size=(14, 6))), latent_dirichlet(6, 2, key=jax.random.key(0))
    rule = blr.svi(1.0, local_steps=3000, tolerance=1e-13)
    whole = blr.fit(rule, model, None, rows, steps=4)
    parts = blr.fit(rule, model, None, Pieces(rows, 5), steps=4)
    assert set(parts.q.blocks) == {"topics"}
    assert largest_difference(parts.q["topics"], whole.q["topics"]) < 1e-9


@pytest.mark.extended
def test_sites_stay_with_their_parts() -> None:
    """λ is the prior's message plus the sum of the rows' sites, and these are what sites in one piece are."""
    start, prior = blr.Gaussian(jnp.zeros(3), jnp.eye(3)), blr.Gaussian(jnp.zeros(3), 2.0 * jnp.eye(3))
    factors = {"prior": blr.factors.prior("w", prior), "y": blr.factors.bernoulli_logit("y", {"w": "x"})}
    model, data = blr.Model({"w": start}, factors), {"x": X, "y": Y}
    rule = blr.cvi(0.7, sites=True)
    whole = blr.fit(rule, model, None, data, steps=6)
    parts = blr.fit(rule, model, None, Pieces(data, 20, 50), steps=6)
    assert largest_difference(parts.q, whole.q) < 1e-11
    assert largest_difference(parts.site_total(), whole.site_total()) < 1e-11
    end = blr.fit(rule, model, parts.q, Pieces(data, 20, 50), steps=60, tolerance=1e-12)
    assert end.reason == "converged"
    from_sites = jax.tree.map(jnp.add, end.site_total()["w"], prior.natural())
    assert largest_difference(from_sites, end.q["w"].natural()) < 1e-6
    with pytest.raises(ValueError, match="keeps no sites"):
        blr.fit(blr.newton(), logistic(90), jnp.zeros(3), (X, Y), steps=1).site_total()


@pytest.mark.extended
def test_conjugate_model_takes_one_pass() -> None:
    coin = blr.Objective(lambda mu, y: -(y * mu[0] + (1 - y) * mu[1]), size=90, prior=blr.Beta(1.0, 1.0))
    pieces = Pieces(Y, 30)
    result = blr.fit(blr.conjugate(), coin, blr.Beta(5.0, 5.0), pieces, steps=1)
    assert float(result.q.a) == pytest.approx(1 + Y.sum(), rel=1e-14)


def test_interrupted_and_resumed_is_the_same(tmp_path) -> None:
    objective, pieces = logistic(90), Pieces((X, Y), 20)
    rule = blr.newton(rate=0.3)
    whole = blr.fit(rule, objective, jnp.zeros(3), pieces, steps=9)
    blr.fit(rule, objective, jnp.zeros(3), pieces, steps=4, checkpoint=tmp_path / "part.npz")
    resumed = blr.fit(rule, objective, blr.load(tmp_path / "part.npz"), pieces, steps=5)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (resumed.q, whole.q)), strict=True))


def test_later_steps_and_fits_compile_nothing() -> None:
    pieces, objective = StreamParts(blr.stream((X, Y)), 40), logistic(90)
    count = lambda: (parts_driver._measure_part.count(), parts_driver._attempt.count(), parts_driver._record.count())
    release_programs()
    blr.fit(blr.newton(), objective, jnp.zeros(3), pieces, steps=1)
    first = count()
    blr.fit(blr.newton(), objective, jnp.ones(3), pieces, steps=6)
    # The trace has another length, and the state's count and code are now arrays of the device.
    assert count()[:2] == first[:2]
    assert count()[2] <= first[2] + 2


def test_what_cannot_be_summed_is_refused() -> None:
    pieces = Pieces((X, Y), 20)
    with pytest.raises(ValueError, match="squares the gradient"):
        blr.fit(blr.adam(1e-3), logistic(90), jnp.zeros(3), pieces, steps=1)
    with pytest.raises(ValueError, match="remove batch_size"):
        blr.fit(blr.newton(), logistic(90), jnp.zeros(3), pieces, steps=1, batch_size=10)
    model = latent_dirichlet(6, 2, key=jax.random.key(0))
    with pytest.raises(ValueError, match="local_steps"):
        blr.fit(blr.vmp(), model, None, Pieces(documents(RANDOM.poisson(1.0, size=(14, 6))), 5), steps=1)
