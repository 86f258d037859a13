"""Messages that are not conjugate: CVI, its sites, NCVMP, mean-field equations; against integrals and known optima."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.optimize import brentq, minimize
from scipy.special import expit, gammaln

import bayesrule as blr
from bayesrule import factors
from bayesrule.factor_graph.narrow_start import narrowed
from bayesrule.factor_graph.sites import summed_over_rows

SIZE, WIDTH = 60, 3


def design(seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=(SIZE, WIDTH))
    return random, x, x @ np.array([1.0, -1.5, 0.5])


def responses(kind, seed=0):
    random, x, f = design(seed)
    y = {
        "logit": lambda: random.random(SIZE) < expit(f),
        "probit": lambda: f + random.normal(size=SIZE) > 0,
        "poisson": lambda: random.poisson(np.exp(0.5 * f)),
        "student": lambda: f + 0.5 * random.standard_t(4, size=SIZE),
        "softmax": lambda: np.argmax(x + random.gumbel(size=(SIZE, 3)), axis=1),
    }[kind]()
    return {"x": x, "y": np.asarray(y, float)}


ONE = blr.Gaussian(jnp.zeros(WIDTH), jnp.eye(WIDTH))
THREE = blr.Gaussian(jnp.zeros((3, WIDTH)), jnp.eye(3 * WIDTH))
LIKELIHOODS = {
    "logit": (ONE, factors.bernoulli_logit("y", {"w": "x"})),
    "probit": (ONE, factors.bernoulli_probit("y", {"w": "x"})),
    "poisson": (ONE, factors.poisson_exp("y", {"w": "x"})),
    "student": (ONE, factors.student_t("y", {"w": "x"}, dof=4.0, scale=0.5)),
    "softmax": (THREE, factors.softmax("y", {"w": "x"})),
}
FAR = jnp.full(WIDTH, 5.0)


def regression(kind, **how):
    prior, likelihood = LIKELIHOODS[kind]
    if how:
        likelihood = getattr(factors, likelihood.label)("y", {"w": "x"}, **how)
    return blr.Model({"w": prior}, {"prior": factors.prior("w", prior), "y": likelihood}, size=SIZE)


@pytest.mark.extended
@pytest.mark.parametrize("rule", [blr.cvi(1.0), blr.ncvmp()], ids=lambda rule: rule.name)
def test_one_logistic_site(rule):
    """Infer.NET's NonconjugateVMPTests: x ~ N(0, 1), one observation y = 1."""
    prior = blr.Gaussian(jnp.zeros(1), jnp.eye(1))
    terms = {
        "prior": factors.prior("x", prior),
        "y": factors.bernoulli_logit("y", {"x": None}, points=blr.Quadrature(64)),
    }
    model = blr.Model({"x": prior}, terms)
    result = blr.fit(rule, model, None, {"y": jnp.array([1.0])}, steps=50, tolerance=1e-20)
    assert_allclose(result.q["x"].mean, 0.413126805979683, atol=1e-9)
    assert_allclose(1 / result.q["x"].precision, 0.828868291887001, atol=1e-9)


def flat(q):
    """A Gaussian's mean and the log of its precision's factor, in one vector: coordinates of our own."""
    factor = jnp.linalg.cholesky(q.precision)
    lower = jnp.tril_indices(factor.shape[0])
    return jnp.concatenate([jnp.ravel(q.mean), factor[lower]])


def unflat(vector, like):
    size = like.precision.shape[0]
    factor = jnp.zeros((size, size)).at[jnp.tril_indices(size)].set(vector[size:])
    return blr.Gaussian(vector[:size].reshape(jnp.shape(like.mean)), factor @ factor.T)


def assert_same_steps(whole, sites, tolerance):
    """Mean, precision and bound of the global form and of the site form."""
    assert_allclose(sites.q["w"].mean, whole.q["w"].mean, atol=tolerance)
    largest = np.max(np.abs(whole.q["w"].precision))
    assert_allclose(sites.q["w"].precision, whole.q["w"].precision, atol=tolerance * largest)
    assert_allclose(float(sites.bound), float(whole.bound), rtol=tolerance)


