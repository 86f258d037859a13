"""Models: what a factor says, missing entries, streams, bounds by part, errors that name the factor and the block."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats as st
from numpy.testing import assert_allclose

import bayesrule as blr
from bayesrule import factors
from bayesrule.factor_graph import expected_log
from bayesrule.models.topics import documents, latent_dirichlet

RANDOM = np.random.default_rng(0)


def normal_gamma(**more):
    vague = {"mean": blr.DiagonalGaussian(0.0, 0.1), "precision": blr.Gamma(2.0, 1.0)}
    terms = {f"prior of {name}": factors.prior(name, q) for name, q in vague.items()}
    return blr.Model(vague, {**terms, "y": factors.normal("y", mean="mean", precision="precision")}, **more)


Y = RANDOM.normal(2.0, 0.5, size=12)


# What ready-made factors say: E log f by draws of the blocks, log f by SciPy.

MATRIX = np.array([[2.0, 0.3], [0.3, 1.0]])
X, TARGET, COUNTS = RANDOM.normal(size=(4, 2)), RANDOM.normal(size=4), np.array([0.0, 3.0, 1.0, 7.0])
WEIGHTS = blr.Gaussian(jnp.array([0.4, -0.3]), jnp.array(3 * MATRIX))
NOISE, MEAN = blr.Gamma(5.0, 3.0), blr.DiagonalGaussian(0.5, 4.0)
JOINT = blr.NormalWishart(jnp.array([0.1, 0.4]), 2.0, 6.0, jnp.array(0.2 * MATRIX))
ROWS = jnp.array(RANDOM.normal(size=(3, 2)))


def mvn(y, mean, precision):
    return st.multivariate_normal.logpdf(y, mean, np.linalg.inv(precision))


CASES = {
    "normal": (
        factors.normal("y", mean="m", precision="t"),
        {"m": MEAN, "t": NOISE},
        {"y": TARGET},
        lambda v, d: st.norm.logpdf(d["y"], v["m"], v["t"] ** -0.5).sum(),
    ),
    "normal, known precision": (
        factors.normal("y", mean="m", precision=2.0),
        {"m": MEAN},
        {"y": TARGET},
        lambda v, d: st.norm.logpdf(d["y"], v["m"], 2.0**-0.5).sum(),
    ),
    "normal, joint": (
        factors.normal("y", joint="b"),
        {"b": blr.NormalGamma(0.3, 2.0, 4.0, 2.0)},
        {"y": TARGET},
        lambda v, d: st.norm.logpdf(d["y"], v["b"]["mean"], v["b"]["precision"] ** -0.5).sum(),
    ),
    "gaussian": (
        factors.gaussian("w", precision="t"),
        {"w": WEIGHTS, "t": NOISE},
        {},
        lambda v, d: st.norm.logpdf(v["w"], 0, v["t"] ** -0.5).sum(),
    ),
    "multivariate": (
        factors.multivariate_normal("y", mean="m", precision="t"),
        {"m": WEIGHTS, "t": blr.Wishart(6.0, jnp.array(0.2 * MATRIX))},
        {"y": X},
        lambda v, d: mvn(d["y"], v["m"], v["t"]).sum(),
    ),
    "multivariate, joint": (
        factors.multivariate_normal("y", joint="b"),
        {"b": JOINT},
        {"y": X},
        lambda v, d: mvn(d["y"], v["b"]["mean"], v["b"]["precision"]).sum(),
    ),
    "linear": (
        factors.linear("y", {"w": "x"}, precision="t"),
        {"w": WEIGHTS, "t": NOISE},
        {"x": X, "y": TARGET},
        lambda v, d: st.norm.logpdf(d["y"], d["x"] @ v["w"], v["t"] ** -0.5).sum(),
    ),
    "bilinear": (
        factors.bilinear("y", "x", "w", precision="t"),
        {
            "x": blr.Gaussian(ROWS, jnp.array([3 * MATRIX] * 3)),
            "w": blr.Gaussian(ROWS[:2], jnp.array([4 * MATRIX] * 2)),
            "t": NOISE,
        },
        {"y": RANDOM.normal(size=(3, 2))},
        lambda v, d: st.norm.logpdf(d["y"], v["x"] @ v["w"].T, v["t"] ** -0.5).sum(),
    ),
    "categorical": (
        factors.categorical("z", probabilities="p"),
        {"z": blr.Categorical(jnp.array([[0.0, 1.0, 0.5]])), "p": blr.Dirichlet(jnp.array([2.0, 3.0, 4.0]))},
        {},
        lambda v, d: np.log(v["p"][v["z"]]).sum(),
    ),
    "category": (
        factors.category("y", probabilities="p"),
        {"p": blr.Dirichlet(jnp.array([2.0, 3.0, 4.0]))},
        {"y": np.array([0, 2, 2])},
        lambda v, d: np.log(v["p"][d["y"]]).sum(),
    ),
    "choice": (
        factors.choice("z", factors.normal("y", mean="m", precision="t")),
        {
            "z": blr.Categorical(jnp.array([[0.0, 1.0], [0.5, 0.0]])),
            "m": blr.DiagonalGaussian(jnp.array([0.0, 1.0]), 5.0),
            "t": blr.Gamma(jnp.array([3.0, 5.0]), 2.0),
        },
        {"y": TARGET[:2]},
        lambda v, d: st.norm.logpdf(d["y"], v["m"][v["z"]], v["t"][v["z"]] ** -0.5).sum(),
    ),
    "poisson": (
        factors.poisson("y", rate="r"),
        {"r": blr.Gamma(4.0, 2.0)},
        {"y": COUNTS},
        lambda v, d: st.poisson.logpmf(d["y"], v["r"]).sum(),
    ),
    "bernoulli": (
        factors.bernoulli("y", probability="p"),
        {"p": blr.Beta(3.0, 2.0)},
        {"y": np.array([0.0, 1.0, 1.0])},
        lambda v, d: st.bernoulli.logpmf(d["y"], v["p"]).sum(),
    ),
    "bernoulli_logit": (
        factors.bernoulli_logit("y", {"w": "x"}),
        {"w": WEIGHTS},
        {"x": X, "y": np.array([0.0, 1.0, 1.0, 0.0])},
        lambda v, d: st.bernoulli.logpmf(d["y"], 1 / (1 + np.exp(-d["x"] @ v["w"]))).sum(),
    ),
    "bernoulli_probit": (
        factors.bernoulli_probit("y", {"w": "x"}),
        {"w": WEIGHTS},
        {"x": X, "y": np.array([0.0, 1.0, 1.0, 0.0])},
        lambda v, d: st.bernoulli.logpmf(d["y"], st.norm.cdf(d["x"] @ v["w"])).sum(),
    ),
    "poisson_exp": (
        factors.poisson_exp("y", {"w": "x"}),
        {"w": WEIGHTS},
        {"x": X, "y": COUNTS},
        lambda v, d: st.poisson.logpmf(d["y"], np.exp(d["x"] @ v["w"])).sum(),
    ),
    "softmax": (
        factors.softmax("y", {"w": "x"}),
        {"w": blr.DiagonalGaussian(jnp.array([[0.1, 0.2], [0.5, -0.4], [0.0, 0.3]]), 4.0)},
        {"x": X, "y": np.array([0, 2, 1, 1])},
        lambda v, d: (d["x"] @ v["w"].T - np.logaddexp.reduce(d["x"] @ v["w"].T, axis=1)[:, None])[
            np.arange(4), d["y"]
        ].sum(),
    ),
    "student_t": (
        factors.student_t("y", {"w": "x", "m": None}, dof=3.0, scale=0.7),
        {"w": WEIGHTS, "m": blr.DiagonalGaussian(jnp.zeros(4), 9.0)},
        {"x": X, "y": TARGET},
        lambda v, d: st.t.logpdf(d["y"], 3.0, d["x"] @ v["w"] + v["m"], 0.7).sum(),
    ),
    "boltzmann": (
        factors.boltzmann("s", np.array([[0.0, 0.5], [0.5, 0.0]]), np.array([0.2, -0.1])),
        {"s": blr.Bernoulli(jnp.array([0.3, -0.2]))},
        {},
        lambda v, d: 0.5 * v["s"][0] * v["s"][1] + 0.2 * v["s"][0] - 0.1 * v["s"][1],
    ),
    "any function, by draws and a sum": (
        blr.Factor(lambda w, z: jnp.sin(w[0]) * z, "w", "z", points={"w": blr.Quadrature(20), "z": blr.Enumeration()}),
        {"w": WEIGHTS, "z": blr.Categorical(jnp.array([0.0, 1.0, 0.5]))},
        {},
        lambda v, d: np.sin(v["w"][0]) * v["z"],
    ),
}


@pytest.mark.sampled(
    "multivariate", "bilinear", "softmax", "student_t", "boltzmann", "any function, by draws and a sum"
)
@pytest.mark.parametrize("name", CASES)
def test_a_factor_is_the_expectation_of_its_log(name):
    """4000 draws of the blocks, SciPy's density: within five standard errors; and its message is finite and needs no
    hand: moving a block by a little along any direction of μ changes it as the message says."""
    factor, blocks, data, log_density = CASES[name]
    model = blr.Model(blocks, {"f": factor})
    q = blr.Product(blocks)
    sample, expected = jax.jit(
        lambda q, rows: (q.sample(jax.random.key(0), (4000,)), model.terms(model.views(q), rows))
    )(q, jax.tree.map(jnp.asarray, data))
    draws = jax.tree.map(np.asarray, sample)
    values = [log_density(jax.tree.map(lambda x, i=i: x[i], draws), data) for i in range(4000)]
    assert abs(float(expected["f"]) - np.mean(values)) < 5 * np.std(values) / np.sqrt(4000) + 1e-12


@pytest.mark.extended
def test_messages_are_derivatives_in_the_expectation_parameters():
    """By finite differences of the factor between neighbours q, with their μ: dE log f = ⟨message, dμ⟩."""
    for name in ("linear", "bilinear", "multivariate, joint", "choice", "student_t"):
        factor, blocks, data, _ = CASES[name]
        model, q = blr.Model(blocks, {"f": factor}), blr.Product(blocks)
        rows = jax.tree.map(jnp.asarray, data)
        value = jax.jit(lambda member, model=model, rows=rows: model.terms(model.views(member), rows)["f"])
        shift = jax.tree.map(jnp.zeros_like, q.expectation())
        message = jax.jit(jax.grad(lambda s, model=model, q=q, rows=rows: model.terms(model.views(q, s), rows)["f"]))(
            shift
        )
        step = jax.tree.map(lambda x: 1e-5 * jnp.sin(1.0 + jnp.arange(x.size)).reshape(x.shape), q.natural())
        ahead, behind = (
            q.with_natural(jax.tree.map(lambda n, d, s=s: n + s * d, q.natural(), q._symmetric(step))) for s in (1, -1)
        )
        change = jax.tree.map(jnp.subtract, ahead.expectation(), behind.expectation())
        expected = sum(jnp.vdot(m, c) for m, c in zip(jax.tree.leaves(message), jax.tree.leaves(change), strict=True))
        assert_allclose(value(ahead) - value(behind), expected, rtol=1e-6)


# Missing entries.


@pytest.mark.extended
def test_a_missing_entry_sends_no_message():
    model, holes = normal_gamma(), np.where(np.arange(12) % 3 == 0, np.nan, Y)
    some = blr.fit(blr.vmp(), model, None, {"y": holes}, steps=20)
    mask = blr.Masked(jnp.nan_to_num(jnp.array(holes)), jnp.array(~np.isnan(holes)))
    masked = blr.fit(blr.vmp(), model, None, {"y": mask}, steps=20)
    rest = blr.fit(blr.vmp(), model, None, {"y": Y[np.arange(12) % 3 != 0]}, steps=20)
    for one, other, third in zip(*map(jax.tree.leaves, (some.q, rest.q, masked.q)), strict=True):
        assert_allclose(one, other, rtol=1e-12)
        assert_allclose(one, third, rtol=1e-12)
    assert_allclose(some.bound, rest.bound, rtol=1e-12)


@pytest.mark.extended
@pytest.mark.extended
def test_missing_entries_of_a_matrix():
    """Entry by entry in a factor that has a term for each; a row that is taken whole is there or not."""
    factor, blocks, _, _ = CASES["bilinear"]
    model, q = blr.Model(blocks, {"f": factor}), blr.Product(blocks)
    y = RANDOM.normal(size=(3, 2))
    full = factor.value(model.views(q), {"y": jnp.array(y)})
    actual = model.term("f", model.views(q), model.batch_rows({"y": jnp.array(y).at[1, 0].set(jnp.nan)}), None)
    assert_allclose(actual, jnp.where(jnp.array([[1, 1], [0, 1], [1, 1]]) == 1, full, 0.0))
    joint = blr.Model({"b": JOINT}, {"y": factors.multivariate_normal("y", joint="b"), "p": factors.prior("b", JOINT)})
    rows = X.copy()
    rows[1] = np.nan
    absent = blr.fit(blr.conjugate(), joint, None, {"y": rows}, steps=1)
    rest = blr.fit(blr.conjugate(), joint, None, {"y": X[[0, 2, 3]]}, steps=1)
    assert_allclose(absent.bound, rest.bound, rtol=1e-12)
    rows[0, 0] = np.nan
    apart = blr.Model({"m": WEIGHTS}, {"y": factors.multivariate_normal("y", mean="m", precision=jnp.eye(2))})
    with pytest.raises(ValueError, match="Factor 'y' takes each row of 'y' whole, and some rows are missing in part"):
        blr.fit(blr.conjugate(), apart, None, {"y": rows}, steps=1)
    regression = blr.Model({"w": WEIGHTS}, {"y": factors.linear("y", {"w": "x"})})
    with pytest.raises(ValueError, match="takes 'x', which has entries that are not finite"):
        blr.fit(blr.conjugate(), regression, None, {"x": np.where(X > 1, np.nan, X), "y": TARGET}, steps=1)


# Bounds.


@pytest.mark.extended
def test_contributions_add_up_to_the_bound():
    model = normal_gamma()
    result = blr.fit(blr.vmp(), model, None, {"y": Y}, steps=20, check=True)
    parts = model.contributions(result.q, {"y": Y})
    assert set(parts["factors"]) == set(model.factors)
    assert set(parts["blocks"]) == {"mean", "precision"}
    total = sum(parts["factors"].values()) + sum(parts["blocks"].values())
    assert_allclose(total, result.bound, rtol=1e-13)
    assert np.all(np.diff(result.trace["bound"]) >= -1e-12)
    # Against the evidence itself: the mean's integral in closed form, the precision's by quadrature.
    from scipy.integrate import quad

    def log_given(t):
        covariance = np.eye(12) / t + 10.0
        return st.multivariate_normal(np.zeros(12), covariance).logpdf(Y) + st.gamma(2.0).logpdf(t)

    evidence = np.log(quad(lambda t: np.exp(log_given(t) + 10), 0, 50, limit=200)[0]) - 10
    assert evidence - 0.1 < result.bound < evidence


@pytest.mark.extended
def test_check_catches_a_wrong_factor():
    wrong = blr.Factor(
        lambda mean, t, y: 0.5 * (t[0] - t[1] * (y - mean[0]) ** 2 + 3 * mean[1] * t[1]), "mean", "precision", data="y"
    )
    model = normal_gamma()
    broken = blr.Model(model.blocks, {**model.factors, "y": wrong})
    with pytest.raises(ValueError, match="The bound fell by"):
        blr.fit(blr.vmp(rate=1.9), model, None, {"y": Y}, steps=20, check=True)
    assert blr.fit(blr.vmp(), broken, None, {"y": Y}, steps=5).reason == "left the domain"
    with pytest.raises(ValueError, match="check=True needs an exact bound"):
        blr.fit(blr.vmp(), model, None, {"y": Y}, steps=2, batch_size=4, key=jax.random.key(0), check=True)


# Streams.


@pytest.mark.extended
def test_a_stream_of_pieces_is_the_whole():
    """The posterior becomes the prior: exact for a conjugate model, whatever the pieces."""
    prior = blr.NormalGamma(0.0, 1.0, 2.0, 1.0)
    first = blr.Model({"b": prior}, {"prior": factors.prior("b", prior), "y": factors.normal("y", joint="b")})
    model, evidence = first, 0.0
    for piece in (Y[:5], Y[5:6], Y[6:]):
        result = blr.fit(blr.conjugate(), model, None, {"y": piece}, steps=1)
        evidence += result.bound
        model = model.after(result.q)
    full = blr.fit(blr.conjugate(), first, None, {"y": Y}, steps=1)
    for one, other in zip(jax.tree.leaves(result.q), jax.tree.leaves(full.q), strict=True):
        assert_allclose(one, other, rtol=1e-12)
    assert_allclose(evidence, full.bound, rtol=1e-12)


def test_forgetting_weighs_the_past():
    prior = blr.Gamma(2.0, 1.0)
    first = blr.Model({"r": prior}, {"prior": factors.prior("r", prior), "y": factors.poisson("y", rate="r")})
    observed = blr.fit(blr.conjugate(), first, None, {"y": COUNTS}, steps=1)
    model = first.after(observed.q, forgetting=0.25)
    result = blr.fit(blr.conjugate(), model, None, {"y": np.array([2.0])}, steps=1)
    assert_allclose(result.q["r"].shape, 2.0 + 0.75 * COUNTS.sum() + 2.0)
    assert_allclose(result.q["r"].rate, 1.0 + 0.75 * 4 + 1)
    third = blr.fit(blr.conjugate(), model.after(result.q, forgetting=0.25), None, {"y": np.array([5.0])}, steps=1)
    assert_allclose(third.q["r"].shape, 2.0 + 0.75 * (0.75 * COUNTS.sum() + 2.0) + 5.0)


@pytest.mark.parametrize("size", [None, 5])
def test_a_weight_is_a_number_of_repetitions(size):
    """A mean under N(0, 1) and y ∼ N(m, ½): the posterior by hand, the bound as SciPy's evidence of repeated rows."""
    y, weights = np.array([1.0, -0.5, 0.3, 2.0, 0.7]), np.array([2, 1, 0, 3, 1])
    repeated, prior = np.repeat(y, weights), blr.DiagonalGaussian(0.0, 1.0)
    terms = {"m": factors.prior("m", prior), "y": factors.normal("y", mean="m", precision=2.0)}
    data = blr.Weighted({"y": y}, jnp.asarray(weights, float))
    result = blr.fit(blr.conjugate(), blr.Model({"m": prior}, terms, size=size), None, data, steps=1)
    assert_allclose([result.q["m"].mean, result.q["m"].precision], [2 * repeated.sum() / 15, 15], rtol=1e-12)
    evidence = st.multivariate_normal(np.zeros(7), 0.5 * np.eye(7) + 1).logpdf(repeated)
    assert_allclose(result.bound, evidence, rtol=1e-12)


