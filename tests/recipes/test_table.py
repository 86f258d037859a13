"""Table 1 says what the paper's does: the column of approximations, phrase by phrase."""

import pytest

import bayesrule as blr

# The column "Natural-Gradient Approx." of the paper's tab:summary, with its ditto marks written out.
PAPER = {
    "Gradient descent": "Delta method",
    "Newton's method": "Delta method",
    "Multimodal optimization": "Delta method",
    "SGD": "Delta method, stochastic approx.",
    "RMSprop/Adam": (
        "Delta method, stochastic approx., Hessian approx., square-root scaling, slow-moving scale vectors"
    ),
    "Dropout": "Delta method, stochastic approx., responsibility approx.",
    "STE": "Delta method, stochastic approx.",
    "Online Gauss-Newton (OGN)": "Gauss-Newton Hessian approx. in Adam & no square-root scaling",
    "Variational OGN": "Remove delta method from OGN",
    "BayesBiNN": "Remove delta method from STE",
    "Conjugate Bayes": "Set learning rate ρ_t = 1",
    "Laplace's method": "Delta method",
    "Expectation-Maximization": "Delta method for the parameters",
    "Stochastic VI (SVI)": "Stochastic approx., local ρ_t = 1",
    "Variational message passing (VMP)": "ρ_t = 1 for all nodes",
    "Non-conjugate VMP": "ρ_t = 1 for all nodes",
    "Non-conjugate VI": "None",
}
# What we say beside the paper's words: how the expectation is taken where the delta method was removed.
MORE = {"Variational OGN": {"monte carlo"}, "BayesBiNN": {"concrete relaxation"}}
ROWS = {row.name: row for row in blr.table()}


def phrases(cell):
    return {phrase.strip().lower().replace("ρ_t", "ρ") for phrase in cell.split(",")}


def said_by_the_paper(name):
    """The phrases of a row, with those that refer to another row resolved."""
    cell = PAPER[name]
    if name == "Online Gauss-Newton (OGN)":
        adam = said_by_the_paper("RMSprop/Adam") - {"hessian approx.", "square-root scaling"}
        return adam | {"gauss-newton hessian approx."}
    if cell.startswith("Remove delta method from "):
        other = {"OGN": "Online Gauss-Newton (OGN)", "STE": "STE"}[cell.split()[-1]]
        return said_by_the_paper(other) - {"delta method"}
    return phrases(cell.replace("Set learning rate ", ""))


@pytest.mark.parametrize("name", PAPER)
def test_the_column_of_approximations_is_the_paper_s(name):
    ours = phrases(ROWS[name].approximations)
    assert ours == said_by_the_paper(name) | MORE.get(name, set())


def test_the_rows_beside_the_paper_s():
    assert set(ROWS) - set(PAPER) == {"Variational online Newton", "Exponential weights"}


def test_the_phrases_come_from_the_pieces():
    """Changing a piece changes the row."""
    adam = ROWS["RMSprop/Adam"]
    rule = adam.rule.replace(points=blr.MonteCarlo(1), curvature=blr.GaussNewton())
    changed = type(adam)("", "", "", "", rule).approximations
    assert changed == (
        "Monte Carlo, stochastic approx., Gauss-Newton Hessian approx., square-root scaling, slow-moving scale vectors"
    )
    assert type(adam)("", "", "", "", blr.svi(1.0)).approximations == "ρ = 1 for all nodes"