@pytest.mark.extended
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_cvi_ends_where_the_bound_is_flat_and_sites_take_the_same_steps(kind):
    """The plain gradient of the bound, in coordinates that the rule knows nothing of, is below 1e-6 at the end.

    The global form eq:blr_global and the site form eq:blr_local take the same steps, and λ is the sum of the sites.
    """
    model, data = regression(kind), responses(kind)
    # Student-t's log-likelihood is not concave: longer steps wander for a hundred steps before they settle.
    result = blr.fit(blr.cvi(0.3), model, None, data, steps=150, tolerance=1e-15)
    assert result.reason == "converged"

    @jax.jit
    @jax.grad
    def slope(vector):
        return model.bound(blr.Product({"w": unflat(vector, result.q["w"])}), data)

    assert np.max(np.abs(slope(flat(result.q["w"])))) < 1e-6
    whole, sites = (blr.fit(blr.cvi(0.3, sites=s), model, None, data, steps=60) for s in (False, True))
    assert_same_steps(whole, sites, 1e-10)
    assert_allclose(whole.trace["bound"], sites.trace["bound"], rtol=1e-12)
    assert_sum_of_sites(sites.state, data["x"], 1e-13)
    if kind not in ("logit", "softmax"):
        return
    kept, rows = sites.state.aux, model.batch_rows(data)
    total = kept["start"]["w"]
    for name in model.factors:
        part = summed_over_rows(model, name, sites.q, rows, kept["factors"][name])["w"]
        total = jax.tree.map(jnp.add, total, part)
    for one, other in zip(jax.tree.leaves(total), jax.tree.leaves(sites.q.natural()), strict=True):
        assert_allclose(one, other, rtol=1e-9, atol=1e-10)


PRECISIONS = pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])


def in_precision(kind, double):
    """The regression and its data with all numbers in one of the two precisions."""
    convert = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float64 if double else jnp.float32), tree)
    return convert(regression(kind)), convert(responses(kind))


def sum_of_sites(state, x):
    """λ of a prior N(0, I) and the stored sites of the outputs x_n·w, summed by NumPy in float64."""
    linear, curvature = (np.asarray(part, float) for part in state.aux["factors"]["y"]["outputs"])
    x = np.asarray(x, float)
    linear, curvature = linear.reshape(SIZE, -1), curvature.reshape((SIZE, linear.size // SIZE, -1))
    size = linear.shape[1] * WIDTH
    precision = np.einsum("nkl,np,nq->kplq", curvature, x, x).reshape(size, size)
    return np.einsum("nk,np->kp", linear, x).ravel(), -0.5 * (np.eye(size) + precision)


def assert_sum_of_sites(state, x, tolerance):
    for kept, summed in zip(state.q.natural()["w"], sum_of_sites(state, x), strict=True):
        assert_allclose(kept, summed, rtol=0, atol=tolerance * np.max(np.abs(summed)))


@pytest.mark.extended
@pytest.mark.as_users
def test_sites_of_counts_in_float32():
    """Poisson regression, 200 rows, from a prior N(0, I): the optimum of the bound by SciPy in float64."""
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 4))
    y = random.poisson(np.exp(x @ np.array([1.0, 0.5, -0.4, 0.0]))).astype(float)
    lower = np.tril_indices(4)

    def loss(vector):  # minus the bound over the mean and the factor of the covariance
        mean, factor = vector[:4], np.zeros((4, 4))
        factor[lower] = vector[4:]
        f, variance = x @ mean, np.sum((x @ factor) ** 2, axis=1)
        expected = np.sum(y * f - np.exp(f + 0.5 * variance) - gammaln(y + 1))
        return -expected + 0.5 * (mean @ mean + np.sum(factor**2) - 4) - np.sum(np.log(np.abs(np.diag(factor))))

    best = minimize(loss, np.concatenate([np.zeros(4), 0.1 * np.eye(4)[lower]]), method="BFGS", options={"gtol": 1e-6})
    with jax.enable_x64(False):
        prior = blr.Gaussian(jnp.zeros(4), jnp.eye(4))
        terms = {"prior": factors.prior("w", prior), "y": factors.poisson_exp("y", {"w": "x"})}
        data = {"x": jnp.asarray(x, jnp.float32), "y": jnp.asarray(y, jnp.float32)}
        model = blr.Model({"w": prior}, terms)
        for rule in (blr.cvi(0.5), blr.cvi(0.5, sites=True)):
            result = blr.fit(rule, model, None, data, steps=100, tolerance=1e-7)
            assert result.reason == "converged"
            assert_allclose(result.q["w"].mean, best.x[:4], atol=1e-4)
            assert_allclose(float(result.bound), -best.fun, atol=1e-3)