# Points on blocks of values.


def value_of(factor, **blocks):
    model = blr.Model(blocks, {"f": factor})
    return model.terms(model.views(blr.Product(blocks)), None)["f"]


def test_points_do_not_couple_plates_by_mistake():
    """A grid looks at every plate by itself: a factor in which plates meet is refused, not answered wrongly."""
    pair = blr.Gaussian(jnp.zeros((2, 1)), jnp.ones((2, 1, 1)))
    meet = lambda u: (u[0, 0] - u[1, 0]) ** 2
    for points in (blr.Quadrature(5), blr.Delta()):
        with pytest.raises(ValueError, match=r"Factor 'f' .*If the factor couples plates, use MonteCarlo"):
            value_of(blr.Factor(meet, "u", points=points), u=pair)
    assert_allclose(
        value_of(blr.Factor(meet, "u", points=blr.Quadrature(5)), u=blr.Gaussian(jnp.zeros((2, 1)), 1.0)), 2
    )
    each = lambda u: u[:, 0] ** 4
    assert_allclose(value_of(blr.Factor(each, "u", points=blr.Quadrature(5)), u=pair), 6)
    curved = lambda u: 1 + u[:, 0] ** 2  # to second order, ½·2·1 for each plate
    assert_allclose(value_of(blr.Factor(curved, "u", points=blr.Delta()), u=pair), 4)


