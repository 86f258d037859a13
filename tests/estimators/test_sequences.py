"""Hidden Markov models and state spaces: numbers of hmmlearn and statsmodels, ragged series, scikit-learn's checks."""

import pickle
import warnings

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import multivariate_normal, multivariate_t
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import estimator_checks_generator

import bayesrule as blr
from bayesrule.estimators import CategoricalHMM, GaussianHMM, LinearGaussianStateSpace, PoissonHMM
from bayesrule.fitting.loop import run_chunk
from bayesrule.numerics.programs import release_programs

# Optional: the dev extra installs it.
pandas = pytest.importorskip("pandas")
theirs = pytest.importorskip("hmmlearn.hmm")
KalmanSmoother = pytest.importorskip("statsmodels.tsa.statespace.kalman_smoother").KalmanSmoother

RANDOM = np.random.default_rng(0)
PATH = np.repeat([0, 1, 0, 1], 30)
NUMBERS = np.array([[-1.0, 0.0], [2.0, 3.0]])[PATH] + RANDOM.normal(size=(120, 2))
COUNTS = RANDOM.poisson(np.array([1.0, 6.0])[PATH]).astype(float)
LETTERS = np.digitize(NUMBERS[:, 0], [-1, 0.5, 2]).astype(float)
WAVES = np.stack([np.sin(np.arange(120) / 5), 100 + 30 * np.cos(np.arange(120) / 5)], axis=1)
WAVES = WAVES + RANDOM.normal(size=(120, 2)) * [0.1, 3.0]

FITTED = {
    "gaussian": (GaussianHMM(2, covariance_type="diag", reg_covar=0, random_state=0), NUMBERS),
    "poisson": (PoissonHMM(2, random_state=0), COUNTS),
    "categorical": (CategoricalHMM(2, tol=1e-2, random_state=0), LETTERS),
    "space": (LinearGaussianStateSpace(2, tol=1e-2), WAVES),
}


@pytest.fixture(scope="module")
def fitted():
    with warnings.catch_warnings():
        # The likelihood of the waves, which have no noise, rises without end.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return {name: clone(estimator).fit(rows) for name, (estimator, rows) in FITTED.items()}


def peer(model):
    """hmmlearn's model with the same parameters."""
    if isinstance(model, GaussianHMM):
        other = theirs.GaussianHMM(2, covariance_type="diag")
        other.means_, other.covars_ = model.means_, model.covariances_
    elif isinstance(model, PoissonHMM):
        other = theirs.PoissonHMM(2)
        other.lambdas_, other.n_features = model.rates_, 1
    else:
        other = theirs.CategoricalHMM(2)
        other.emissionprob_, other.n_features = model.emissionprob_, 4
    other.startprob_, other.transmat_ = model.startprob_, model.transmat_
    return other


@pytest.mark.sampled("poisson", "categorical")
@pytest.mark.parametrize("name", ["gaussian", "poisson", "categorical"])
def test_states_are_hmmlearn_s(name, fitted):
    model, rows = fitted[name], FITTED[name][1]
    other, table = peer(model), rows.reshape(120, -1)
    table = table if name == "gaussian" else table.astype(int)
    assert_allclose(model.score(rows), other.score(table), rtol=1e-10)
    assert_allclose(model.bound_, other.score(table), rtol=1e-8)
    assert_allclose(model.smooth(rows), other.predict_proba(table), atol=1e-10)
    assert_array_equal(model.decode(rows), other.decode(table)[1])
    last = model.filter(rows)[-1]
    assert_allclose(last, model.smooth(rows)[-1], atol=1e-12)
    mean, std = model.predict(rows, 3, return_std=True)
    first, emitted = last @ model.transmat_, np.asarray(other.emissionprob_ if name == "categorical" else 0)
    if name == "gaussian":
        assert_allclose(mean[0], first @ model.means_)
        square = first @ (model.covariances_ + model.means_**2)
        assert_allclose(std[0], np.sqrt(square - mean[0] ** 2))
    elif name == "poisson":
        assert_allclose(std[0] ** 2, first @ (model.rates_ + model.rates_**2) - (first @ model.rates_) ** 2)
    else:
        assert_allclose(mean[0], first @ emitted)
    drawn, states = model.sample(50)
    assert drawn.shape == (50, table.shape[1])
    assert set(states) <= {0, 1}


