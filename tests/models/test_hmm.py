"""Hidden Markov models: missing steps, ragged sequences, VMP and SVI, any likelihood, starts, and bad input."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import bayesrule as blr
from bayesrule import factors
from bayesrule.factor_graph import expected_log
from bayesrule.models import hmm

# Optional: the dev extra installs it.
PoissonHMM = pytest.importorskip("hmmlearn.hmm").PoissonHMM

EM, VMP = blr.em(order="parallel"), blr.vmp(order="parallel")


def series(count=6, steps=30, seed=0):
    """Sequences of two states that mostly stay, (N, T, 2) around −1 and 2, and their paths."""
    random = np.random.default_rng(seed)
    path = (np.cumsum(random.random((count, steps)) < 0.15, axis=1) + random.integers(0, 2, (count, 1))) % 2
    return np.array([-1.0, 2.0])[path][..., None] + random.normal(size=(count, steps, 2)), path


def same(one, other, **tolerance):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert_allclose(a, b, **tolerance)


def fitted(rule, model, y, steps=4, **how):
    return blr.fit(rule, model, None, {"y": y}, steps=steps, **how)


MODELS = {
    "full": lambda y, **how: hmm.gaussian_hmm(y, 2, **how),
    "diag": lambda y, **how: hmm.gaussian_hmm(y, 2, covariance="diag", **how),
    "poisson": lambda y, **how: hmm.poisson_hmm(y, 2, **how),
    "categorical": lambda y, **how: hmm.categorical_hmm(y, 2, **how),
}


def observed(kind):
    y, path = series()
    if kind == "poisson":
        return jnp.asarray(np.random.default_rng(1).poisson(np.array([1.0, 5.0])[path])[..., None], float)
    if kind == "categorical":
        return jnp.asarray(np.digitize(y[..., 0], [-1, 0.5, 2]), float)
    return jnp.asarray(y)


@pytest.mark.extended
@pytest.mark.parametrize("kind", MODELS)
def test_the_bound_never_falls(kind):
    y = observed(kind).at[1, 17:].set(jnp.nan).at[2, 5:9].set(jnp.nan).at[3, :2].set(jnp.nan)
    model = MODELS[kind](y, priors="default")
    assert fitted(VMP, model, y, 10, check=True).reason == "steps"


@pytest.mark.extended
def test_what_was_not_observed_does_not_count():
    """Filling at the end, as NaN, more of it, as a mask or as lengths, is as if it was not there.

    The rows of exp E log A add up to less than 1, so that a step too many would show.
    """
    y, lengths = observed("poisson"), jnp.array([30, 12, 1, 25, 30, 7])
    there = (jnp.arange(30) < lengths[:, None])[..., None]
    model = hmm.poisson_hmm(y, 2, priors="default")
    state, step = VMP.init(None, model), jax.jit(VMP.step)
    taken = lambda rows: step(model, state, {"y": rows})
    shorter = hmm.sequences([row[:length] for row, length in zip(np.asarray(y), lengths.tolist(), strict=True)])
    first, info = taken(shorter)
    nothing = jnp.full((7, 40, 1), jnp.nan).at[:6, :30].set(shorter)  # and a row of which nothing is known
    for rows in (nothing, blr.Masked(y, there), blr.Ragged(y, lengths)):
        other, again = taken(rows)
        same(first.q, other.q, rtol=1e-11)
        assert_allclose(info.objective, again.objective, rtol=1e-11)


@pytest.mark.extended
def test_sequences_are_apart():
    y = observed("poisson")[:2]
    model = hmm.poisson_hmm(y, 2)
    result = fitted(EM, model, y)
    apart = [hmm.log_likelihood(*hmm.hidden(model, result.q, part[None]))[0] for part in y]
    assert_allclose(result.bound, np.sum(apart), rtol=1e-10)


@pytest.mark.extended
def test_a_missing_entry_is_integrated_out():
    """With independent entries each is missing by itself."""
    y = observed("diag").at[0, 3, 1].set(jnp.nan).at[0, 5].set(jnp.nan)
    model = hmm.gaussian_hmm(y, 2, covariance="diag")
    q = fitted(EM, model, y).q
    mean, precision = (q["states"].mean[name][:, 0] for name in ("mean", "precision"))
    expected = 0.5 * (jnp.log(precision / (2 * jnp.pi)) - precision * (y[0, 3, 0] - mean) ** 2)
    actual = hmm.hidden(model, q, y).log_likelihoods[0]
    assert_allclose(actual[3], expected, rtol=1e-12)
    assert_array_equal(actual[5], 0)


def with_holes():
    """Six sequences of correlated steps, a fifth of whose entries are missing; one step is missing as a whole."""
    y, random = np.array(series()[0]), np.random.default_rng(2)
    y[..., 1] += 0.8 * y[..., 0]
    y = np.where(random.random(y.shape) < 0.2, np.nan, y)
    y[0, 5] = np.nan
    return jnp.asarray(y)


def densities_of_observed(y, means, covariances):
    """log N(observed entries | state) of every step, by SciPy, (N, T, K); 0 if there is none."""
    table = np.zeros((*y.shape[:2], len(means)))
    for place in np.ndindex(table.shape):
        row, k = np.asarray(y)[place[:2]], place[2]
        seen = ~np.isnan(row)
        if seen.any():
            table[place] = multivariate_normal(means[k][seen], covariances[k][np.ix_(seen, seen)]).logpdf(row[seen])
    return table


def log_likelihood_by_enumeration(initial, transitions, densities):
    """log Σ_z p(z) Π_t p(y_t | z_t), over all paths, of a short sequence (T, K)."""
    total, steps = 0.0, range(len(densities))
    for z in itertools.product(range(densities.shape[1]), repeat=len(densities)):
        chain = initial[z[0]] * np.prod([transitions[a, b] for a, b in itertools.pairwise(z)])
        total += chain * np.exp(densities[steps, z].sum())
    return np.log(total)


@pytest.mark.extended
def test_entries_missing_from_a_full_covariance():
    """EM ends where the likelihood of what was observed, computed by SciPy, has no slope, and never falls before."""
    y = with_holes()
    model = hmm.gaussian_hmm(y, 2)
    result = fitted(EM, model, y, 300, tolerance=1e-13, check=True)
    assert result.reason == "converged"
    means, precisions = (np.asarray(result.q["states"].mean[name]) for name in ("mean", "precision"))
    covariances, hidden = np.linalg.inv(precisions), hmm.hidden(model, result.q, y)
    table = densities_of_observed(y, means, covariances)
    assert_allclose(hidden.log_likelihoods, table, atol=1e-10)
    first = log_likelihood_by_enumeration(hidden.initial, hidden.transitions, table[0, :4])
    assert_allclose(hmm.log_likelihood(*hidden._replace(log_likelihoods=table[0, :4])), first, rtol=1e-10)
    assert_allclose(result.bound, jnp.sum(hmm.log_likelihood(*hidden._replace(log_likelihoods=table))), rtol=1e-10)

    def likelihood(means, covariances):
        table = densities_of_observed(y, means, covariances)
        return float(jnp.sum(hmm.log_likelihood(*hidden._replace(log_likelihoods=table))))

    small = 1e-4
    for k, direction in itertools.product(range(2), np.random.default_rng(0).normal(size=(2, 2))):
        shift, change = np.zeros((2, 2)), np.zeros((2, 2, 2))
        shift[k], change[k] = small * direction, small * np.outer(direction, direction)
        slope = likelihood(means + shift, covariances + change) - likelihood(means - shift, covariances - change)
        assert abs(slope / (2 * small)) < 1e-3


@pytest.mark.extended
def test_entries_missing_from_a_full_covariance_with_priors():
    """The bound never falls, and NaN is the same as a mask."""
    y = with_holes()
    model = hmm.gaussian_hmm(y, 2, priors="default")
    result = fitted(VMP, model, y, 100, tolerance=1e-8, check=True)
    assert result.reason == "converged"
    masked = blr.Masked(jnp.nan_to_num(y), ~jnp.isnan(y))
    assert_allclose(fitted(VMP, model, masked, 100, tolerance=1e-8).bound, result.bound, rtol=1e-10)
    # A loop of one's own takes the model and the data that for_data gives; otherwise the value is NaN, not wrong.
    q, value = model.starting_point(None), jax.jit(lambda model, q, data: model.contributions(q, data)["factors"]["y"])
    assert np.isnan(value(model, q, {"y": y}))
    adapted, data = model.for_data({"y": y})
    assert np.isfinite(value(adapted, q, data))


@pytest.mark.extended
def test_the_integral_over_missing_entries():
    """log ∫ exp E log N(y | x, Λ) dy over the missing entries, by quadrature."""
    states = blr.NormalWishart(
        jnp.array([[0.3, -0.2, 1.0], [1.0, 0.0, 0.5]]),
        jnp.array([2.0, 3.0]),
        jnp.array([5.0, 7.0]),
        0.2 * jnp.array([[[1.0, 0.4, 0.1], [0.4, 2.0, 0.3], [0.1, 0.3, 1.5]]] * 2),
    )
    mu, patterns = states.expectation(), np.array([[True, True, True], [True, False, True], [False, True, False]])
    y = np.array([[0.1, 0.7, -0.4], [0.5, 9.0, 1.2], [9.0, -0.3, 9.0], [0.2, 9.0, 0.1]])
    index, grid = np.array([0, 1, 2, 1]), np.linspace(-20, 20, 401)
    actual = expected_log.multivariate_joint_of_observed(patterns, mu, index, expected_log.row_products(jnp.asarray(y)))
    for row, pattern, values in zip(y, patterns[index], actual, strict=True):
        free = np.flatnonzero(~pattern)
        points = np.array([*itertools.product(grid, repeat=len(free))]).reshape(len(grid) ** len(free), len(free))
        filled = np.broadcast_to(row, (len(points), 3)).copy()
        filled[:, free] = points
        terms = np.asarray(expected_log.multivariate_joint(mu, expected_log.row_products(jnp.asarray(filled))))
        assert_allclose(values, logsumexp(terms, axis=0) + len(free) * np.log(grid[1] - grid[0]), rtol=1e-8)


@pytest.mark.extended
def test_rows_that_are_missing_in_part_are_taken_in_chunks(monkeypatch):
    """In chunks, the last of them shorter, the value and its derivatives are those of all rows at once."""
    random = np.random.default_rng(0)
    patterns, index = random.random((4, 3)) < 0.7, random.integers(0, 4, size=50)
    products = expected_log.row_products(jnp.asarray(random.normal(size=(50, 3))))
    ones = jnp.ones(2)
    mu = blr.NormalWishart(jnp.asarray(random.normal(size=(2, 3))), ones, 5 * ones, jnp.array([jnp.eye(3)] * 2))

    def total(mu):
        values = expected_log.multivariate_joint_of_observed(patterns, mu, index, products)
        return jnp.sum(jnp.sin(values)), values

    whole = jax.jit(jax.value_and_grad(lambda mu: total(mu), has_aux=True))(mu.expectation())
    monkeypatch.setattr(expected_log, "_GATHERED", 2 * 10 * 8)  # numbers of eight rows
    parts = jax.jit(jax.value_and_grad(lambda mu: total(mu), has_aux=True))(mu.expectation())
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_rows_that_are_missing_in_part_need_little_memory():
    """Weights for each of 200,000 rows with 8 components of 20 entries would be 3 GB; nothing is computed here."""
    rows, components, size = 200_000, 8, 20
    patterns = np.eye(size, dtype=bool)
    array = lambda *shape, dtype=float: jax.ShapeDtypeStruct(shape, dtype)
    mu = array(components), array(components, size, size), array(components, size), array(components)
    products = array(rows, 1 + size + size * (size + 1) // 2)

    def total(mu, index, products):
        values = expected_log.multivariate_joint_of_observed(patterns, mu, index, products)
        return jnp.sum(jax.nn.logsumexp(values, axis=-1))

    program = jax.jit(jax.grad(total)).lower(mu, array(rows, dtype=int), products).compile()
    assert program.memory_analysis().temp_size_in_bytes < 1e8


def test_emissions_by_the_delta_method_are_no_maximum_of_the_bound():
    """A factor of a sequence or a mixture has the points of its components, and no guard judges steps by the bound."""
    rate = lambda f, y: y * f - jnp.exp(f)
    by_points = lambda points: blr.Factor(rate, "states", data="y", points=points)
    y, blocks = np.ones((2, 5)), {"states": blr.DiagonalGaussian(jnp.zeros(2), jnp.ones(2))}
    uniform = np.full(2, 0.5), np.full((2, 2), 0.5)
    for points, judges in ((blr.Delta(), False), (blr.Quadrature(8), True), (blr.MonteCarlo(8), False)):
        chain, choice = factors.hidden_markov(*uniform, by_points(points)), factors.mixture("w", by_points(points))
        assert chain.second_order == choice.second_order == points.delta
        assert chain.random == choice.random == points.random
        assert blr.Model(blocks, {"y": chain}).judges_steps({"y": y}) == judges


@pytest.mark.extended
def test_the_bound_has_the_best_states_of_all():
    """log Σ_z exp E log p(y, z | …), over all paths."""
    y = observed("poisson")[:2, :4]
    model = hmm.poisson_hmm(y, 2, priors="default")
    q = model.starting_point(None)
    initial, transitions = (np.asarray(q[name].expectation()) for name in ("initial", "transitions"))
    log, linear = (np.asarray(part)[:, 0] for part in q["states"].expectation())
    likelihoods = np.asarray(factors.poisson("y", rate="r").function((log, linear), y))
    total = 0.0
    for row in likelihoods:
        logs = [
            initial[z[0]] + sum(transitions[a, b] for a, b in itertools.pairwise(z)) + sum(row[range(4), z])
            for z in itertools.product(range(2), repeat=4)
        ]
        total += np.logaddexp.reduce(logs)
    value = jax.jit(lambda q: model.contributions(q, {"y": y})["factors"]["y"])(q)
    assert_allclose(value, total, rtol=1e-10)


@pytest.mark.extended
def test_svi_is_vmp_with_whole_steps_and_comes_close_in_batches():
    y = observed("poisson")
    model = hmm.poisson_hmm(y, 2, priors="default").with_size(6)
    step, bound = jax.jit(lambda rule, state, rows: rule.step(model, state, rows)[0]), jax.jit(VMP.bound)
    rule = blr.svi(lambda t: (t + 2.0) ** -0.7, order="parallel")
    whole, best = blr.svi(1.0, order="parallel"), VMP.init(None, model)
    same(step(whole, whole.init(None, model), {"y": y}).q, step(VMP, best, {"y": y}).q, rtol=1e-12)
    for _ in range(30):
        best = step(VMP, best, {"y": y})
    batches = blr.fit(rule, model, None, {"y": y}, steps=60, batch_size=2, key=jax.random.key(0))
    highest = bound(model, best.q, {"y": y})
    assert highest - 2 < bound(model, batches.q, {"y": y}) <= highest + 1e-6


@pytest.mark.extended
def test_any_log_likelihood_by_newton_s_m_step():
    """Student-t emissions: EM with `Delta()` points ends where the marginal likelihood's gradient is 0."""
    y = observed("full")[..., 0]

    def log_student(center, y):
        return -2.5 * jnp.log1p((y - center) ** 2 / 4)

    start = blr.Gaussian(jnp.array([[-0.5], [1.0]]), jnp.ones((2, 1, 1)))
    components = blr.Factor(log_student, "center", data="y", points=blr.Delta())
    model = hmm.hmm_of(components, {"center": start})
    rule = EM.replace(guard=blr.Backtracking(monotone=True))
    result = blr.fit(rule, model, None, {"y": y}, steps=300, tolerance=1e-12, check=True)
    chain = result.q["initial"].mean, result.q["transitions"].mean

    def total(center):
        return jnp.sum(hmm.log_likelihood(*chain, -2.5 * jnp.log1p((y[..., None] - center) ** 2 / 4)))

    value, slope = jax.value_and_grad(total)(result.q["center"].mean[:, 0])
    assert_allclose(slope, 0, atol=1e-3)
    assert_allclose(value, result.bound, rtol=1e-10)


