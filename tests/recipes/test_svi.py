"""Stochastic variational inference: whole data and ρ = 1 is VMP; mini-batches, local blocks in groups, topic models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris
from sklearn.decomposition import LatentDirichletAllocation

import bayesrule as blr
from bayesrule import factors

ROWS = load_iris().data - load_iris().data.mean(0)
PRIORS = {
    "weights": blr.Dirichlet(jnp.full(3, 2.0)),
    "components": blr.NormalWishart(jnp.zeros(4), 0.1, 6.0, 0.5 * jnp.eye(4)),
}
START = blr.NormalWishart(jnp.array(ROWS[[10, 60, 120]]), jnp.ones(3), jnp.full(3, 6.0), jnp.stack([jnp.eye(4)] * 3))


def mixture(**more):
    terms = {f"prior of {name}": factors.prior(name, prior) for name, prior in PRIORS.items()}
    terms["z"] = factors.categorical("z", probabilities="weights")
    terms["y"] = factors.choice("z", factors.multivariate_normal("y", joint="components"))
    blocks = {"weights": PRIORS["weights"], "components": START}
    return blr.Model(blocks, terms, local={"z": blr.Categorical(jnp.zeros(3))}, **more)


def same(one, other, **tolerance):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert_allclose(a, b, **tolerance)


@pytest.mark.extended
def test_svi_with_all_of_the_data_and_whole_steps_is_vmp():
    order = ["z", "weights", "components"]
    vmp = blr.fit(blr.vmp(order=order), mixture(), None, {"y": ROWS}, steps=12, check=True)
    svi = blr.fit(blr.svi(1.0, order=order), mixture(), None, {"y": ROWS}, steps=12)
    same(vmp.q, svi.q, rtol=1e-12, atol=1e-14)
    assert_allclose(vmp.trace["bound"], svi.trace["bound"], rtol=1e-12)


@pytest.mark.extended
def test_blocks_at_once_and_damped_end_where_a_sweep_does():
    swept = blr.fit(blr.vmp(), mixture(), None, {"y": ROWS}, steps=300, tolerance=1e-12)
    for rule in (blr.vmp(0.5, order="parallel"), blr.cvi(0.5)):
        result = blr.fit(rule, mixture(), None, {"y": ROWS}, steps=300, tolerance=1e-12)
        assert swept.reason == result.reason == "converged"
        assert_allclose(result.bound, swept.bound, rtol=1e-10)


@pytest.mark.extended
def test_choices_that_are_summed_out_are_the_same_sweep():
    summed = blr.Model(
        {"weights": PRIORS["weights"], "components": START},
        {
            **{f"prior of {name}": factors.prior(name, prior) for name, prior in PRIORS.items()},
            "y": factors.mixture("weights", factors.multivariate_normal("y", joint="components")),
        },
    )
    explicit = blr.fit(blr.vmp(order=["z", "weights", "components"]), mixture(), None, {"y": ROWS}, steps=12)
    result = blr.fit(blr.vmp(order="parallel"), summed, None, {"y": ROWS}, steps=12, check=True)
    same(explicit.q["components"], result.q["components"], rtol=1e-10)
    assert result.bound > explicit.bound  # it has the best q(z) for the others, not the sweep's


@pytest.mark.extended
def test_an_epoch_of_mini_batches_has_the_whole_message_on_average():
    """With ρ small, the batches of one epoch move λ by ρ times the sum of their messages: N/M of each on average."""
    model, rate = mixture(), 1e-6
    order = ["z", "weights", "components"]
    whole = blr.fit(blr.svi(rate, order=order), model, None, {"y": ROWS}, steps=1)
    batches = blr.fit(
        blr.svi(rate, order=order), model, None, {"y": ROWS}, steps=5, batch_size=30, key=jax.random.key(0)
    )
    before, natural = model.with_size(150).starting_point(None).natural(), lambda result: result.q.natural()
    for name in ("weights", "components"):
        one = jax.tree.map(jnp.subtract, natural(whole)[name], before[name])
        five = jax.tree.map(jnp.subtract, natural(batches)[name], before[name])
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(five), strict=True):
            assert_allclose(b / 5, a, rtol=1e-3, atol=1e-9)
    same(whole.q["z"].probabilities, batches.q["z"].probabilities, atol=1e-3)  # every row had its turn


@pytest.mark.extended
def test_mini_batches_come_close_to_the_optimum():
    model, rule = mixture(), blr.svi(lambda t: (t + 5.0) ** -0.7)
    best = blr.fit(blr.vmp(), model, None, {"y": ROWS}, steps=300, tolerance=1e-10)
    result = blr.fit(rule, model, None, {"y": ROWS}, steps=400, batch_size=40, key=jax.random.key(1))
    settled = blr.fit(blr.svi(0.0), model, result.q, {"y": ROWS}, steps=1)  # the rows' own blocks, for the bound
    assert best.bound - 0.5 < settled.bound <= best.bound + 1e-9


@pytest.mark.extended
@pytest.mark.parametrize(
    "order",
    [
        None,
        pytest.param("parallel", marks=pytest.mark.extended),
        pytest.param(["z", ("weights", "components")], marks=pytest.mark.extended),
        [("z", "weights"), "components"],
    ],
)
def test_batches_and_weights_are_scaled_whatever_the_order(order):
    """After one whole step the weights' concentrations add up to the prior's and all rows', however they came."""
    model, rule = mixture(), blr.vmp(order=order)
    half = blr.fit(rule, model, None, {"y": ROWS}, steps=1, batch_size=40, key=jax.random.key(0))
    assert_allclose(jnp.sum(half.q["weights"].concentration), 156, rtol=1e-10)
    twice = blr.fit(rule, model, None, blr.Weighted({"y": jnp.array(ROWS)}, jnp.full(150, 2.0)), steps=1)
    assert_allclose(jnp.sum(twice.q["weights"].concentration), 306, rtol=1e-10)