@pytest.mark.extended
def test_lengths_are_hmmlearn_s(fitted):
    """Series one after another: scores and states as hmmlearn has them, and a fit as to a list of series."""
    lengths = [50, 30, 40]
    parts = np.split(NUMBERS, np.cumsum(lengths)[:-1])
    model, other = fitted["gaussian"], peer(fitted["gaussian"])
    assert_allclose(model.score(NUMBERS, lengths=lengths), other.score(NUMBERS, lengths), rtol=1e-10)
    assert_allclose(
        np.vstack(model.smooth(NUMBERS, lengths=lengths)), other.predict_proba(NUMBERS, lengths), atol=1e-10
    )
    assert_array_equal(np.concatenate(model.decode(NUMBERS, lengths=lengths)), other.decode(NUMBERS, lengths)[1])
    one, many = clone(model).fit(NUMBERS, lengths=lengths), clone(model).fit(parts)
    assert_allclose(one.transmat_, many.transmat_, rtol=1e-12)
    assert abs(one.transmat_ - model.transmat_).max() > 1e-4
    frame = pandas.DataFrame(NUMBERS)
    assert_allclose(model.score(frame, lengths=lengths), model.score(parts), rtol=1e-12)
    space = fitted["space"]
    assert_allclose(space.score(WAVES, lengths=lengths), space.score(np.split(WAVES, [50, 80])), rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y": [50, 30, 40]}, "by name, lengths="),
        ({"y": 3}, "by name, lengths="),
        ({"lengths": [50, 30]}, "80 steps in all, and Y 120"),
        ({"lengths": [60.0, 60.0]}, "whole numbers"),
        ({"lengths": [0, 120]}, "above 0"),
    ],
)
def test_lengths_that_are_misread_elsewhere_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GaussianHMM(2).fit(NUMBERS, **arguments)
    with pytest.raises(ValueError, match=message):
        LinearGaussianStateSpace(2).fit(NUMBERS, **arguments)


@pytest.mark.extended
@pytest.mark.parametrize("method", ["em", "vmp"])
def test_steps_that_are_missing_in_part(method):
    """A full covariance: score, filter and smooth use what was observed; by SciPy and the forward algorithm."""
    rows = NUMBERS.copy()
    rows[5, 0] = rows[40:60, 1] = rows[119, 0] = np.nan
    rows[9] = np.nan
    model = GaussianHMM(2, method=method, random_state=0).fit(rows)
    part = model.posterior_["states"]
    table = np.zeros((120, 2))
    for t, k in np.ndindex(120, 2):
        seen = ~np.isnan(rows[t])
        if not seen.any():
            continue
        mean, square = model.means_[k][seen], np.ix_(seen, seen)
        if method == "em":
            density = multivariate_normal(mean, model.covariances_[k][square])
        else:
            dof = part.df[k] - 1
            scale = np.linalg.inv(part.scale[k]) * (part.count[k] + 1) / (part.count[k] * dof)
            density = multivariate_t(mean, scale[square], df=dof)
        table[t, k] = density.logpdf(rows[t][seen])
    forward, total = np.zeros((120, 2)), 0.0
    for t in range(120):
        ahead = model.startprob_ if t == 0 else forward[t - 1] @ model.transmat_
        forward[t] = ahead * np.exp(table[t])
        total += np.log(forward[t].sum())
        forward[t] /= forward[t].sum()
    assert_allclose(model.score(rows), total, rtol=1e-10)
    assert_allclose(model.filter(rows), forward, atol=1e-9)
    assert_allclose(model.smooth(rows)[-1], forward[-1], atol=1e-9)
    whole = np.where(np.isnan(rows).any(1, keepdims=True), np.nan, rows)
    assert abs(model.score(whole) - total) > 1


@pytest.mark.filterwarnings("ignore:Setting the shape on a NumPy array:DeprecationWarning")  # hmmlearn
def test_baum_and_welch_s_steps_are_hmmlearn_s():
    class Watch:
        def fit(self, rule, objective, start, data=None, **options):
            self.model = objective
            return blr.fit(rule, objective, start, data, **options)

    model, watch = clone(FITTED["poisson"][0]).set_params(tol=0.05), Watch()
    model._watcher = watch
    model.fit(COUNTS)
    other = theirs.PoissonHMM(2, init_params="", n_iter=model.n_iter_, tol=-np.inf, lambdas_prior=0, lambdas_weight=0)
    start = {name: np.asarray(blr.Peak(block).mean) for name, block in watch.model.blocks.items()}
    other.startprob_, other.transmat_, other.lambdas_ = start["initial"], start["transitions"], start["states"]
    other.fit(COUNTS[:, None].astype(int))
    assert model.n_iter_ > 1
    assert_allclose(model.rates_, other.lambdas_, rtol=1e-8)
    assert_allclose(model.transmat_, other.transmat_, rtol=1e-8)