@pytest.mark.extended
def test_a_known_chain_stays():
    y = observed("poisson")[..., 0]
    known = jnp.array([1.0, 0.0]), jnp.array([[0.5, 0.5], [0.0, 1.0]])  # one way only
    components = factors.poisson("y", rate="rate")
    model = blr.Model({"rate": blr.Gamma(jnp.array([3.0, 4.0]), 1.0)}, {"y": factors.hidden_markov(*known, components)})
    result = fitted(EM, model, y, check=True)
    actual = hmm.hidden(model, result.q, y)
    assert_array_equal(actual.transitions, known[1])
    assert np.all(np.diff(hmm.viterbi(*actual)[0], axis=1) >= 0)
    assert_allclose(jnp.sum(hmm.log_likelihood(*actual)), result.bound, rtol=1e-10)


@pytest.mark.extended
def test_a_rate_of_zero_is_hmmlearn_s():
    y = np.array([0.0, 0, 0, 4, 5, 3, 0, 0, 6, 0])
    theirs = PoissonHMM(2, init_params="")
    theirs.startprob_, theirs.transmat_, theirs.lambdas_ = (
        [0.5, 0.5],
        [[0.7, 0.3], [0.4, 0.6]],
        np.array([[0.0], [4.0]]),
    )
    start = blr.Gamma(jnp.array([[1.0], [5.0]]), 1.0)  # λ/rate: 0 and 4
    model = hmm.hmm_of(
        factors.poisson("y", rate="r"), {"r": start}, initial=theirs.startprob_, transitions=theirs.transmat_
    )
    rows = hmm.sequences(y)
    result = blr.fit(EM, model, None, {"y": rows}, steps=200, tolerance=1e-10, check=True)
    assert result.reason == "converged"
    assert_allclose(result.trace["bound"][0], theirs.score(y[:, None].astype(int)), rtol=1e-10)
    assert float(result.q["r"].mean[0, 0]) == 0