@pytest.mark.parametrize("order", ["uv", "vu"])
def test_two_blocks_under_the_delta_method_end_at_the_mode(order):
    """−2(uv − 1)² under N(0, 1/0.4) each: u = v = √0.9 and −∂² = 4, by hand, whichever block the factor names first."""
    prior = blr.DiagonalGaussian(0.0, 0.4)
    product = blr.Factor(lambda u, v: -2.0 * (u * v - 1) ** 2, *order, points=blr.Delta())
    model = blr.Model({"u": prior, "v": prior}, {"u": factors.prior("u", prior), "v": factors.prior("v", prior),
                      "f": product})  # fmt: skip
    start = {"u": blr.DiagonalGaussian(1.5, 1.0), "v": blr.DiagonalGaussian(1.0, 1.0)}
    result = blr.fit(blr.cvi(0.3), model, start, steps=300)
    for block in result.q.blocks.values():
        assert_allclose([block.mean, block.precision], [np.sqrt(0.9), 4.0], rtol=1e-6)


def test_a_sure_choice_still_hears_its_messages():
    """E_q f is linear in the probabilities, so the message is right where they are 0 and 1 to machine precision."""
    f = blr.Factor(lambda z: jnp.array([1.0, 3.0])[z], "z", points=blr.Enumeration())
    for logit in (0.0, 20.0, 800.0):
        q = blr.Product({"z": blr.Categorical(jnp.array([logit, 0.0]))})
        model = blr.Model(q.blocks, {"f": f})
        message = jax.grad(lambda s, m=model, q=q: m.terms(m.views(q, {"z": s}), None)["f"])(jnp.zeros(1))
        assert_allclose(message, -2.0)
    spin = blr.Factor(lambda s: s[0] * s[1], "s", points=blr.Enumeration())
    assert_allclose(value_of(spin, s=blr.Bernoulli(jnp.array([0.5, -1.0]))), np.tanh(0.5) * np.tanh(-1.0))