def test_a_state_space_is_statsmodels(fitted):
    model = fitted["space"]
    rows = WAVES.copy()
    rows[40:45], rows[60, 0] = np.nan, np.nan
    other = KalmanSmoother(k_endog=2, k_states=2, k_posdef=2)
    other.bind(rows - model.mean_)
    other["design"], other["obs_cov"] = model.loadings_, np.diag(model.noise_variance_)
    other["transition"], other["selection"], other["state_cov"] = model.transition_, np.eye(2), np.eye(2)
    other.initialize_known(np.zeros(2), 10 * np.eye(2))
    actual = other.smooth()
    assert_allclose(model.score(rows), actual.llf, rtol=1e-8)
    mean, spread = model.smooth(rows, return_cov=True)
    assert_allclose(mean, actual.smoothed_state.T, atol=1e-6)
    assert_allclose(spread, np.moveaxis(actual.smoothed_state_cov, -1, 0), atol=1e-6)
    assert_allclose(model.filter(rows), actual.filtered_state.T, atol=1e-6)
    mean, std = model.predict(rows, 4, return_std=True)
    state, posterior_variance = actual.filtered_state[:, -1], actual.filtered_state_cov[:, :, -1]
    posterior_variance = model.transition_ @ posterior_variance @ model.transition_.T + np.eye(2)
    assert_allclose(mean[0], model.mean_ + model.loadings_ @ model.transition_ @ state, rtol=1e-8)
    expected = np.diag(model.loadings_ @ posterior_variance @ model.loadings_.T) + model.noise_variance_
    assert_allclose(std[0], np.sqrt(expected), rtol=1e-8)
    # A step of EM ends above where the one before did, and the bound is next to the log-likelihood.
    assert model.bound_ <= model.score(WAVES) < model.bound_ + 1


@pytest.mark.parametrize("name", ["gaussian", "space"])
def test_series_of_many_lengths(name, fitted):
    """Series are independent, and each has a result of its own length."""
    model, rows = fitted[name], FITTED[name][1]
    parts = [rows[:50], rows[50:]]
    assert_allclose(model.score(parts), model.score(rows[:50]) + model.score(rows[50:]), rtol=1e-10)
    assert [len(part) for part in model.smooth(parts)] == [50, 70]
    assert_allclose(model.smooth(parts)[0], model.smooth(rows[:50]), atol=1e-10)
    assert_allclose(model.predict(parts, 2)[1], model.predict(rows[50:], 2), atol=1e-10)


# That of a hidden Markov model is in tests/models/test_hmm.py.
@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_padding_changes_nothing_and_saves_compilation(fitted, monkeypatch):
    release_programs()  # Otherwise old programs may be dropped while they are counted.
    clone(fitted["space"]).fit(WAVES)
    programs = run_chunk.count()
    short = clone(fitted["space"]).fit(WAVES[:100])
    assert run_chunk.count() == programs
    monkeypatch.setattr("bayesrule.estimators.base_iterative.padded_rows", lambda rows: rows)
    bare = clone(fitted["space"]).fit(WAVES[:100])
    for one, other in zip(jax.tree.leaves(short.posterior_), jax.tree.leaves(bare.posterior_), strict=True):
        assert_allclose(one, other, rtol=1e-6, atol=1e-9)
    assert_allclose(short.bound_, bare.bound_, rtol=1e-9)


# The state space creeps: it is not at its optimum after 5000 sweeps, and the warning says so.
@pytest.mark.filterwarnings("ignore:LinearGaussianStateSpace did not converge:sklearn.exceptions.ConvergenceWarning")
@pytest.mark.extended
@pytest.mark.parametrize("name", ["poisson", "space"])
def test_a_posterior_widens_predictions(name, fitted):
    estimator, rows = FITTED[name]
    rows = rows.copy()
    rows[20:23] = np.nan
    model = clone(estimator).set_params(method="vmp").fit(rows)
    assert model.bound_ < model.score(rows)
    mean, std = model.predict(rows, 2, return_std=True)
    assert_allclose(mean, fitted[name].predict(FITTED[name][1], 2), atol=np.max(std))
    if name == "poisson":  # negative binomial
        assert np.all(std > fitted[name].predict(FITTED[name][1], 2, return_std=True)[1] * 0.9)