@pytest.mark.extended
def test_the_bounds_of_mini_batches_average_to_the_bound_of_all_rows():
    """Every batch's terms and its local blocks' entropies, by SciPy, count N/M times."""
    model = mixture(size=150)
    logits = np.random.default_rng(0).normal(size=(150, 3))
    q = model.starting_point({"z": blr.Categorical(jnp.array(logits))})
    entropies = scipy.stats.entropy(np.exp(logits), axis=1)
    order = np.random.default_rng(1).permutation(150)
    contributions, bounds = jax.jit(lambda q, rows: model.contributions(q, rows)), []
    for index in order.reshape(5, 30):
        part = blr.Product({**q.blocks, "z": blr.Categorical(jnp.array(logits[index]))})
        rows = blr.Rows({"y": jnp.array(ROWS[index])}, jnp.array(index))
        terms = contributions(part, rows)
        assert_allclose(terms["blocks"]["z"], 5 * entropies[index].sum(), rtol=1e-12)
        bounds.append(sum(jax.tree.leaves(terms)))
    assert_allclose(np.mean(bounds), sum(jax.tree.leaves(contributions(q, {"y": jnp.array(ROWS)}))), rtol=1e-12)


@pytest.mark.extended
def test_padding_changes_no_row():
    """A batch of rows 3 and 7 with two rows of padding: the local blocks of all other rows stay, the last one's too."""
    model, rule = mixture(size=150), blr.svi(0.5)
    state = rule.init(None, model)
    index = jnp.array([3, 7, 0, 0])
    batch = model.select_rows({"y": jnp.array(ROWS)}, index, jnp.array([True, True, False, False]))
    assert_allclose(model.row_scales(batch, 4), [75.0, 75.0, 0.0, 0.0])  # N/M with the two rows that are there
    after, _ = jax.jit(rule.step)(model, state, batch)
    change = np.abs(after.q["z"].natural() - state.q["z"].natural()).sum(axis=-1)
    assert_allclose(np.flatnonzero(change), [3, 7])


@pytest.mark.extended
def test_loops_of_one_s_own():
    model, rule = mixture(size=150), blr.svi(1.0)
    step = jax.jit(rule.step)
    batch, index = {"y": jnp.array(ROWS[:30])}, jnp.arange(30)
    state, _ = step(model, rule.init(None, model), blr.Rows(batch, index))
    assert_allclose(jnp.sum(state.q["weights"].concentration), 156, rtol=1e-10)
    assert_allclose(state.q["z"].logits[30:], 0)
    with pytest.raises(ValueError, match=r"Local blocks have 150 rows and the batch 30 without an index"):
        rule.step(model, rule.init(None, model), batch)
    shared = blr.Model({"m": blr.DiagonalGaussian(0.0)}, {"y": factors.normal("y", mean="m")}, size=100)
    cvi = blr.cvi(1.0)
    state, _ = cvi.step(shared, cvi.init(None, shared), {"y": jnp.ones(10)})
    assert_allclose(state.q["m"].precision, 100)


# Topics.

DOCUMENTS, VOCABULARY, TOPICS = 40, 30, 3