# One output and several; the other likelihoods take the same steps in float64 above, and here among the extended.
IN_FLOAT32 = ("poisson", "softmax")


@pytest.mark.extended
@pytest.mark.parametrize(
    "kind", [kind if kind in IN_FLOAT32 else pytest.param(kind, marks=pytest.mark.extended) for kind in LIKELIHOODS]
)
def test_sites_are_the_global_form_in_float32(kind):
    with jax.enable_x64(False):
        model, data = in_precision(kind, False)
        whole = blr.fit(blr.cvi(0.5), model, None, data, steps=60)
        sites = blr.fit(blr.cvi(0.5, sites=True), model, None, data, steps=60)
        assert sites.q["w"].mean.dtype == jnp.float32
    assert_same_steps(whole, sites, 1e-4)
    assert_sum_of_sites(sites.state, data["x"], 1e-5)


@pytest.mark.extended
@pytest.mark.as_users
@PRECISIONS
@pytest.mark.parametrize("batch_size", [SIZE, 16])
def test_a_huge_step_leaves_nothing_in_the_sites(batch_size, double):
    """The messages far away, where e^f is above 10⁸, are so long that in float32 their rounding exceeds the final λ.

    Full batches and mini-batches (the last of a pass is padded) end at the optimum all the same, and at λ = Σ λ̃ᵢ.
    """
    rule = blr.cvi(0.7, sites=True).replace(guard=blr.Backtracking())  # steps of any length
    with jax.enable_x64(double):
        model, data = in_precision("poisson", double)
        far = model.starting_point({"w": jax.tree.map(lambda x: x.astype(data["x"].dtype), blr.Gaussian(FAR))})
        best = blr.fit(blr.cvi(0.7), model, None, data, steps=60)
        step = jax.jit(rule.step)

        def batch(rows):
            index = jnp.zeros(batch_size, int).at[: len(rows)].set(rows)
            return model.select_rows(data, index, jnp.arange(batch_size) < len(rows))

        state = rule.init(far, model)
        passes = [np.random.default_rng(seed).permutation(SIZE) for seed in range(60)]
        for number, order in enumerate(passes):
            for place in range(0, SIZE, batch_size):
                rows = order[place : place + batch_size]
                state, _ = step(model, state, data if batch_size == SIZE else batch(rows))
            if number == 0:  # From the prior again, but with the sites of the pass far away.
                assert np.max(np.abs(state.aux["factors"]["y"]["outputs"][1])) > 1e8
                state = blr.State(model.starting_point(None), state.count, aux=state.aux)
    assert_allclose(state.q["w"].mean, best.q["w"].mean, atol=1e-10 if double else 1e-5)
    assert_allclose(state.q["w"].precision, best.q["w"].precision, atol=1e-8 if double else 1e-3)
    assert_sum_of_sites(state, data["x"], 1e-12 if double else 1e-5)