@pytest.mark.sampled("em")
@pytest.mark.parametrize("method", ["em", "vmp"])
def test_large_means_do_not_cancel(method):
    """Deviations of numbers around 1e8, which have 8 digits left, are those of the numbers around 0."""
    plain, moved = (GaussianHMM(2, method=method, random_state=0).fit(NUMBERS + offset) for offset in (0, 1e8))
    for name, options in (("smooth_observations", {}), ("predict", {"steps": 5, "return_std": True})):
        mean, std = getattr(plain, name)(NUMBERS, **options)
        moved_mean, moved_std = getattr(moved, name)(NUMBERS + 1e8, **options)
        assert_allclose(moved_mean - 1e8, mean, atol=1e-5)
        assert_allclose(moved_std, std, rtol=1e-5)


def test_pickle_and_dataframes(fitted):
    frame = pandas.DataFrame(NUMBERS, columns=["a", "b"])
    model = clone(FITTED["gaussian"][0]).fit(frame)
    assert model.feature_names_in_.tolist() == ["a", "b"]
    assert_allclose(pickle.loads(pickle.dumps(model)).score(frame), fitted["gaussian"].score(NUMBERS))
    for one in fitted.values():
        held = [value for name, value in vars(one).items() if name.endswith("_")]
        kinds = bool | int | float | np.ndarray | blr.Product
        assert all(isinstance(value, kinds) for value in held)
        assert all(value.dtype.kind in "bif" for value in held if isinstance(value, np.ndarray))
        assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(one.posterior_))


# scikit-learn's checks take rows to be exchangeable, X to have two axes and any real numbers. All of them run at the
# default settings but for these, which do not apply to series:
NOT_FOR_SERIES = {
    "check_fit1d",  # asks for an error where X has one axis, and here (T,) is a series of numbers
    "check_fit2d_predict1d",  # likewise
    "check_methods_sample_order_invariance",  # shuffles the steps of a series
    "check_methods_subset_invariance",  # cuts the series
    "check_array_api_input",  # skips itself where the array API is not switched on
}
# Counts and categories are whole numbers, and every check that fits gives others: those two classes differ from
# GaussianHMM by their emissions alone, and take the checks that do not fit.
WITHOUT_A_FIT = {
    "check_estimator_cloneable",
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
    "check_estimator_repr",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_estimators_unfitted",
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_mixin_order",
    "check_get_params_invariance",
    "check_set_params",
}


def checks():
    for estimator in (GaussianHMM(), LinearGaussianStateSpace(), PoissonHMM(), CategoricalHMM()):
        name = type(estimator).__name__
        for number, (_, check) in enumerate(estimator_checks_generator(estimator)):
            check_name = getattr(check, "func", check).__name__
            if isinstance(estimator, PoissonHMM | CategoricalHMM):
                applies = check_name in WITHOUT_A_FIT
            else:
                applies = check_name not in NOT_FOR_SERIES
            if applies:
                marks = [] if check_name in WITHOUT_A_FIT else [pytest.mark.extended]
                yield pytest.param(estimator, check, id=f"{name}-{check_name}-{number}", marks=marks)


# The checks' data are noise, on which a fit need not converge; a warning says so.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize(("estimator", "check"), [*checks()])
def test_scikit_learn_s_checks(estimator, check):
    check(clone(estimator))


BAD = {
    "infinite": (GaussianHMM(), np.where(NUMBERS > 4, np.inf, NUMBERS), "infinity"),
    "empty": (GaussianHMM(), [], "empty|0 sample|at least one"),
    "missing": (GaussianHMM(), np.full(9, np.nan), "no values at all"),
    "states": (LinearGaussianStateSpace(0), WAVES, "n_states= is a whole number above 0"),
    "method": (LinearGaussianStateSpace(method="svi"), WAVES, "knows the methods 'em', 'vmp'"),
    "unlike": (GaussianHMM(), [NUMBERS, NUMBERS[:, :1]], "1 features"),
    "counts": (PoissonHMM(), NUMBERS, "Poisson counts are 0, 1, 2"),
    "columns": (CategoricalHMM(), np.ones((9, 2)), "one category for each step"),
    "letters": (CategoricalHMM(), NUMBERS[:, 0], "Categories are whole numbers"),
    "floor": (GaussianHMM(reg_covar=-1), NUMBERS, "reg_covar= is a variance"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    estimator, rows, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        clone(estimator).fit(rows)


def test_bad_arguments_of_predictions(fitted):
    with pytest.raises(ValueError, match="whole number above 0, got 0"):
        fitted["space"].predict(WAVES, 0)
    with pytest.raises(ValueError, match="from 0 to 3"):
        fitted["categorical"].score([1.0, 7.0])
