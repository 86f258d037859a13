"""scikit-learn's own checks of every estimator, as users first make it: at its default settings.

Logistic regression takes them with Laplace's method too. Other settings (a quicker recipe, no search for the kernel)
have their checks among the extended tests of their files.
"""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from bayesrule import estimators
from bayesrule.estimators import LogisticRegression, RidgeRegression

# Estimators of sequences read rows as steps of one series, which many checks do not allow for: see test_sequences.py.
OF_SEQUENCES = {"GaussianHMM", "PoissonHMM", "CategoricalHMM", "LinearGaussianStateSpace"}
TABULAR = [getattr(estimators, name)() for name in estimators.__all__ if name not in {*OF_SEQUENCES, "RidgeRegression"}]
# All of the checks of these are in the first tier, and of the others those that do not fit.
THOROUGHLY = [RidgeRegression(), LogisticRegression(recipe="laplace")]
WITHOUT_A_FIT = {
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_estimators_unfitted",
    "check_get_params_invariance",
    "check_mixin_order",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_set_params",
    "check_valid_tag_types",
}
# Fits of these run longer than they compile, with XLA's optimiser off.
LONG_RUNS = ("GaussianProcessClassifier", "LatentDirichletAllocation", "MLPClassifier", "MLPRegressor")


def cases(estimators, first_tier):
    """Every check of every estimator; those that `first_tier(name of the check)` leaves out are marked."""
    every = parametrize_with_checks(estimators)
    for estimator, check in every.args[1]:
        marks = [] if first_tier(check.func.__name__) else [pytest.mark.extended]
        name = "-".join(map(every.kwargs["ids"], (estimator, check)))
        yield pytest.param(estimator, check, id=name, marks=marks)


# The checks' data are noise, on which a fit need not converge, or have one class; both are said by a warning.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore:The posterior is improper")
@pytest.mark.parametrize(
    ("estimator", "check"), [*cases(THOROUGHLY, lambda name: True), *cases(TABULAR, WITHOUT_A_FIT.__contains__)]
)
def test_default_settings(estimator, check, request):
    if type(estimator).__name__ in LONG_RUNS:
        request.getfixturevalue("compiled_as_users")
    check(estimator)
