"""scikit-learn's own checks of every estimator, as users first make it: at its default settings.

Other settings (a quicker recipe, no search for the kernel) have their checks among the extended tests of their files.
"""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from bayesrule import estimators

# Estimators of sequences read rows as steps of one series, which many checks do not allow for: see test_sequences.py.
OF_SEQUENCES = {"GaussianHMM", "PoissonHMM", "CategoricalHMM", "LinearGaussianStateSpace"}
TABULAR = [getattr(estimators, name)() for name in estimators.__all__ if name not in OF_SEQUENCES]
# These take a quarter or half of a minute each, because XLA's optimiser is off or several programs are compiled:
# `make extended`.
LONG = {
    ("GaussianProcessClassifier", "check_positive_only_tag_during_fit"),
    ("LogisticRegression", "check_class_weight_classifiers"),
    ("LogisticRegression", "check_positive_only_tag_during_fit"),
    ("GaussianProcessClassifier", "check_classifiers_train"),
    ("GaussianProcessClassifier", "check_class_weight_classifiers"),
    ("MLPClassifier", "check_classifiers_train"),
    ("MLPClassifier", "check_class_weight_classifiers"),
    ("MLPRegressor", "check_regressor_data_not_an_array"),
}
# Fits of these run longer than they compile, with XLA's optimiser off.
LONG_RUNS = ("LatentDirichletAllocation", "MLPClassifier", "MLPRegressor")


def checks():
    every = parametrize_with_checks(TABULAR)
    name_of, pairs = every.kwargs["ids"], every.args[1]
    for estimator, check in pairs:
        marks = [pytest.mark.extended] if (type(estimator).__name__, check.func.__name__) in LONG else []
        yield pytest.param(estimator, check, id=f"{name_of(estimator)}-{name_of(check)}", marks=marks)


# The checks' data are noise, on which a fit need not converge, or have one class; both are said by a warning.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore:The posterior is improper")
@pytest.mark.parametrize(("estimator", "check"), [*checks()])
def test_default_settings(estimator, check, request):
    if type(estimator).__name__ in LONG_RUNS:
        request.getfixturevalue("compiled_as_users")
    check(estimator)