def test_rows_that_come_twice_in_a_pass_count_once():
    """Rows of the first batch come again before the pass has ended: λ is still the sum of all sites."""
    model, data = regression("logit"), responses("logit")
    rule = blr.cvi(0.7, sites=True)
    step, state = jax.jit(rule.step), rule.init(None, model)
    everyone = jnp.ones(20, bool)
    for first in (0, 0, 20, 0, 40, 20):
        state, _ = step(model, state, model.select_rows(data, jnp.arange(first, first + 20), everyone))
    assert_sum_of_sites(state, data["x"], 1e-12)


def test_sites_need_to_know_their_rows():
    model, data = regression("logit"), responses("logit")
    rule = blr.cvi(0.5, sites=True)
    with pytest.raises(ValueError, match=r"of 60 rows, and the batch has 16 without an index.*blr\.Rows"):
        rule.step(model, rule.init(None, model), {name: array[:16] for name, array in data.items()})


@pytest.mark.extended
def test_sites_of_weighted_rows_that_stand_for_others():
    """`count` scales all messages by N/M, in both forms alike."""
    model, data = regression("logit"), responses("logit")
    weighted = blr.Weighted(data, np.linspace(0, 2, SIZE), 2 * SIZE)
    whole, sites = (blr.fit(blr.cvi(0.5, sites=s), model, None, weighted, steps=20) for s in (False, True))
    assert_allclose(whole.q["w"].mean, sites.q["w"].mean, atol=1e-12)
    assert_sum_of_sites(blr.fit(blr.cvi(1.0, sites=True), model, None, weighted, steps=20).state, data["x"], 1e-12)


@pytest.mark.parametrize(
    "steps",
    [
        blr.Steps(0.5, temperature=0.5),
        blr.Steps(0.5, momentum=0.5),
        blr.Steps(blr.Rates(0.5, 0.1)),
        blr.Steps(0.5, sweep=blr.Sweep()),
        blr.Steps(0.5, reverse=True),
    ],
    ids=["temperature", "momentum", "two rates", "sweep", "reverse"],
)
def test_sites_take_plain_steps_only(steps):
    """Anything else would leave λ beside the sum of its sites."""
    with pytest.raises(ValueError, match=r"Sites\(\) take plain steps of all blocks at once"):
        blr.cvi(0.5, sites=True).replace(steps=steps)


@pytest.mark.extended
def test_sites_make_mini_batches_exact():
    """Batches renew their own sites, so that passes over the data end at the optimum itself, at a constant rate."""
    model, data = regression("logit"), responses("logit")
    best = blr.fit(blr.cvi(0.7), model, None, data, steps=150, tolerance=1e-20)
    rule = blr.cvi(0.5, sites=True)
    passes = blr.fit(rule, model, None, data, steps=400, batch_size=16, key=jax.random.key(0))
    assert_allclose(passes.q["w"].mean, best.q["w"].mean, atol=1e-9)
    assert_allclose(passes.q["w"].precision, best.q["w"].precision, atol=1e-8)


@pytest.mark.extended
def test_sites_of_weighted_rows_in_mini_batches():
    """Batches of rows that stand for others end where all of these rows do: each has the same N/count as there."""
    model = regression("logit")
    data = blr.Weighted(responses("logit"), np.linspace(0, 2, SIZE), 2 * SIZE)
    best = blr.fit(blr.cvi(0.7), model, None, data, steps=150, tolerance=1e-20)
    passes = blr.fit(blr.cvi(0.5, sites=True), model, None, data, steps=400, batch_size=16, key=jax.random.key(0))
    assert_allclose(passes.q["w"].mean, best.q["w"].mean, atol=1e-9)
    assert_allclose(passes.q["w"].precision, best.q["w"].precision, atol=1e-8)