@pytest.mark.extended
def test_past_the_end_smoothing_is_a_forecast():
    y = observed("full")
    model = hmm.gaussian_hmm(y, 2)
    q = fitted(EM, model, y).q
    ahead = hmm.forecast(*hmm.hidden(model, q, y), 5)
    longer = jnp.concatenate([y, jnp.full((6, 5, 2), jnp.nan)], axis=1)
    assert_allclose(ahead, hmm.smooth(*hmm.hidden(model, q, longer))[:, -5:], atol=1e-10)
    assert_allclose(ahead, hmm.filter(*hmm.hidden(model, q, longer))[:, -5:], atol=1e-10)
    with pytest.raises(ValueError, match="how far to look ahead"):
        hmm.forecast(*hmm.hidden(model, q, y), 0)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["full", "diag", "poisson"])
def test_the_default_start_finds_the_states(kind):
    y, path = observed(kind), series()[1]
    model = MODELS[kind](y, key=jax.random.key(3))
    same(model.blocks, MODELS[kind](y, key=jax.random.key(3)).blocks, rtol=0)
    result = fitted(EM, model, y, 20, check=True)
    states = np.asarray(hmm.viterbi(*hmm.hidden(model, result.q, y))[0])
    agreement = np.mean(states == path)
    assert max(agreement, 1 - agreement) > 0.9