def corpus():
    random = np.random.default_rng(0)
    topics = random.dirichlet(np.full(VOCABULARY, 0.1), TOPICS)
    shares = random.dirichlet(np.full(TOPICS, 0.3), DOCUMENTS)
    lengths = random.integers(10, 80, DOCUMENTS)
    return np.stack([random.multinomial(n, p) for n, p in zip(lengths, shares @ topics, strict=True)]), random


def rows_of(counts):
    """Word numbers and how often they occur, a row for each document, filled up to the longest."""
    lengths = np.count_nonzero(counts, axis=1)
    order = np.argsort(counts == 0, axis=1, kind="stable")[:, : lengths.max()]
    return order, np.take_along_axis(counts, order, axis=1).astype(float), lengths


def topic_model(start):
    return blr.Model(
        {"topics": blr.Dirichlet(jnp.array(start))},
        {
            "prior of topics": factors.prior("topics", blr.Dirichlet(jnp.full(VOCABULARY, 0.1))),
            "prior of shares": factors.prior("shares", blr.Dirichlet(jnp.full(TOPICS, 0.5))),
            "words": factors.words("n", "w", documents="shares", topics="topics"),
        },
        local={"shares": blr.Dirichlet(jnp.ones(TOPICS))},
    )


def test_lda_takes_scikit_learn_s_variational_step():
    """Batch variational Bayes: with the documents settled, the topics are what scikit-learn's next iteration has."""
    counts, random = corpus()
    start = random.gamma(100.0, 0.01, (TOPICS, VOCABULARY))
    theirs = LatentDirichletAllocation(
        TOPICS, doc_topic_prior=0.5, topic_word_prior=0.1, max_iter=1, max_doc_update_iter=2000, mean_change_tol=1e-10
    )
    theirs._init_latent_vars(VOCABULARY, dtype=np.float64)
    theirs.components_, theirs.exp_dirichlet_component_ = start, np.exp(blr.Dirichlet(jnp.array(start)).expectation())
    theirs._em_step(counts.astype(float), total_samples=DOCUMENTS, batch_update=True)
    words, often, lengths = rows_of(counts)
    rule = blr.svi(1.0, local_steps=2000, tolerance=1e-10)
    plain = blr.fit(rule, topic_model(start), None, {"w": words, "n": often}, steps=1)
    assert_allclose(plain.q["topics"].concentration, theirs.components_, rtol=1e-7)
    ragged = {"w": blr.Ragged(words, lengths), "n": blr.Ragged(often, lengths)}
    grouped = blr.fit(
        blr.svi(1.0, local_steps=2000, tolerance=1e-10, together=8), topic_model(start), None, ragged, steps=1
    )
    assert_allclose(grouped.q["topics"].concentration, plain.q["topics"].concentration, rtol=1e-8)
    assert_allclose(grouped.q["shares"].concentration, plain.q["shares"].concentration, rtol=1e-7)


@pytest.mark.extended
def test_words_are_the_best_choice_of_topics():
    """Σ_w n_w log Σ_k exp(…) is the bound with the best q(z): as an explicit maximum over the choices."""
    counts, random = corpus()
    words, often, _ = rows_of(counts)
    shares, topics = (blr.Dirichlet(jnp.array(random.gamma(2.0, 1.0, shape))) for shape in ((DOCUMENTS, 3), (3, 30)))
    model = topic_model(topics.concentration).with_size(DOCUMENTS)
    q = blr.Product({"shares": shares, "topics": topics})
    actual = model.term("words", model.views(q), model.batch_rows({"w": jnp.array(words), "n": jnp.array(often)}), None)
    logits = np.asarray(shares.expectation())[:, None, :] + np.asarray(topics.expectation()).T[words]
    choices = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
    expected = np.sum(often[..., None] * choices * (logits - np.log(choices)), axis=(1, 2))
    assert_allclose(actual, expected, rtol=1e-12)


@pytest.mark.extended
def test_weights_count_rows_twice():
    double = blr.fit(blr.vmp(), mixture(), None, {"y": np.concatenate([ROWS, ROWS[:50]])}, steps=8)
    weighted = blr.Weighted({"y": jnp.array(ROWS)}, 1.0 + (jnp.arange(150) < 50), 150)
    once = blr.fit(blr.vmp(), mixture(), None, weighted, steps=8)
    same(double.q["components"], once.q["components"], rtol=1e-10)
    assert_allclose(double.bound, once.bound, rtol=1e-12)


def test_local_blocks_need_to_know_how_many_rows():
    with pytest.raises(ValueError, match=r"have a member for each row of the data: pass Model\(…, size=N\)"):
        blr.svi(0.5).init(None, mixture())
    state = blr.svi(0.5).init(None, mixture(size=150))
    assert state.q["z"].logits.shape == (150, 3)