def test_a_latent_number_for_each_row_by_quadrature():
    """Poisson counts of e^x with x ~ N(0, 1) for each row: the closed form's optimum, missing rows at the prior."""
    prior = blr.DiagonalGaussian(0.0, 1.0)
    log_p = lambda x, y: y * x - jnp.exp(x) - jax.scipy.special.gammaln(y + 1)
    by_grid = blr.Factor(log_p, "x", data="y", points=blr.Quadrature(30))
    closed = factors.poisson_exp("y", {"x": None})
    y = np.array([0.0, 3.0, np.nan, 7.0])
    ends = [
        blr.fit(
            blr.cvi(0.6),
            blr.Model({}, {"p": factors.prior("x", prior), "y": f}, local={"x": prior}),
            None,
            {"y": y},
            steps=60,
        )
        for f in (by_grid, closed)
    ]
    assert_allclose(ends[0].q["x"].mean, ends[1].q["x"].mean, atol=1e-8)
    assert_allclose(ends[0].bound, ends[1].bound, atol=1e-8)
    assert_allclose([ends[0].q["x"].mean[2], ends[0].q["x"].precision[2]], [0, 1], atol=1e-9)


@pytest.mark.extended
def test_outputs_of_one_gaussian_over_several():
    """Two outputs of one full Gaussian: the evidence of two regressions side by side; and weights of each row's own."""
    y = RANDOM.normal(size=(4, 2))
    both = blr.Gaussian(jnp.zeros((2, 2)), 1.0)
    terms = {"p": factors.prior("w", both), "y": factors.linear("y", {"w": "x"}, precision=2.0)}
    result = blr.fit(blr.conjugate(), blr.Model({"w": both}, terms), None, {"x": X, "y": y}, steps=1)
    exact = sum(st.multivariate_normal(np.zeros(4), np.eye(4) / 2 + X @ X.T).logpdf(y[:, k]) for k in range(2))
    assert_allclose(result.bound, exact, rtol=1e-10)
    assert result.loo().log_density.shape == (4,)
    own = blr.Gaussian(jnp.zeros(2), 1.0)
    rowed = {"p": factors.prior("w", own), "y": factors.linear("y", {"w": "x"}, precision=2.0)}
    result = blr.fit(blr.conjugate(), blr.Model({}, rowed, local={"w": own}), None, {"x": X, "y": TARGET}, steps=1)
    assert_allclose(result.bound, st.norm(0, np.sqrt(0.5 + (X**2).sum(1))).logpdf(TARGET).sum(), rtol=1e-10)


