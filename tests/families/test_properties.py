"""What every exponential family must satisfy, whoever wrote it: one test per property."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bayesrule.families import Dirichlet, Family
from bayesrule.steps.step import Step
from cases import FAMILIES, OTHER_FAMILIES, public_subclasses

SAMPLES = 20_000
NEED_A_MEMBER = (
    "FixedGaussian",
    "DiagonalGaussian",
    "CategoricalChain",
    "GaussianProcess",
    "Product",
)  # λ alone does not say which q
RATE, TEMPERATURE, MOMENTUM = 0.1, 0.7, 0.1

# Almost all the time goes into compiling: each family is compiled a few times in all, and lightly.
compiled = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    },
)


@pytest.fixture(scope="module", params=FAMILIES)  # so that all tests of one family follow each other
def name(request):
    return request.param


def close(actual, desired, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, desired)


def estimates(values, expected):
    """The sample mean along axis 0 is within five standard errors of what is expected."""
    values = np.asarray(values)
    error = 5 * values.std(axis=0) / np.sqrt(len(values)) + 1e-10
    assert np.all(np.abs(values.mean(axis=0) - np.asarray(expected)) < error)


def members(name):
    """Two members that a divergence and a momentum can join: Ω's member and its neighbour."""
    q, other = FAMILIES[name].member(0), FAMILIES[name].member(1)
    return (q, type(q)(other.mean, q.precision)) if name == "FixedGaussian" else (q, other)


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def functional(q):
    """A smooth function of q that is linear neither in λ nor in μ."""
    squares = jax.tree.map(lambda x: jnp.sum(x**2), q.expectation())
    return sum(jax.tree.leaves(squares)) + jnp.sum(q.entropy())


@functools.cache
def draws(name):
    """Samples θ, T(θ) in coordinates, its derivative along a v in λ, F v, and log q and log other at θ."""

    def drawn(q, other, key):
        vector = 0.1 * jax.random.normal(key, q.coordinates(q.natural()).shape)

        def statistics(natural):
            theta = q.with_natural(natural).sample(key, (SAMPLES,))
            return jax.vmap(lambda t: q.coordinates(q.statistics(t)))(theta), theta

        if q.reparameterized:
            tangent = (q.uncoordinates(vector),)
            values, slopes, theta = jax.jvp(statistics, (q.natural(),), tangent, has_aux=True)
        else:
            values, theta = statistics(q.natural())
            slopes = None
        return theta, values, slopes, q.fisher() @ vector, q.log_prob(theta), other.log_prob(theta)

    return compiled(drawn)(*members(name), jax.random.key(7))


@functools.cache
def facts(name):
    """Everything about the example member that takes derivatives, in one compilation."""

    def measured(q, other):
        natural, expectation = q.natural(), q.expectation()
        vector = jax.random.normal(jax.random.key(1), q.coordinates(natural).shape)
        tree = q.uncoordinates(vector)

        def in_expectation(function):
            return q._symmetric(jax.grad(lambda x: jnp.sum(function(q.with_expectation(x))))(expectation))

        constant = jax.tree.map(jnp.zeros_like, natural)
        return {
            "inside": q.inside(),
            "natural": natural,
            "expectation": expectation,
            "coordinates": q.coordinates(expectation),
            "gradient": q._symmetric(jax.grad(lambda x: jnp.sum(q.log_partition(x)))(natural)),
            "fisher": q.fisher(),
            "vector": vector,
            "fisher_product": q.coordinates(q.fisher_product(tree)),
            "to_natural_gradient": q.coordinates(q.to_natural_gradient(tree)),
            "in expectation": in_expectation(functional),
            "natural gradient": q.natural_gradient(functional),
            "base": constant if q.constant_base() else in_expectation(lambda q: q.expected_log_base()),
            "entropy": q.entropy(),
            "kl": (q.kl(q), q.kl(other), q.cross_entropy(other)),
            "other": (other.natural(), other.expectation()),
        }

    return compiled(measured)(*members(name))


def test_every_public_family_is_listed():
    assert {*FAMILIES, *OTHER_FAMILIES} == public_subclasses(Family) - {"ExponentialFamily"}
    assert all((Path(__file__).parents[1] / file).exists() for file in OTHER_FAMILIES.values())


def test_natural_and_back(name):
    case = FAMILIES[name]

    def there_and_back(q):
        natural = q.natural()
        again = [] if name in NEED_A_MEMBER else [type(q).from_natural(natural)]
        return natural, [found.natural() for found in (q.with_natural(natural), *again)]

    for q in (case.member(),) if case.single else (case.member(), case.batched()):
        natural, back = compiled(there_and_back)(q)
        for found in back:
            close(found, natural, 1e-10)


