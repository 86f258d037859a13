"""The metrics against scikit-learn's, scipy's and sums done by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score

from bayesrule import metrics

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 300)
PROBABILITIES = RNG.dirichlet(np.ones(4), 300)
BINARY_LABELS = RNG.integers(0, 2, 300)
BINARY = RNG.uniform(size=300)


def test_accuracy_is_sklearns():
    ours = metrics.accuracy(PROBABILITIES, LABELS)
    np.testing.assert_allclose(ours, accuracy_score(LABELS, PROBABILITIES.argmax(1)), rtol=1e-14)
    np.testing.assert_allclose(
        metrics.accuracy(BINARY, BINARY_LABELS), accuracy_score(BINARY_LABELS, BINARY > 0.5), rtol=1e-14
    )


def test_nll_is_sklearns_log_loss():
    np.testing.assert_allclose(metrics.nll(PROBABILITIES, LABELS), log_loss(LABELS, PROBABILITIES), rtol=1e-13)
    np.testing.assert_allclose(metrics.nll(BINARY, BINARY_LABELS), log_loss(BINARY_LABELS, BINARY), rtol=1e-13)


def test_nll_of_a_certain_mistake_is_finite():
    for dtype in (jnp.float32, jnp.float64):
        value = metrics.nll(jnp.array([[1.0, 0.0]], dtype), [1])
        np.testing.assert_allclose(value, -np.log(np.finfo(dtype).tiny), rtol=1e-6)


def test_brier_is_sklearns():
    theirs = brier_score_loss(LABELS, PROBABILITIES, labels=range(4), scale_by_half=False)
    np.testing.assert_allclose(metrics.brier(PROBABILITIES, LABELS), theirs, rtol=1e-13)
    halved = brier_score_loss(BINARY_LABELS, BINARY)  # (p − y)², of one class
    np.testing.assert_allclose(metrics.brier(BINARY, BINARY_LABELS), 2 * halved, rtol=1e-13)


@pytest.mark.extended
def test_ece_by_hand():
    # Two bins: (0, ½] holds two examples, one of them right; (½, 1] three, two of them right.
    probabilities = np.array([[0.4, 0.3, 0.3], [0.3, 0.5, 0.2], [0.9, 0.05, 0.05], [0.1, 0.1, 0.8], [0.0, 1.0, 0.0]])
    labels = np.array([0, 2, 0, 2, 0])
    expected = 2 / 5 * abs(1 / 2 - 0.9 / 2) + 3 / 5 * abs(2 / 3 - 2.7 / 3)
    np.testing.assert_allclose(metrics.ece(probabilities, labels, bins=2), expected, rtol=1e-14)
    diagram = metrics.reliability(probabilities, labels, bins=2)
    np.testing.assert_array_equal(diagram.counts, [2, 3])
    np.testing.assert_allclose(diagram.edges, [0.0, 0.5, 1.0])
    np.testing.assert_allclose(diagram.confidence, [0.45, 0.9], rtol=1e-14)
    np.testing.assert_allclose(diagram.accuracy, [1 / 2, 2 / 3], rtol=1e-14)


def test_ece_by_a_loop():
    bins, confidence, right = 20, PROBABILITIES.max(1), PROBABILITIES.argmax(1) == LABELS
    total = 0.0
    for low in np.arange(bins) / bins:
        inside = (confidence > low) & (confidence <= low + 1 / bins)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    np.testing.assert_allclose(metrics.ece(PROBABILITIES, LABELS), total, rtol=1e-12)


def test_ece_follows_from_the_diagram():
    diagram = metrics.reliability(BINARY, BINARY_LABELS, bins=7)
    gap = np.nan_to_num(np.abs(diagram.accuracy - diagram.confidence))
    np.testing.assert_allclose(
        metrics.ece(BINARY, BINARY_LABELS, bins=7), np.sum(diagram.counts * gap) / 300, rtol=1e-13
    )
    assert np.isnan(diagram.confidence[0])  # of two classes, the more probable one has at least a half
    assert diagram.counts.sum() == 300


@pytest.mark.extended
def test_ece_of_calibrated_predictions_vanishes_with_the_sample():
    # |accuracy − confidence| in a bin of n is about √(2/π · ¼/n) or less: 20 bins of 5000 give at most 0.0056.
    key = jax.random.split(jax.random.key(0))
    p = jax.random.uniform(key[0], (100_000,))
    y = jax.random.bernoulli(key[1], p).astype(int)
    assert metrics.ece(p, y) < 0.0056 + 4 * 0.0056 / np.sqrt(10)
    assert metrics.ece(p**3, y) > 0.1


def test_entropy_is_scipys():
    np.testing.assert_allclose(
        metrics.predictive_entropy(PROBABILITIES), stats.entropy(PROBABILITIES, axis=1), rtol=1e-12
    )
    np.testing.assert_allclose(metrics.predictive_entropy([0.0, 1.0]), 0.0)


@pytest.mark.parametrize("decimals", [16, 1], ids=["distinct", "ties"])
def test_auroc_is_sklearns(decimals):
    known, unknown = RNG.normal(size=200).round(decimals), RNG.normal(0.7, size=90).round(decimals)
    truth = np.r_[np.zeros(200), np.ones(90)]
    np.testing.assert_allclose(metrics.auroc(known, unknown), roc_auc_score(truth, np.r_[known, unknown]), rtol=1e-13)


def test_auroc_at_its_ends():
    assert metrics.auroc([0.0, 1.0], [2.0]) == 1.0
    assert metrics.auroc([1.0, 1.0], [1.0, 1.0]) == 0.5
    assert np.isnan(metrics.auroc([0.0, np.nan], [1.0]))


def test_rmse_and_gaussian_likelihood():
    mean, target, variance = RNG.normal(size=50), RNG.normal(size=50), RNG.uniform(0.1, 2, size=50)
    np.testing.assert_allclose(metrics.rmse(mean, target), np.sqrt(np.mean((mean - target) ** 2)), rtol=1e-14)
    expected = stats.norm.logpdf(target, mean, np.sqrt(variance + 0.3)).mean()
    np.testing.assert_allclose(metrics.gaussian_log_likelihood(mean, variance, target, 0.3), expected, rtol=1e-13)
    wide = [np.stack([a, a + 1], axis=1) for a in (mean, variance, target)]
    expected = stats.norm.logpdf(wide[2], wide[0], np.sqrt(wide[1])).sum(1).mean()
    np.testing.assert_allclose(metrics.gaussian_log_likelihood(*wide), expected, rtol=1e-13)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_intervals_are_scipys_and_hold_what_they_claim(level):
    mean, std = RNG.normal(size=2000), RNG.uniform(0.1, 2, size=2000)
    low, high = metrics.interval(mean, std, level)
    np.testing.assert_allclose([low, high], stats.norm.interval(level, mean, std), atol=1e-12)
    target = RNG.normal(mean, std)
    inside = metrics.coverage(target, low, high)
    assert inside == np.mean((target >= low) & (target <= high))
    assert abs(inside - level) < 4 * np.sqrt(level * (1 - level) / 2000)
    jitted = jax.jit(lambda m, s, t: metrics.coverage(t, *metrics.interval(m, s, level)))(mean, std, target)
    np.testing.assert_allclose(jitted, inside, rtol=1e-12)


def test_intervals_of_student_t_are_scipys():
    low, high = metrics.interval(1.0, 2.0, 0.8, degrees_of_freedom=3.5)
    np.testing.assert_allclose([low, high], stats.t.interval(0.8, 3.5, 1.0, 2.0), rtol=1e-12)
    np.testing.assert_allclose(metrics.interval(1.0, 2.0, 0.8, 1e9), stats.norm.interval(0.8, 1.0, 2.0), rtol=1e-8)


def test_mixture_likelihood():
    outputs, target = RNG.normal(size=(7, 50)), RNG.normal(size=50)
    expected = np.log(stats.norm.pdf(target, outputs, 0.5).mean(0)).mean()
    np.testing.assert_allclose(metrics.mixture_log_likelihood(outputs, target, 4.0), expected, rtol=1e-13)
    both = stats.norm.pdf(target, outputs, 0.5) * stats.norm.pdf(target + 1, outputs, 0.5)
    value = metrics.mixture_log_likelihood(np.stack([outputs, outputs], -1), np.stack([target, target + 1], -1), 4.0)
    np.testing.assert_allclose(value, np.log(both.mean(0)).mean(), rtol=1e-13)
    assert np.isfinite(metrics.mixture_log_likelihood(outputs + 1e4, target, 4.0))  # where a density underflows


@pytest.mark.parametrize("name", ["accuracy", "nll", "brier", "ece", "reliability"])
def test_jitted_is_the_same(name):
    function = getattr(metrics, name)
    jitted = jax.jit(function)(PROBABILITIES, LABELS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-14), jitted, function(PROBABILITIES, LABELS))


@pytest.mark.extended
def test_half_precision_counts_all_examples():
    p = jnp.tile(jnp.array([[0.75, 0.25]], jnp.bfloat16), (3000, 1))
    np.testing.assert_allclose(metrics.ece(p, np.zeros(3000, int)), 0.25, rtol=1e-5)
    assert metrics.nll(p, np.zeros(3000, int)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.nll([[2.0, -1.0]], [0]), "softmax"),
        (lambda: metrics.nll([[0.5, 0.5]], [[0, 1]]), "argmax"),
        (lambda: metrics.accuracy([0.5, 0.5], [-1, 1]), "0 to 1; got values such as -1"),
        (lambda: metrics.accuracy([[0.5, 0.5]], [2]), "0 to 1"),
        (lambda: metrics.accuracy([[0.5]], [0]), "at least two classes"),
        (lambda: metrics.ece(np.zeros((0, 2)), []), "N > 0"),
        (lambda: metrics.ece([0.5], [1], bins=0), "at least one bin"),
        (lambda: metrics.rmse(np.zeros((3, 1)), np.zeros(3)), "same shape"),
        (lambda: metrics.gaussian_log_likelihood([0.0], [1.0], [0.0, 1.0]), "same shape"),
        (lambda: metrics.mixture_log_likelihood([0.0], [0.0], 1.0), r"\(S, N\)"),
        (lambda: metrics.auroc([], [1.0]), "at least one"),
        (lambda: metrics.interval(0.0, 1.0, level=90), "between 0 and 1"),
        (lambda: metrics.interval(0.0, 1.0, degrees_of_freedom=0), "above 0"),
        (lambda: metrics.coverage([0.0], [1.0, 2.0], [3.0]), "same shape"),
    ],
)
def test_errors_say_what_to_do(call, words):
    with pytest.raises(ValueError, match=words):
        call()