def test_filling_of_ragged_rows_is_missing():
    prior = blr.DiagonalGaussian(0.0, 1.0)
    values = np.where(np.arange(4) < np.array([[1], [2], [4]]), 1.0, 100.0)
    model = blr.Model(
        {},
        {
            "p": factors.prior("m", prior),
            "y": blr.Factor(lambda mu, y: y * mu[0][:, None] - 0.5 * mu[1][:, None], "m", data="y"),
        },
        local={"m": prior},
    )
    result = blr.fit(blr.vmp(), model, None, {"y": blr.Ragged(values, np.array([1, 2, 4]))}, steps=1)
    assert_allclose(result.q["m"].mean, [1 / 2, 2 / 3, 4 / 5])


# Errors.


@pytest.mark.extended
@pytest.mark.parametrize("rule", [blr.vmp(), blr.cvi(0.5), blr.cvi(0.5, sites=True)])
def test_without_rows_the_posterior_is_the_prior(rule):
    prior = blr.Gaussian(jnp.arange(3.0), 2 * jnp.eye(3))
    terms = {"prior": factors.prior("w", prior), "y": factors.linear("y", {"w": "x"}, precision=4.0)}
    data = {"x": np.zeros((0, 3)), "y": np.zeros(0)}
    start = {"w": blr.Gaussian(jnp.zeros(3), jnp.eye(3))}
    result = blr.fit(rule, blr.Model({"w": prior}, terms), start, data, steps=60, tolerance=1e-12)
    assert result.reason == "converged"
    assert_allclose(result.bound, 0.0, atol=1e-10)
    assert_allclose(result.q["w"].mean, prior.mean, atol=1e-4)
    assert_allclose(result.q["w"].precision, prior.precision, atol=1e-4)
    assert result.loo().log_density.shape == (0,)