def test_expectation_and_back(name):
    case = FAMILIES[name]
    q = stack([case.member(i) for i in range(3)]) if case.whole else case.batched()
    start = q if name == "FixedGaussian" else jax.tree.map(lambda x: x[jnp.array([1, 2, 0])], q)

    def solved(q, start):
        expectation = q.expectation()
        back = [start.with_expectation(expectation)]
        if name not in NEED_A_MEMBER:
            back.append(type(q).from_expectation(expectation))
        return q.natural(), [found.natural() for found in back]

    natural, back = compiled(jax.vmap(solved) if case.single else solved)(q, start)
    for found in back:
        close(found, natural, 1e-10)


def test_the_convex_solve_holds_over_orders_of_magnitude():
    # Large parameters: A's values round to more than the last steps gain, and must not stop the solve.
    size = 10.0 ** jnp.arange(-3, 5)
    q = Dirichlet(jnp.stack([size, 2 * size, jnp.ones_like(size)], axis=-1))
    found = compiled(lambda q: q.from_expectation(q.expectation()))(q)
    np.testing.assert_allclose(found.concentration, q.concentration, rtol=1e-10)


def test_the_gradient_of_the_log_partition_is_the_expectation(name):
    close(facts(name)["gradient"], facts(name)["expectation"], 1e-12)


def test_samples_have_the_expectation(name):
    estimates(draws(name)[1], facts(name)["coordinates"])


def test_the_fisher_is_the_covariance_of_the_statistics(name):
    deviation = np.asarray(draws(name)[1]) - np.asarray(facts(name)["coordinates"])
    estimates(deviation[:, :, None] * deviation[:, None, :], facts(name)["fisher"])


def test_lowered_and_raised_are_the_fisher_and_its_inverse(name):
    found = facts(name)
    close(found["fisher_product"], np.asarray(found["fisher"]) @ np.asarray(found["vector"]), 1e-10)
    close(found["to_natural_gradient"], np.linalg.solve(found["fisher"], found["vector"]), 1e-9)


def test_the_natural_gradient_is_the_gradient_in_the_expectation(name):
    # By the Fisher on one side; through λ(μ), with no Fisher of ours, on the other.
    found = facts(name)
    close(found["natural gradient"], found["in expectation"], 1e-8)


def test_reparameterized_samples_differentiate_the_expectation(name):
    # ∂/∂λ E_q T = F, so the mean derivative of T at the samples along v is F v.
    _, _, slopes, expected, _, _ = draws(name)
    assert (slopes is not None) == FAMILIES[name].member().reparameterized
    if slopes is not None:
        estimates(slopes, expected)


def test_the_batch_is_the_stack_of_its_members(name):
    case = FAMILIES[name]
    one_by_one = [case.member(i) for i in range(3)]
    theta = jax.tree.map(lambda x: x[:4], draws(name)[0])

    def measured(q, theta):
        other = jax.tree.map(lambda x: 1.1 * x, q)
        return q.log_prob(theta), q.entropy(), q.kl(other), q.natural(), q.expectation(), q.inside()

    single = compiled(measured)
    expected = stack([single(q, theta) for q in one_by_one])
    close(compiled(jax.vmap(measured, (0, None)))(stack(one_by_one), theta), expected, 1e-12)
    if not case.whole:
        # The same θ for each of the three members.
        repeated = jax.tree.map(lambda x: jnp.repeat(x[:, None], 3, axis=1), theta)
        log_prob, *rest = compiled(measured)(case.batched(), repeated)
        close((log_prob.T, *rest), expected, 1e-12)


def test_log_prob_has_the_shape_of_the_samples(name):
    def shape(q, *samples):
        return jax.eval_shape(lambda q: q.log_prob(q.sample(jax.random.key(0), samples)), q).shape

    case = FAMILIES[name]
    assert shape(case.member()) == ()
    assert shape(case.member(), 5, 2) == (5, 2)
    assert case.single or shape(case.batched(), 5, 2) == ((5, 2) if case.whole else (5, 2, 3))


def test_entropy_is_minus_the_expected_log_density(name):
    estimates(-draws(name)[4], facts(name)["entropy"])


def test_the_divergence_is_zero_from_itself_and_from_another_what_samples_say(name):
    itself, divergence, cross = facts(name)["kl"]
    assert abs(itself) < 1e-12
    assert divergence > 1e-3
    estimates(draws(name)[4] - draws(name)[5], divergence)
    close(cross, divergence + facts(name)["entropy"], 1e-12)