@pytest.mark.extended
def test_one_observation():
    model = hmm.poisson_hmm(jnp.array([3.0]), 1)
    result = fitted(EM, model, hmm.sequences(jnp.array([3.0])), 3, check=True)
    assert_allclose(result.q["states"].mean, 3.0, rtol=1e-10)
    assert_allclose(result.bound, 3 * np.log(3) - 3 - np.log(6), rtol=1e-10)
    two = hmm.hmm_of(factors.poisson("y", rate="r"), {"r": blr.Gamma(jnp.array([2.0, 5.0]), 1.0)})
    result = fitted(EM, two, jnp.array([[3.0]]), 30, check=True)
    assert_allclose(result.bound, 3 * np.log(3) - 3 - np.log(6), atol=1e-3)
    assert_allclose(result.q["transitions"].mean, 0.5)  # nothing was seen of them


def test_series_as_rows():
    assert hmm.sequences(np.zeros(5)).shape == (1, 5, 1)
    assert hmm.sequences(np.zeros((5, 2))).shape == (1, 5, 2)
    assert hmm.sequences(np.zeros((3, 5, 2))).shape == (3, 5, 2)
    assert hmm.sequences([np.zeros((5, 2)), np.ones((3, 2))]).shape == (2, 5, 2)
    assert hmm.sequences([0, 1, 2], scalar=True).shape == (1, 3)
    assert hmm.sequences(np.zeros((2, 3), int), scalar=True).dtype == jnp.result_type(float)


