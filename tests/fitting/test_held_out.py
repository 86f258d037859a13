"""Held-out rows: equal rows together, shares of classes kept, no dependence on order, and the search along a grid."""

import numpy as np
import pytest

from bayesrule.fitting.held_out import FOLDS, divide_rows, search_grid

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(100, 3))
LABELS = np.repeat([0, 1], [70, 30])


def test_a_fold_is_of_rows_and_not_of_places():
    weights = RANDOM.integers(0, 3, 100)
    folds = divide_rows(X, LABELS, weights, b"seed")
    order = RANDOM.permutation(np.repeat(np.arange(100), weights))
    repeated = divide_rows(X[order], LABELS[order], np.ones(len(order)), b"seed")
    for number in range(FOLDS):
        np.testing.assert_array_equal(repeated.holds_out(number), folds.holds_out(number)[order])
    assert not np.any([folds.holds_out(number)[weights == 0] for number in range(FOLDS)])


def test_folds_have_the_same_shares_of_classes():
    folds = divide_rows(X, LABELS, np.ones(100), b"seed")
    for number in range(FOLDS):
        assert np.bincount(LABELS[folds.holds_out(number)]).tolist() == [14, 6]
    other = divide_rows(X, LABELS, np.ones(100), b"another")
    assert np.any(other.holds_out(0) != folds.holds_out(0))


def count_fits(losses, start=0):
    fits = []

    def counted(setting, fold):
        fits.append((setting, fold))
        return losses(setting, fold)

    return search_grid(counted, start, -3, 3), fits


@pytest.mark.parametrize("best", [-3, -1, 0, 2, 3])
def test_the_best_setting_is_found(best):
    """With clear differences from one fold of each setting on the way, and its neighbours."""
    found, fits = count_fits(lambda setting, fold: abs(setting - best) + 0.1 * X[:, 0])
    assert found == best
    assert {fold for _, fold in fits} == {0}


def losses_of_a_neighbour(means):
    """Noise with these means in the folds for the setting 1, beside 0 for the setting 0 and 9 for all others."""
    noise = RANDOM.normal(size=(len(means), 100))
    noise += (np.array(means) - noise.mean(1))[:, None]
    return lambda setting, fold: noise[fold] if setting == 1 else np.full(100, 9.0 * (setting != 0))


@pytest.mark.parametrize(("means", "expected"), [((0.1, -0.3, -0.2), 1), ((0.0, -0.1, 0.0), 0), ((0.1, 0.1, 0.1), 0)])
def test_a_difference_within_its_error_takes_further_folds(means, expected):
    """Three folds of 100 rows with deviations of 1 have a standard error of 0.058, and a step needs one of them."""
    found, fits = count_fits(losses_of_a_neighbour(means))
    assert found == expected
    assert len(fits) == len(set(fits))
    assert {fold for setting, fold in fits if setting == 1} == {0, 1, 2}


def test_a_fit_that_fails_is_not_chosen():
    assert count_fits(lambda setting, fold: np.full(3, np.nan if setting > 0 else setting + 9.0))[0] == -3
    assert count_fits(lambda setting, fold: np.full(3, np.nan if setting < 1 else 1.0))[0] == 1