@pytest.mark.extended
def test_a_bound_without_a_prior_is_said_to_be_one_up_to_a_constant():
    start, data = blr.Gaussian(jnp.zeros(2), jnp.eye(2)), {"x": X, "y": TARGET}
    likelihood = factors.linear("y", {"w": "x"}, precision=4.0)
    flat = blr.fit(blr.cvi(1.0), blr.Model({"w": start}, {"y": likelihood}), None, data, steps=2)
    evidence = -0.5 * (np.linalg.lstsq(X, TARGET, rcond=None)[1][0] * 4 + np.linalg.slogdet(4 * X.T @ X)[1])
    assert_allclose(flat.bound, evidence + 2 * np.log(4) - np.log(2 * np.pi), rtol=1e-10)  # for the density 1
    assert not flat.normalized
    assert "(up to the prior's constant)" in repr(flat)
    model = blr.Model({"w": start}, {"prior": factors.prior("w", start), "y": likelihood})
    known = blr.fit(blr.cvi(1.0), model, None, data, steps=2)
    assert known.normalized
    assert known.bound is not None
    assert "constant" not in repr(known)
    assert model.after(known.q).regularizer.normalized(known.q)
    assert blr.fit(blr.em(), blr.Model({"w": start}, {"y": likelihood}), None, data, steps=1).normalized  # a likelihood