def test_float32_stays_float32(name):
    def lighter(x):
        return x if jnp.issubdtype(x.dtype, jnp.integer) else x.astype(jnp.float32)

    def measured(q, theta):
        natural, expectation = q.natural(), q.expectation()
        back = q.with_natural(natural).natural(), q.with_expectation(expectation).natural()
        return natural, *back, expectation, q.log_prob(theta), q.entropy(), q.kl(q)

    theta, _, _, _, log_prob, _ = draws(name)
    theta, log_prob = jax.tree.map(lambda x: x[:3], (theta, log_prob))
    small = jax.tree.map(lighter, FAMILIES[name].member())
    found = compiled(measured)(small, jax.tree.map(lighter, theta))
    drawn = jax.eval_shape(lambda q: q.sample(jax.random.key(0), (3,)), small)
    for leaf in jax.tree.leaves((found, drawn)):
        assert leaf.dtype == jnp.float32 or jnp.issubdtype(leaf.dtype, jnp.integer)
    natural, expectation, entropy = (facts(name)[key] for key in ("natural", "expectation", "entropy"))
    close(found, (natural, natural, natural, expectation, log_prob, entropy, 0.0), 5e-4)


def test_moved_is_the_rule_in_natural_and_in_expectation_coordinates(name):
    q, previous = members(name)
    known = facts(name)
    gradient = q.uncoordinates(0.1 * known["vector"])
    direction = jax.tree.map(lambda g, x, b: g + TEMPERATURE * (x + b), gradient, known["natural"], known["base"])
    dual = q.uncoordinates(known["fisher"] @ q.coordinates(direction))

    def moves(q, previous, gradient):
        def step(momentum, reverse):
            parts = q.derivatives(gradient)
            return Step(*parts, RATE, RATE, TEMPERATURE, momentum, previous, reverse)

        plain, pushed = q.moved(step(None, False)), q.moved(step(MOMENTUM, False))
        mirrored = q.moved(step(MOMENTUM, True))
        inside = plain.inside() & pushed.inside() & mirrored.inside()
        moved = plain.natural(), pushed.natural(), mirrored.expectation()
        return moved, inside, q.decrement(step(None, False))

    found, inside, decrement = compiled(moves)(q, previous, gradient)
    natural, expectation, before = known["natural"], known["expectation"], known["other"]
    plain = jax.tree.map(lambda x, d: x - RATE * d, natural, direction)
    pushed = jax.tree.map(lambda n, x, b: n + MOMENTUM * (x - b), plain, natural, before[0])
    mirrored = jax.tree.map(lambda x, d, b: x - RATE * d + MOMENTUM * (x - b), expectation, dual, before[1])
    assert inside
    close(found, (plain, pushed, mirrored), 1e-10)
    close(decrement, 0.5 * q.inner(direction, dual), 1e-10)


OUTSIDE = {
    "GaussianProcess": (jnp.zeros(3), jnp.full(3, 10.0)),
    "BandedGaussian": (jnp.zeros((2, 3)), jnp.zeros((2, 3, 3)), jnp.zeros((1, 3, 3))),
    "Bernoulli": {"bias": jnp.inf, "slope": jnp.zeros(2)},
    "Categorical": jnp.array([0.0, jnp.nan, 1.0]),
    "CategoricalChain": jnp.zeros((3, 2)).at[1, 0].set(jnp.inf),
    "Poisson": jnp.inf,
    "Dirichlet": jnp.array([0.5, -1.0, 2.0]),
    "Beta": (0.5, -1.1),
    "Gamma": (0.5, 0.0),
    "NormalGamma": (0.5, -1.0, 2.0, -0.5),  # rate = 1 − 2²/2 < 0
    "Wishart": (-1.0, -jnp.eye(3)),
    "NormalWishart": (1.0, -jnp.eye(3), 2 * jnp.ones(3), -0.5),
    "DiagonalGaussian": (
        {"bias": 1.0, "slope": jnp.ones(2)},
        {"bias": -1.0, "slope": jnp.array([-1.0, 0.5])},
    ),
    "Gaussian": (jnp.ones(3), jnp.diag(jnp.array([-1.0, -1.0, 0.5]))),
}


def test_inside_tells_the_open_set(name):
    case = FAMILIES[name]
    q = case.member()
    assert facts(name)["inside"]
    assert np.all(compiled(lambda q: q.inside())(case.batched()))
    if name in OUTSIDE:
        outside = jax.tree.map(jnp.asarray, OUTSIDE[name])
        # A step may end there: the member must carry it to `inside`, not raise.
        found = compiled(lambda q, natural: (q.inside(natural), q.with_natural(natural).inside()))(q, outside)
        assert not any(found)


@pytest.mark.parametrize("discrete", ["Bernoulli", "Categorical"])
def test_the_support_is_all_there_is(discrete):
    q = FAMILIES[discrete].member()
    support = q.support()
    weights = jnp.exp(q.log_prob(support))
    assert abs(weights.sum() - 1) < 1e-12
    exact = jax.tree.map(lambda t: jnp.tensordot(weights, t, 1), q.statistics(support))
    close(exact, q.expectation(), 1e-12)
    close(-weights @ q.log_prob(support), q.entropy(), 1e-12)