def test_sites_of_rows_that_are_missing():
    """One by one, a missing row has nothing to stand in for it from the others: its site is 0 all the same."""
    prior = blr.DiagonalGaussian(0.0, 1.0)
    terms = {"p": factors.prior("m", prior), "y": factors.normal("y", mean="m", precision=2.0)}
    model = blr.Model({"m": prior}, terms, size=4)
    data = {"y": np.array([1.0, np.nan, np.nan, 2.0])}
    for more in ({}, {"batch_size": 2, "key": jax.random.key(0)}):
        result = blr.fit(blr.cvi(1.0, sites=True), model, None, data, steps=8, **more)
        assert_allclose([result.q["m"].mean, result.q["m"].precision], [6 / 5, 5], rtol=1e-10)


@pytest.mark.extended
def test_monte_carlo_messages_are_right_on_average():
    """Draws of the message against quadrature, with their standard error; a factor of values needs no outputs."""
    data = responses("logit")
    q = blr.Product({"w": blr.Gaussian(jnp.array([0.3, -0.2, 0.1]), 4 * jnp.eye(WIDTH) + 0.5)})

    def log_likelihood(w, x, y):
        return jax.nn.log_sigmoid((2 * y - 1) * (x @ w))

    def estimated(factor, key):
        model = blr.Model({"w": q["w"]}, {"y": factor}, size=SIZE)
        rows = model.batch_rows(jax.tree.map(jnp.asarray, data))
        shift = jax.tree.map(jnp.zeros_like, q.expectation())
        return jax.grad(lambda s: model.terms(model.views(q, s), rows, key)["y"])(shift)["w"]

    exact = estimated(factors.bernoulli_logit("y", {"w": "x"}, points=blr.Quadrature(40)), None)
    by_values = blr.Factor(log_likelihood, "w", data=("x", "y"), points=blr.MonteCarlo(2))
    by_outputs = factors.bernoulli_logit("y", {"w": "x"}, points=blr.MonteCarlo(2))
    on_grid = blr.Factor(log_likelihood, "w", data=("x", "y"), points=blr.Quadrature(20))
    for one, other in zip(exact, estimated(on_grid, None), strict=True):
        assert_allclose(one, 0.5 * (other + jnp.swapaxes(other, 0, -1)), atol=1e-8)
    keys = jax.random.split(jax.random.key(0), 4000)
    for factor in (by_values, by_outputs):
        draws = jax.jit(jax.vmap(lambda key, f=factor: estimated(f, key)))(keys)
        for one, many in zip(exact, draws, strict=True):
            many = 0.5 * (many + jnp.swapaxes(many, 1, -1)) if many.ndim == 3 else many
            error = np.std(many, axis=0) / np.sqrt(len(keys))
            assert np.all(np.abs(np.mean(many, axis=0) - one) < 5 * error)


@pytest.mark.extended
def test_monte_carlo_cvi_ends_near_the_optimum():
    model, data = regression("logit", points=blr.MonteCarlo(8, antithetic=True)), responses("logit")
    best = blr.fit(blr.cvi(0.7), regression("logit"), None, data, steps=150, tolerance=1e-18)
    rule = blr.cvi(lambda t: 1 / (t + 2.0))
    result = blr.fit(rule, model, None, data, steps=800, key=jax.random.key(1))
    # With ρ = 1/t the mean is an average of about as many messages as steps: a few hundredths of q's own width.
    assert float(result.q["w"].kl(best.q["w"])) < 5e-3


@pytest.mark.extended
def test_the_bound_beats_jaakkola_and_jordan_s():
    """Their quadratic bound on logistic regression, iterated to its optimum, on each of twenty seeds."""
    model = regression("logit")
    for seed in range(20):
        data = responses("logit", seed)
        ours = blr.fit(blr.cvi(0.7), model, None, data, steps=100, tolerance=1e-10)
        assert ours.bound > quadratic_bound(data["x"], data["y"])


