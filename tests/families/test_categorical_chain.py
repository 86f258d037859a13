"""Markov chains over categories against all of their paths; long, impossible and ragged ones; Bayes in one step."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import bayesrule as blr
from bayesrule import factors
from bayesrule.numerics import hmm as markov

LENGTH = lambda steps: jnp.asarray(steps)


def chain(steps, states=3, zeros=False, varying=False, seed=0):
    """log π, log A and weights; A as it is at every step."""
    random = np.random.default_rng(seed)
    initial = random.dirichlet(np.ones(states))
    transitions = random.dirichlet(np.ones(states), (steps - 1, states) if varying else states)
    if zeros:
        initial[-1] = 0
        transitions[..., 0, 1] = 0
        transitions[..., 2, :2] = 0
    with np.errstate(divide="ignore"):
        return tuple(
            jnp.array(x) for x in (np.log(initial), np.log(transitions), 3 * random.normal(size=(steps, states)))
        )


def paths(initial, transitions, weights):
    """Every path, and its log weight."""
    steps, states = weights.shape
    actual = np.array(list(itertools.product(range(states), repeat=steps)))
    matrices = np.broadcast_to(transitions, (steps - 1, states, states)) if steps > 1 else np.zeros((0, states, states))
    total = np.asarray(initial)[actual[:, 0]] + np.asarray(weights)[np.arange(steps), actual].sum(1)
    return actual, total + sum((matrices[t][actual[:, t], actual[:, t + 1]] for t in range(steps - 1)), start=0.0)


def counted(actual, chances, states):
    """Marginals and expected pairs."""
    hot = np.eye(states)[actual]
    pairs = np.einsum("p,pti,ptj->ij", chances, hot[:, :-1], hot[:, 1:])
    return np.einsum("p,ptk->tk", chances, hot), pairs


CASES = [(1, {}), (5, {}), (6, {"zeros": True}), (1, {"varying": True}), (4, {"varying": True, "zeros": True})]


@pytest.mark.extended
@pytest.mark.parametrize(("steps", "kind"), CASES)
def test_all_paths_say_the_same(steps, kind):
    given = chain(steps, **kind)
    actual, logs = paths(*given)
    log_z = np.logaddexp.reduce(logs)
    marginals, pairs = counted(actual, np.exp(logs - log_z), 3)
    by_logarithms = jax.jit(markov._smooth_logs)(*given, LENGTH(steps))
    for smoothed in (markov.smooth(*given), by_logarithms):
        assert_allclose(smoothed.log_normalizer, log_z, rtol=1e-12)
        assert_allclose(smoothed.marginals, marginals, atol=1e-12)
        summed = jnp.sum(smoothed.pairs, axis=0) if "varying" in kind else smoothed.pairs
        assert_allclose(summed, pairs, atol=1e-12)
    filtered = markov.filter_forward(*given)
    assert_allclose(filtered.log_normalizer, log_z, rtol=1e-12)
    assert_allclose(jnp.exp(filtered.log_probabilities[-1]), marginals[-1], atol=1e-12)
    best = markov.best_path(*given)
    assert_array_equal(best.states, actual[np.argmax(logs)])
    assert_allclose(best.log_probability, np.max(logs), rtol=1e-12)


@pytest.mark.extended
def test_draws_have_the_probabilities_of_paths():
    given = chain(4, zeros=True)
    _, logs = paths(*given)
    chances = np.exp(logs - np.logaddexp.reduce(logs))
    draws = np.asarray(markov.sample_paths(jax.random.key(1), *given, shape=(20_000,)))
    observed = np.bincount(draws @ 3 ** np.arange(3, -1, -1), minlength=len(chances)) / len(draws)
    assert np.all(np.abs(observed - chances) <= 5 * np.sqrt(chances / len(draws)) + 1e-12)
    batch = markov.sample_paths(
        jax.random.key(2), given[0], given[1], jnp.stack([given[2]] * 2), LENGTH([4, 2]), shape=(5,)
    )
    assert batch.shape == (5, 2, 4)
    assert np.all(np.asarray(batch)[:, 1, 2:] == -1)


@pytest.mark.extended
def test_the_gradient_is_forward_backward():
    """Differentiated through a plain forward algorithm, and twice."""
    initial, transitions, weights = chain(5)

    def plain(initial, transitions, weights):
        total = initial + weights[0]
        for t in range(1, 5):
            total = jax.nn.logsumexp(total[:, None] + transitions, axis=0) + weights[t]
        return jax.nn.logsumexp(total)

    ours = lambda *given: markov.log_normalizer(*given, None)
    actual = jax.jit(jax.grad(ours, argnums=(0, 1, 2)))(initial, transitions, weights)
    expected = jax.jit(jax.grad(plain, argnums=(0, 1, 2)))(initial, transitions, weights)
    for a, b in zip(actual, expected, strict=True):
        assert_allclose(a, b, atol=1e-12)
    smoothed = markov.smooth(initial, transitions, weights)
    assert_array_equal(actual[1], smoothed.pairs)
    assert_array_equal(actual[2], smoothed.marginals)
    twice = jax.jit(jax.hessian(lambda w: ours(initial, transitions, w)))(weights)
    assert_allclose(twice, jax.jit(jax.hessian(lambda w: plain(initial, transitions, w)))(weights), atol=1e-11)


@pytest.mark.extended
@pytest.mark.parametrize("own", [False, True], ids=["one chain", "a chain each"])
def test_filling_counts_for_nothing(own):
    initial, transitions, weights = chain(6)
    lengths = [6, 4, 1, 0]
    rows = jnp.stack([weights, 2 * weights, -weights, weights])
    many = (jnp.stack([initial] * 4), jnp.stack([transitions] * 4)) if own else (initial, transitions)
    actual = markov.smooth(*many, rows, LENGTH(lengths))
    best = markov.best_path(*many, rows, LENGTH(lengths))
    filtered = markov.filter_forward(*many, rows, LENGTH(lengths))
    for n, length in enumerate(lengths[:-1]):
        alone = markov.smooth(initial, transitions, rows[n, :length])
        assert_allclose(actual.log_normalizer[n], alone.log_normalizer, rtol=1e-12)
        assert_allclose(filtered.log_normalizer[n], alone.log_normalizer, rtol=1e-12)
        assert_allclose(actual.marginals[n, :length], alone.marginals, atol=1e-12)
        assert_allclose(actual.pairs[n], alone.pairs, atol=1e-12)
        path = markov.best_path(initial, transitions, rows[n, :length])
        assert_array_equal(best.states[n, :length], path.states)
        assert_allclose(best.log_probability[n], path.log_probability, rtol=1e-12)
    assert_array_equal(actual.marginals[1, 4:], 0)
    assert_array_equal(best.states[1, 4:], -1)
    for nothing in (actual.log_normalizer[3], actual.marginals[3], actual.pairs[3], best.log_probability[3]):
        assert_array_equal(nothing, 0)


@pytest.mark.extended
def test_long_chains_in_float32():
    initial, transitions, weights = chain(50_000, 8)
    exact = markov.smooth(initial, transitions, weights)
    with jax.enable_x64(False):
        rough = markov.smooth(*(x.astype(jnp.float32) for x in (initial, transitions, weights)))
        best = markov.best_path(*(x.astype(jnp.float32) for x in (initial, transitions, weights)))
    assert rough.marginals.dtype == jnp.float32
    assert_allclose(rough.log_normalizer, exact.log_normalizer, rtol=1e-5)
    assert_allclose(rough.marginals, exact.marginals, atol=1e-4)
    assert_allclose(rough.pairs, exact.pairs, rtol=1e-3)
    assert_allclose(best.log_probability, markov.best_path(initial, transitions, weights).log_probability, rtol=1e-5)


def test_a_state_that_was_ruled_out_comes_back():
    """No transitions at all: after 100 steps the second state has e⁻³⁰⁰ of the first, and in the end it is the one."""
    with jax.enable_x64(False), np.errstate(divide="ignore"):
        stay = jnp.log(jnp.eye(2))
        weights = jnp.concatenate([jnp.array([[0.0, -3.0]] * 100), jnp.array([[-3.0, 0.0]] * 150)])
        actual = markov.smooth(jnp.log(jnp.full(2, 0.5)), stay, weights)
        assert_allclose(actual.log_normalizer, -300 + np.log(0.5), rtol=1e-6)
        assert_allclose(actual.marginals, np.tile([0.0, 1.0], (250, 1)), atol=1e-6)
        assert_allclose(actual.pairs, [[0, 0], [0, 249]], rtol=1e-5)


@pytest.mark.extended
def test_what_is_impossible_says_so():
    initial, transitions, weights = chain(5)
    actual = markov.smooth(initial, transitions, weights.at[2].set(-jnp.inf))
    assert actual.log_normalizer == -jnp.inf
    assert np.all(np.isnan(actual.marginals))
    assert markov.filter_forward(initial, transitions, weights.at[2].set(-jnp.inf)).log_normalizer == -jnp.inf
    assert markov.best_path(initial, transitions, weights.at[2].set(-jnp.inf)).log_probability == -jnp.inf


# The family.


@pytest.mark.extended
def test_a_known_chain_is_bayes_rule_in_one_step():
    initial, transitions, _ = chain(7)
    y = jnp.array([0.3, 2.1, jnp.nan, -1.0, 0.2, 1.9, 2.2])
    means = jnp.array([0.0, 1.0, 2.0])
    prior = blr.CategoricalChain(jnp.exp(initial), jnp.exp(transitions), jnp.zeros((7, 3)))

    def likelihood(z, y):
        return jnp.sum(z.probabilities * (-0.5 * (y[:, None] - means) ** 2), axis=-1)

    model = blr.Model({"z": prior}, {"y": blr.Factor(likelihood, "z", data="y", of="seen")})
    result = blr.fit(blr.conjugate(), model, None, {"y": y}, steps=1)
    weights = jnp.where(jnp.isnan(y)[:, None], 0.0, -0.5 * (y[:, None] - means) ** 2)
    smoothed = markov.smooth(initial, transitions, weights)
    assert_allclose(result.q["z"].probabilities, smoothed.marginals, atol=1e-12)
    assert_allclose(result.bound, smoothed.log_normalizer, rtol=1e-12)
    again = blr.fit(blr.conjugate(), model, result.q, {"y": y}, steps=1)
    assert_allclose(again.q["z"].natural(), result.q["z"].natural(), atol=1e-12)


@pytest.mark.extended
def test_a_chain_chooses_among_components():
    """`choice` with a chain as its selector: the same sweep as with the states summed out."""
    initial, transitions, _ = chain(30)
    y = jnp.array(np.random.default_rng(1).poisson(np.repeat([1.0, 6.0, 2.0], 10)), float)
    start = blr.Gamma(jnp.array([2.0, 3.0, 6.0]), 1.0)
    known, belief = (jnp.exp(initial), jnp.exp(transitions)), {"prior": factors.prior("rate", blr.Gamma(1.0, 0.5))}
    components = factors.poisson("y", rate="rate")
    z = blr.CategoricalChain(*known, jnp.zeros((30, 3)))
    chosen = blr.Model({"z": z, "rate": start}, {**belief, "y": factors.choice("z", components)})
    summed = blr.Model({"rate": start}, {**belief, "y": factors.hidden_markov(*known, components)})
    one = blr.fit(blr.vmp(order=["z", "rate"]), chosen, None, {"y": y}, steps=5, check=True)
    other = blr.fit(blr.vmp(order="parallel"), summed, None, {"y": y[None]}, steps=5, check=True)
    assert_allclose(one.q["rate"].shape, other.q["rate"].shape, rtol=1e-10)
    assert_allclose(one.q["rate"].rate, other.q["rate"].rate, rtol=1e-10)


@pytest.mark.extended
def test_the_divergence_between_chains_of_different_priors():
    one, other = (
        blr.CategoricalChain(*(jnp.exp(x) for x in given[:2]), given[2]) for given in (chain(4), chain(4, seed=1))
    )
    logs = []
    for q in (one, other):
        total = paths(jnp.log(q.initial), jnp.log(q.transitions), q.logits)[1]
        logs.append(total - np.logaddexp.reduce(total))
    assert_allclose(one.kl(other), np.sum(np.exp(logs[0]) * (logs[0] - logs[1])), rtol=1e-10)
    with pytest.raises(ValueError, match="two members of one family"):
        one.kl(blr.Poisson(1.0))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((jnp.ones(2) / 2, jnp.eye(3), jnp.zeros((4, 3))), r"initial \(…, K\), transitions \(…, K, K\) and logits"),
        ((jnp.ones(3) / 3, jnp.eye(3), jnp.zeros(3)), r"logits \(…, T, K\)"),
        ((jnp.ones(3) / 3, jnp.eye(3), jnp.zeros((0, 3))), r"logits \(…, T, K\)"),
        ((jnp.ones(3), jnp.eye(3), jnp.zeros((4, 3))), "initial must be probabilities that add up to 1"),
        ((jnp.ones(3) / 3, jnp.ones((3, 3)), jnp.zeros((4, 3))), "transitions must be probabilities that add up to 1"),
    ],
)
def test_what_is_no_chain(arguments, said):
    with pytest.raises(ValueError, match=said):
        blr.CategoricalChain(*arguments)


def test_what_does_not_fit_together():
    initial, transitions, weights = chain(5)
    with pytest.raises(ValueError, match=r"A chain over 3 states and 5 steps"):
        markov.smooth(initial, transitions[:2], weights)
    varying = jnp.stack([transitions] * 4)
    with pytest.raises(ValueError, match=r"broadcast_to\(log_transitions, \(2, 4, 3, 3\)\)"):
        markov.smooth(initial, varying, jnp.stack([weights] * 2))
    with pytest.raises(ValueError, match=r"for each step and state, got shape \(3,\)"):
        markov.smooth(initial, transitions, weights[0])
    q = blr.CategoricalChain(jnp.exp(initial), jnp.exp(transitions), weights)
    with pytest.raises(ValueError, match="with_natural"):
        blr.CategoricalChain.from_natural(q.natural())
    with pytest.raises(ValueError, match="with_expectation"):
        blr.CategoricalChain.from_expectation(q.expectation())