GOOD = np.arange(10.0)
BAD = {
    "shape": (lambda: hmm.sequences(np.zeros((2, 3, 4, 5))), r"Series are \(T,\), \(T, D\) or \(N, T, D\)"),
    "no steps": (lambda: hmm.sequences(np.zeros((0, 2))), "at least one step"),
    "unlike": (lambda: hmm.sequences([np.zeros((3, 2)), np.zeros((3, 1))]), "whose steps have one shape"),
    "all missing": (lambda: hmm.gaussian_hmm(np.full(5, np.nan), 2), "All of y is missing"),
    "no category": (lambda: hmm.categorical_hmm(np.full(5, np.nan), 2), "All of y is missing"),
    "too few": (
        lambda: hmm.gaussian_hmm(GOOD[:3], 4),
        "cannot be told apart by 3 observed rows",
    ),
    "states": (lambda: hmm.gaussian_hmm(GOOD, 0), "a whole number above 0, got 0"),
    "constant": (lambda: hmm.gaussian_hmm(np.ones(9), 2), r"The columns \[0\] of y do not vary"),
    "covariance": (lambda: hmm.gaussian_hmm(GOOD, 2, covariance="tied"), 'is "full" or "diag"'),
    "below 0": (lambda: hmm.poisson_hmm(-GOOD, 2), "Poisson counts are 0, 1, 2"),
    "no counts": (lambda: hmm.poisson_hmm(0 * GOOD, 2), "All counts are 0"),
    "categories": (lambda: hmm.categorical_hmm(GOOD, 2, categories=5), "whole numbers 0, 1, …, 4"),
    "half": (lambda: hmm.categorical_hmm(GOOD + 0.5, 2), "y has others"),
    "prior": (lambda: hmm.gaussian_hmm(GOOD, 2, priors={"mean": blr.Gamma(1.0, 1.0)}), r"names \['mean'\]"),
    "priors": (lambda: hmm.gaussian_hmm(GOOD, 2, priors="none"), '"flat", "default" or members'),
    "plates": (
        lambda: hmm.hmm_of(factors.poisson("y", rate="r"), {"r": blr.Gamma(1.0, 1.0)}),
        "needs a plate for each state",
    ),
    "chain": (
        lambda: hmm.hmm_of(factors.poisson("y", rate="r"), {"r": blr.Gamma(jnp.ones(2), 1.0)}, initial=jnp.ones(3)),
        r"initial= is \(2,\) and transitions= \(2, 2\), got \(3,\)",
    ),
    "no rows": (
        lambda: fitted(EM, hmm.poisson_hmm(GOOD, 2), GOOD),
        r"sequences are \(N, T, …\), one for each row, got \(10,\)",
    ),
    "no data": (
        lambda: factors.hidden_markov("a", "b", factors.prior("c", blr.Gamma(1.0, 1.0))),
        "one step's observations",
    ),
    "no chain": (
        lambda: hmm.hidden(
            blr.Model({"a": blr.Gamma(1.0, 1.0)}, {"p": factors.prior("a", blr.Gamma(1.0, 1.0))}), None, GOOD
        ),
        "a model with a hidden_markov factor",
    ),
    "not a category": (
        lambda: fitted(EM, hmm.categorical_hmm(GOOD[:4], 2), jnp.array([[1.0, 7.0]])),
        "factor 'y' on the blocks",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    made, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        made()