def quadratic_bound(x, y):
    """log p(y) ≥ ½ log|S⁻¹| + ½ mᵀSm + Σ [log σ(ξ) − ξ/2 + c(ξ)ξ²], prior N(0, I) (Jaakkola and Jordan, 2000)."""
    scales = np.ones(len(y))
    for _ in range(500):
        weights = np.tanh(scales / 2) / (4 * scales)
        precision = np.eye(x.shape[1]) + 2 * (x.T * weights) @ x
        covariance = np.linalg.inv(precision)
        mean = covariance @ x.T @ (y - 0.5)
        scales = np.sqrt(np.einsum("np,pq,nq->n", x, covariance + np.outer(mean, mean), x))
    weights = np.tanh(scales / 2) / (4 * scales)
    precision = np.eye(x.shape[1]) + 2 * (x.T * weights) @ x
    mean = np.linalg.solve(precision, x.T @ (y - 0.5))
    rest = np.log(expit(scales)) - scales / 2 + weights * scales**2
    return 0.5 * mean @ precision @ mean - 0.5 * np.linalg.slogdet(precision)[1] + rest.sum()


@pytest.mark.extended
def test_a_boltzmann_machine_has_the_mean_field_equations():
    random = np.random.default_rng(3)
    couplings = 0.2 * random.normal(size=(6, 6))
    couplings, fields = couplings + couplings.T, 0.3 * random.normal(size=6)
    spins = blr.Bernoulli(jnp.zeros(6))
    model = blr.Model({"s": spins}, {"energy": factors.boltzmann("s", couplings, fields)})
    result = blr.fit(blr.vmp(), model, None, steps=300, tolerance=1e-24)
    means = np.asarray(result.q["s"].mean)
    off = couplings - np.diag(np.diag(couplings))
    assert_allclose(means, np.tanh(off @ means + fields), atol=1e-10)
    states = np.array(np.meshgrid(*[[-1, 1]] * 6)).reshape(6, -1).T
    exact = np.logaddexp.reduce(0.5 * np.einsum("si,ij,sj->s", states, off, states) + states @ fields)
    assert exact - 0.5 < result.bound < exact


@pytest.mark.extended
def test_ncvmp_is_damped_where_whole_steps_diverge():
    """Counts of 100 with rate e^{6w}, from N(0, 1): ρ = 1 leaps to and fro, and the guard's shorter steps do not."""
    prior = blr.Gaussian(jnp.zeros(1), jnp.eye(1))
    model = blr.Model({"w": prior}, {"prior": factors.prior("w", prior), "y": factors.poisson_exp("y", {"w": "x"})})
    data = {"x": jnp.full((5, 1), 6.0), "y": jnp.full(5, 100.0)}
    plain = blr.fit(blr.vmp(), model, None, data, steps=60, tolerance=1e-14)
    assert plain.reason != "converged"
    rule = blr.ncvmp()
    guarded = blr.fit(rule, model, None, data, steps=200, tolerance=1e-14, check=True)
    assert guarded.reason == "converged"
    assert np.any(guarded.trace["fraction"] < 1)
    # The first step from N(0, 1) would be shortened, so that `fit` began from a narrower start.
    begin = narrowed(model, model.starting_point(None), data)
    step, state, taken = jax.jit(rule.step), rule.init(begin, model), []
    for _ in range(10):
        state, info = step(model, state, data)
        taken.append(float(info.blocks["w"]))
    assert taken == guarded.trace["fraction"][:10].tolist()
    mean, variance = float(guarded.q["w"].mean[0]), 1 / float(guarded.q["w"].precision[0, 0])
    # The stationary equations, solved by SciPy: m = 6Σ(y − r), 1/v = 1 + 36Σr, r = e^{6m + 18v}.
    spread = lambda m: brentq(lambda v: 1 / v - 1 - 180 * np.exp(6 * m + 18 * v), 1e-9, 1.0, xtol=1e-16)
    root = brentq(lambda m: m - 6 * (500 - 5 * np.exp(6 * m + 18 * spread(m))), 0, 2, xtol=1e-14)
    assert_allclose([mean, variance], [root, spread(root)], rtol=1e-6)