def test_a_mixture_without_rows():
    prior = blr.NormalWishart(jnp.zeros((2, 2)), jnp.ones(2), jnp.full(2, 4.0), jnp.broadcast_to(jnp.eye(2), (2, 2, 2)))
    weights = blr.Dirichlet(jnp.ones(2))
    terms = {"prior of weights": factors.prior("weights", weights), "prior": factors.prior("parts", prior)}
    terms["y"] = factors.mixture("weights", factors.multivariate_normal("y", joint="parts"))
    model = blr.Model({"weights": weights, "parts": prior}, terms)
    assert_allclose(blr.fit(blr.vmp(), model, None, {"y": np.zeros((0, 2))}, steps=5).bound, 0.0, atol=1e-10)
    local = latent_dirichlet(3, 2)
    with pytest.raises(ValueError, match=r"no rows, and the local blocks \['shares'\]"):
        blr.fit(blr.vmp(), local, None, {"words": jnp.zeros((0, 3), int), "counts": jnp.zeros((0, 3))}, steps=5)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_words_that_are_not_in_the_vocabulary(wrong):
    """JAX moves an index outside of an array to its end, and drops its derivative."""
    model = latent_dirichlet(4, 2)
    rows = documents([[5, 4, 0, 0], [6, 3, 0, 1], [0, 0, 4, 5]])
    words = eqx.tree_at(lambda ragged: ragged.values, rows["words"], rows["words"].values.at[1, 2].set(wrong))
    with pytest.raises(ValueError, match=rf"1 of 28 occurrences .* numbers {wrong}, .* 0, …, 3"):
        blr.fit(blr.svi(1.0, local_steps=5), model, None, {**rows, "words": words}, steps=1)
    value = jax.jit(expected_log.words)
    table, shares = jnp.log(jnp.full((2, 4), 0.25)), jnp.log(jnp.full((3, 2), 0.5))
    terms = value(shares, table, words.values, rows["counts"].values)
    assert_allclose(terms, [9 * np.log(0.25), np.nan, 9 * np.log(0.25)])  # the padding of other rows may be anything
    padded = rows["words"].values.at[0, 2].set(wrong)
    assert_allclose(value(shares, table, padded, rows["counts"].values)[0], 9 * np.log(0.25))


def test_wrong_models_say_what_is_wrong():
    good = normal_gamma()
    prior = factors.prior("mean", blr.DiagonalGaussian(0.0, 1.0))
    with pytest.raises(
        ValueError, match=r"Factor 'y' names the block 'scale', and the model has \['mean', 'precision'\]"
    ):
        blr.Model(good.blocks, {"y": factors.normal("y", mean="mean", precision="scale")})
    with pytest.raises(ValueError, match="No factor touches the block 'precision'"):
        blr.Model(good.blocks, {"prior": prior})
    with pytest.raises(ValueError, match="A model needs factors"):
        blr.Model(good.blocks, {})
    with pytest.raises(ValueError, match="blocks are exponential families"):
        blr.Model({"mean": 3.0}, {"prior": prior})
    with pytest.raises(ValueError, match="is both"):
        blr.Model(good.blocks, good.factors, local={"mean": blr.DiagonalGaussian(0.0)})
    with pytest.raises(ValueError, match="'y' is a function"):
        blr.Model(good.blocks, {**good.factors, "y": lambda mu: mu})
    with pytest.raises(ValueError, match="names the blocks that it touches"):
        blr.Factor(lambda mu: mu)
    with pytest.raises(ValueError, match="points= names"):
        blr.Factor(lambda w: w, "w", points={"v": blr.Delta()})
    with pytest.raises(ValueError, match="the prior is a Gamma and the block a DiagonalGaussian"):
        blr.fit(
            blr.vmp(),
            blr.Model({"mean": good.blocks["mean"]}, {"p": factors.prior("mean", blr.Gamma(1.0, 1.0))}),
            None,
            steps=1,
        )


def test_data_that_do_not_fit_say_so():
    model = normal_gamma()
    shaped = blr.Model({"mean": blr.DiagonalGaussian(jnp.zeros(5))}, {"y": factors.normal("y", mean="mean")})
    with pytest.raises(ValueError, match=r"Factor 'y' on blocks .*'mean'.* with data .*broadcast"):
        blr.fit(blr.vmp(), shaped, None, {"y": Y}, steps=1)
    with pytest.raises(ValueError, match="there is no 'y'"):
        blr.fit(blr.vmp(), model, None, {"x": Y}, steps=1)
    with pytest.raises(ValueError, match="arrays by name"):
        blr.fit(blr.vmp(), model, None, Y, steps=1)
    regression = blr.Model({"w": WEIGHTS}, {"y": factors.linear("y", {"w": "x"})})
    with pytest.raises(ValueError, match="the same number of rows"):
        blr.fit(blr.vmp(), regression, None, {"x": X, "y": Y}, steps=1)
    with pytest.raises(ValueError, match="The start names"):
        blr.fit(blr.vmp(), model, {"scale": blr.Gamma(1.0, 1.0)}, {"y": Y}, steps=1)
    with pytest.raises(ValueError, match=r"The sweep goes over \['mean'\], and the model's blocks are"):
        blr.fit(blr.vmp(order=["mean"]), model, None, {"y": Y}, steps=1)
    with pytest.raises(ValueError, match="There is no block 'scale' to read at its mode"):
        blr.fit(blr.em("scale"), model, None, {"y": Y}, steps=1)
    drawn = blr.Factor(lambda w: -jnp.sum(w**4), "w", points=blr.MonteCarlo(2))
    with pytest.raises(ValueError, match="This fit is random"):
        blr.fit(blr.cvi(0.5), blr.Model({"w": WEIGHTS}, {"f": drawn}), None, steps=1)


