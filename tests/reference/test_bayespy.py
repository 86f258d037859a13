"""Variational message passing with ρ = 1 takes BayesPy's own iterates (BayesPy 0.6.6, `make_bayespy.py`)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris

import bayesrule as blr
from bayesrule import factors

REFERENCE = json.loads((Path(__file__).parent / "data" / "bayespy.json").read_text())


def swept(case, model, start, data, order):
    """q after ten sweeps, each of which had BayesPy's bound."""
    result = blr.fit(blr.vmp(order=order), model, start, data, steps=10, check=True)
    bounds = [*result.trace["bound"][1:], result.bound]
    assert_allclose(bounds, case["elbo"], rtol=1e-10)
    return result.q, case["last"]


def same(q, state, **fields):
    for field, name in fields.items():
        assert_allclose(getattr(q, field), state[name], rtol=1e-8, atol=1e-11)


def test_normal_gamma():
    case = REFERENCE["normal_gamma"]
    vague = {"mean": blr.DiagonalGaussian(0.0, 1e-6), "precision": blr.Gamma(1e-6, 1e-6)}
    terms = {f"prior of {name}": factors.prior(name, q) for name, q in vague.items()}
    model = blr.Model(vague, {**terms, "y": factors.normal("y", mean="mean", precision="precision")})
    data = {"y": jnp.array(case["data"]["y"])}
    q, state = swept(case, model, None, data, ["mean", "precision"])
    same(q["mean"], state["mu"], mean="mean", precision="precision")
    same(q["precision"], state["tau"], shape="shape", rate="rate")
    result = blr.fit(blr.vmp(), model, None, data, steps=100, tolerance=1e-14)
    assert_allclose(result.bound, -58.202875, atol=1e-6)  # BayesPy's quickstart
    assert_allclose(result.q["mean"].mean, 4.028528, atol=1e-6)


def iris():
    """BayesPy's Wishart takes the inverse scale, so W(4, 0.01 I) there is df 4 and scale 100 I."""
    rows, labels = load_iris(return_X_y=True)
    means = blr.Gaussian(jnp.zeros((3, 4)), jnp.broadcast_to(0.01 * jnp.eye(4), (3, 4, 4)))
    precisions = blr.Wishart(4.0, jnp.broadcast_to(100.0 * jnp.eye(4), (3, 4, 4)))
    weights = blr.Dirichlet(jnp.ones(3))
    model = blr.Model(
        {"means": means, "precisions": precisions, "weights": weights},
        {
            "prior of means": factors.prior("means", means),
            "prior of precisions": factors.prior("precisions", precisions),
            "prior of weights": factors.prior("weights", weights),
            "z": factors.categorical("z", probabilities="weights"),
            "y": factors.choice("z", factors.multivariate_normal("y", mean="means", precision="precisions")),
        },
        local={"z": blr.Categorical(jnp.zeros(3))},
    )
    start = {"z": blr.Categorical(60.0 * jax.nn.one_hot(labels, 3))}
    return model, start, {"y": jnp.asarray(rows)}


@pytest.mark.extended
def test_mixture_of_gaussians():
    case = REFERENCE["mixture"]
    model, start, data = iris()
    order = ["means", "precisions", "weights", "z"]
    q, state = swept(case, model, start, data, order)
    same(q["means"], state["mu"], mean="mean", precision="precision")
    same(q["precisions"], state["Lambda"], df="dof")
    assert_allclose(jnp.linalg.inv(q["precisions"].scale), state["Lambda"]["inverse_scale"], rtol=1e-7, atol=1e-9)
    same(q["weights"], state["alpha"], concentration="concentration")
    assert_allclose(q["z"].probabilities, state["z"]["probabilities"], atol=1e-9)


@pytest.mark.extended
def test_mixture_converges_to_the_published_bound():
    """REFERENCE: ELBO −354.19739, counts 51, 45.77934, 56.22066."""
    model, start, data = iris()
    result = blr.fit(
        blr.vmp(order=["means", "precisions", "weights", "z"]), model, start, data, steps=1000, tolerance=1e-10
    )
    assert result.reason == "converged"
    assert_allclose(result.bound, -354.19739, atol=1e-4)
    assert_allclose(result.q["weights"].concentration, [51, 45.77934, 56.22066], atol=1e-4)