@pytest.mark.extended
def test_labels_that_are_none_of_the_classes():
    p = blr.Dirichlet(jnp.ones(3))
    model = blr.Model({"p": p}, {"prior": factors.prior("p", p), "y": factors.category("y", probabilities="p")})
    with pytest.raises(ValueError, match="factor 'y' on the blocks"):
        blr.fit(blr.conjugate(), model, None, {"y": np.array([1, 2, 3])}, steps=1)


def test_values_of_a_block_at_its_peak_are_refused():
    values = blr.Factor(lambda t, y: jnp.log(t) - t * y, "t", data="y", points=blr.Delta())
    model = blr.Model({"t": blr.Gamma(2.0, 1.0)}, {"y": values})
    with pytest.raises(ValueError, match="A Gamma that is read at its peak gets no message from a function"):
        blr.fit(blr.em(), model, None, {"y": Y}, steps=1)
    flat = blr.Dirichlet(jnp.ones(3))
    with pytest.raises(ValueError, match="The block 'p' has no mode at its start"):
        blr.fit(
            blr.em(),
            blr.Model({"p": flat}, {"y": factors.category("y", probabilities="p")}),
            None,
            {"y": np.array([0])},
            steps=1,
        )


def test_more_wrong_ways_in():
    model = normal_gamma()
    for start, data, more, match in (
        (jnp.zeros(3), {"y": Y}, {}, "A model starts from its blocks"),
        (None, {"y": [1.0, 2.0]}, {}, "arrays by name"),
        (None, {"y": Y}, {"microbatches": 2}, "remove microbatches="),
    ):
        with pytest.raises(ValueError, match=match):
            blr.fit(blr.vmp(), model, start, data, steps=1, **more)
    with pytest.raises(ValueError, match="mean and covariance of a Gaussian block, and got a Gamma"):
        blr.fit(blr.vmp(), blr.Model({"m": NOISE}, {"y": factors.normal("y", mean="m")}), None, {"y": Y}, steps=1)
    coin = blr.Objective(lambda mu, y: -y * mu["p"][0], size=2)
    with pytest.raises(ValueError, match="vmp takes a model's blocks in turn"):
        blr.fit(blr.vmp(), coin, {"p": blr.Beta(1.0, 1.0)}, jnp.ones(2), steps=1)
    with pytest.raises(ValueError, match="order= lists blocks"):
        blr.vmp(order="backwards")


@pytest.mark.extended
def test_a_factor_that_is_not_finite_is_named():
    sick = blr.Factor(lambda mu, y: jnp.log(y) * mu[0], "mean", data="y")
    model = blr.Model({"mean": MEAN}, {"prior": factors.prior("mean", MEAN), "sick": sick})
    with pytest.raises(ValueError, match=r"factor 'sick' on the blocks \['mean'\] has the value -inf"):
        blr.fit(blr.vmp(), model, None, {"y": np.array([0.0, 1.0])}, steps=3)
    steep = blr.Factor(lambda mu, y: jnp.sqrt(mu[0] - 0.5) * y, "mean", data="y")
    model = blr.Model({"mean": MEAN}, {"prior": factors.prior("mean", MEAN), "steep": steep})
    with pytest.raises(ValueError, match="the message of factor 'steep' to the block 'mean' is not finite"):
        blr.fit(blr.vmp(), model, None, {"y": np.array([1.0])}, steps=3)


def test_a_model_prints_its_log_joint():
    said = str(blr.Model({"w": WEIGHTS, "t": NOISE}, {"p": factors.prior("w", WEIGHTS), "y": CASES["linear"][0]}))
    assert "w  Gaussian[2]" in said
    assert "y  E log linear(x·w, t; y)  in closed form" in said


@pytest.mark.sampled("1.5", "3.0")
@pytest.mark.parametrize("wrong", [-1.0, 1.5, 3.0])
def test_a_label_that_is_none_is_no_other_one(wrong):
    """−1 counts from the end elsewhere."""
    model = blr.Model(
        {"p": blr.Dirichlet(jnp.ones(3))},
        {"prior": factors.prior("p", blr.Dirichlet(jnp.ones(3))), "y": factors.category("y", probabilities="p")},
    )
    with pytest.raises(ValueError, match=r"factor 'y' on the blocks .* has the value nan"):
        blr.fit(blr.conjugate(), model, None, {"y": jnp.array([0.0, 1.0, wrong])}, steps=1)