@pytest.mark.extended
def test_pca_with_ard():
    case = REFERENCE["pca"]
    start = case["start"]
    scales = blr.Gamma(jnp.full(3, 1e-3), 1e-3)
    loadings = blr.Gaussian(jnp.array(start["W"]["mean"]), jnp.array(start["W"]["precision"]))
    model = blr.Model(
        {"loadings": loadings, "scales": blr.Gamma(jnp.ones(3), 1.0), "noise": blr.Gamma(1.0, 1.0)},
        {
            "prior of scales": factors.prior("scales", scales),
            "prior of noise": factors.prior("noise", blr.Gamma(1e-3, 1e-3)),
            "ard": factors.gaussian("loadings", precision="scales"),
            "latent": factors.prior("latent", blr.Gaussian(jnp.zeros(3), jnp.eye(3))),
            "y": factors.bilinear("y", "latent", "loadings", precision="noise"),
        },
        local={"latent": blr.Gaussian(jnp.zeros(3), jnp.eye(3))},
    )
    data = {"y": jnp.array(case["data"]["y"]).T}
    order = ["latent", "loadings", "scales", "noise"]
    q, state = swept(case, model, None, data, order)
    same(q["latent"], state["X"], mean="mean", precision="precision")
    same(q["loadings"], state["W"], mean="mean", precision="precision")
    same(q["scales"], state["alpha"], shape="shape", rate="rate")
    same(q["noise"], state["tau"], shape="shape", rate="rate")


@pytest.mark.extended
def test_linear_state_space():
    """States, loadings and transitions all unknown, with a precision for every column of the latter two."""
    case = REFERENCE["chain"]
    start, size = case["start"], len(case["data"]["y"][0])
    vague = {"scales": blr.Gamma(jnp.full(2, 1e-3), 1e-3), "rates": blr.Gamma(jnp.full(2, 1e-3), 1e-3)}
    given = lambda name: blr.Gaussian(jnp.array(start[name]["mean"]), jnp.array(start[name]["precision"]))
    model = blr.Model(
        {
            "loadings": given("C"),
            "transition": given("A"),
            "scales": blr.Gamma(jnp.ones(2), 1.0),
            "rates": blr.Gamma(jnp.ones(2), 1.0),
            "noise": blr.Gamma(1.0, 1.0),
        },
        {
            **{f"prior of {name}": factors.prior(name, q) for name, q in vague.items()},
            "prior of noise": factors.prior("noise", blr.Gamma(1e-3, 1e-3)),
            "loadings": factors.gaussian("loadings", precision="scales"),
            "transition": factors.gaussian("transition", precision="rates"),
            "beginning": factors.beginning("states", mean=jnp.zeros(2), precision=0.1 * jnp.eye(2)),
            "dynamics": factors.dynamics("states", transition="transition"),
            "y": factors.bilinear("y", "states", "loadings", precision="noise"),
        },
        local={"states": blr.BandedGaussian.independent(size, 2)},
    )
    data = {"y": jnp.array(case["data"]["y"]).T[None]}
    order = ["states", "loadings", "scales", "transition", "rates", "noise"]
    q, state = swept(case, model, None, data, order)
    assert_allclose(q["states"].mean[0], state["X"]["mean"], rtol=1e-8, atol=1e-10)
    assert_allclose(q["states"].expectation()[1][0], state["X"]["second_moment"], rtol=1e-8)
    same(q["loadings"], state["C"], mean="mean", precision="precision")
    same(q["transition"], state["A"], mean="mean", precision="precision")
    same(q["scales"], state["gamma"], shape="shape", rate="rate")
    same(q["rates"], state["alpha"], shape="shape", rate="rate")
    same(q["noise"], state["tau"], shape="shape", rate="rate")


@pytest.mark.extended
def test_lda():
    case = REFERENCE["lda"]
    size, words, topics = (case["data"][name] for name in ("documents", "vocabulary", "topics"))
    document, word, count = (jnp.array(column) for column in zip(*case["data"]["doc_word_count"], strict=True))

    def tokens(z, theta, beta, word, document):
        return jnp.sum(z.probabilities * (theta.expectation[document] + beta.expectation.T[word]), axis=-1)

    model = blr.Model(
        {
            "theta": blr.Dirichlet(jnp.full((size, topics), 0.1)),
            "beta": blr.Dirichlet(jnp.array(case["start"]["beta"]["concentration"])),
        },
        {
            "prior of theta": factors.prior("theta", blr.Dirichlet(jnp.full(topics, 0.1))),
            "prior of beta": factors.prior("beta", blr.Dirichlet(jnp.full(words, 0.05))),
            "words": blr.Factor(tokens, "z", "theta", "beta", data=("word", "document"), of="seen"),
        },
        local={"z": blr.Categorical(jnp.zeros(topics))},
    )
    data = blr.Weighted({"word": word, "document": document}, count)  # equal tokens of a document share their q(z)
    order = ["z", "theta", "beta"]
    q, state = swept(case, model, None, data, order)
    same(q["theta"], state["theta"], concentration="concentration")
    same(q["beta"], state["beta"], concentration="concentration")
