"""The fused normals are normal out to the far tails, independent in every direction, and never stored.

Seeds are fixed and limits are wide (5 to 6.5 standard errors, chi-squares past 1e-9): a right generator fails none of
them but with a probability below one in a million. That they can fail is tested too: `test_tests_see_weak_hashes`
runs the same measures on this hash with rounds, the key's second word or the feed-forward left out.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats
from scipy.special import erfinv, factorial2, ndtri
from threadpoolctl import threadpool_limits

from bayesrule.numerics import random as noise
from bayesrule.numerics.random import normal, normals

F32 = jnp.float32
# Where the time goes into running: as users compile, though the other tests are compiled lightly.
optimized = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 3})
KEY = jax.random.key(20)


@pytest.fixture(autouse=True)
def one_blas_thread():
    """Several wait for each other, busily, where the cores are few."""
    with threadpool_limits(1, user_api="blas"):
        yield


def correlations(streams):
    """Largest |z| among the pairs of rows, for values and for squares."""
    worst = 0.0
    for rows in (streams, streams**2):
        rows = (rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True)
        actual = np.array(rows @ rows.T) / np.sqrt(rows.shape[1])
        np.fill_diagonal(actual, 0)
        worst = max(worst, np.abs(actual).max())
    return worst


# ---- The quantile: exact for every word ----


def words_to_try():
    ends = [np.arange(5000), 2**31 - 5000 + np.arange(10_000), 2**32 - 5000 + np.arange(5000)]
    return np.concatenate([np.arange(0, 2**32, 1511), *ends]).astype(np.uint32)


@pytest.mark.extended
def test_quantile_is_accurate_and_symmetric_for_every_kind_of_word():
    words = words_to_try()
    actual = np.asarray(jax.jit(noise._quantile)(jnp.asarray(words)), np.float64)
    signed = words.view(np.int32).astype(np.float64) + 0.5
    tail = (2.0**31 - np.abs(signed)) * 2.0**-32
    exact = np.sign(signed) * np.where(tail < 0.1, -ndtri(tail), np.sqrt(2) * erfinv(np.abs(signed) * 2.0**-31))
    np.testing.assert_allclose(actual, exact, rtol=6e-7)
    assert 6.3 < actual.max() < 6.4
    assert np.abs(actual).min() > 0
    mirrored = np.asarray(jax.jit(noise._quantile)(jnp.asarray(~words)), np.float64)
    np.testing.assert_array_equal(mirrored, -actual)


@pytest.mark.extended
def test_wide_quantile_is_accurate_and_symmetric():
    first, second = words_to_try(), words_to_try()[::-1].copy()
    first, second = np.append(first, np.uint32(2**31 - 1)), np.append(second, np.uint32(0))
    actual = np.asarray(jax.jit(noise._wide_quantile)(jnp.asarray(first), jnp.asarray(second)))
    signed = first.view(np.int32)
    rest = np.where(signed < 0, ~signed, signed) ^ 0x7FFFFFFF
    tail = (rest.astype(np.float64) * 2.0**32 + second + 0.5) * 2.0**-64
    np.testing.assert_allclose(actual, np.where(signed < 0, 1, -1) * ndtri(tail), rtol=1e-13, atol=1e-15)
    assert 9.0 < actual.max() < 9.2
    mirrored = np.asarray(jax.jit(noise._wide_quantile)(jnp.asarray(~first), jnp.asarray(second)))
    np.testing.assert_array_equal(mirrored, -actual)


# ---- One stream: moments, tails, bins, serial tests ----


@pytest.mark.sampled("float64-0")
@pytest.mark.parametrize(("dtype", "seed"), [(jnp.float32, 0), (jnp.float32, 1), (jnp.float64, 0)])
def test_moments(dtype, seed):
    size = 4_000_000 if dtype == jnp.float32 else 1_000_000

    @jax.jit
    def moments(key):
        x = normal(key, (size,), dtype).astype(jnp.float64)
        return jnp.stack([jnp.mean(x**power) for power in range(1, 9)])

    for power, actual in enumerate(np.asarray(moments(jax.random.key(seed))), 1):
        exact = 0.0 if power % 2 else factorial2(power - 1)
        error = np.sqrt((factorial2(2 * power - 1) - exact**2) / size)
        assert abs(actual - exact) < 5 * error, f"moment {power}: {actual}, {exact} ± {error}"


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_tails(dtype):
    chunk, chunks = (4_000_000, 30) if dtype == jnp.float32 else (1_000_000, 4)
    limits = np.array([1, 2, 3, 4, 4.5, 5])

    @optimized
    def counts(key):
        def some(i):
            x = normal(jax.random.clone(key), (chunk,), dtype, offset=i * np.uint32(chunk))
            return jnp.stack([jnp.sum(side * x > limit) for limit in limits.tolist() for side in (1, -1)])

        return lax.map(some, jnp.arange(chunks, dtype=jnp.uint32)).sum(0)

    total = chunk * chunks
    actual = np.asarray(counts(KEY)).reshape(-1, 2)
    for limit, row in zip(limits, actual, strict=True):
        p = stats.norm.sf(limit)
        for count in row:  # exact binomial limits: the counts beyond 5 sd are small
            assert stats.binom.cdf(count, total, p) > 1e-7, (limit, row, total * p)
            assert stats.binom.sf(count - 1, total, p) > 1e-7, (limit, row, total * p)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_bins_and_kolmogorov_smirnov(dtype):
    x = np.asarray(normal(KEY, (500_000,), dtype), np.float64)
    counts = np.histogram(stats.norm.cdf(x), bins=np.linspace(0, 1, 2001))[0]
    assert 1e-9 < stats.chisquare(counts).pvalue < 1 - 1e-9
    assert stats.kstest(x, "norm").pvalue > 1e-6


def lagged(x):
    """Largest |z| of the correlation of values and of squares at lags 1…16 and powers of two."""
    worst = 0.0
    for lag in [*range(1, 17), *(2**power for power in range(5, 19))]:
        a, b = x[:-lag], x[lag:]
        for one, two in ((a, b), (a * a - 1, b * b - 1), (a, b * b - 1)):
            worst = max(worst, abs(np.dot(one, two)) / np.sqrt(np.dot(one * one, two * two)))
    return worst


def serial(x):
    """Largest |z| of chi-squares over 64×64 cells of pairs, at a few lags."""
    cell = np.minimum((stats.norm.cdf(x) * 64).astype(np.int64), 63)
    worst = 0.0
    for lag in (1, 2, 3, 8, 256, 65_536):
        counts = np.bincount(cell[:-lag] * 64 + cell[lag:], minlength=4096)
        chi = stats.chisquare(counts).statistic
        worst = max(worst, abs(chi - 4095) / np.sqrt(2 * 4095))
    return worst


@pytest.mark.extended
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_neighbours_in_a_stream_are_independent(dtype):
    x = np.asarray(normal(KEY, (2_000_000 if dtype == F32 else 500_000,), dtype), np.float64)
    assert lagged(x) < 5.5
    assert serial(x) < 6.5


# ---- The hash's bits ----


@partial(optimized, static_argnums=0)
def _flips(function, count, start, turn):
    base = function(count, start, turn)

    def one(mask):
        changed = base ^ function(count ^ mask, start, turn)
        return jnp.stack([jnp.sum((changed >> bit) & 1, dtype=jnp.uint32) for bit in range(32)])

    return lax.map(one, jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32))


def avalanche(function, size=2**20):
    """Largest |z|, over bits of the counter and bits of the result, of how often the one flips the other."""
    start, turn = np.uint32(0x9E3779B9), np.uint32(0x85EBCA6B)
    actual = np.asarray(_flips(function, jnp.arange(size, dtype=jnp.uint32), start, turn), np.float64)
    return np.abs(actual / size - 0.5).max() * 2 * np.sqrt(size)


def overlap(function, size=2**17):
    """Correlation of streams that start at the same counter, their second words a bit apart."""
    turns = jnp.concatenate([jnp.zeros(1, jnp.uint32), jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)])
    count = jnp.arange(size, dtype=jnp.uint32)
    words = jax.jit(jax.vmap(lambda turn: function(count, np.uint32(12345), turn + np.uint32(777))))(turns)
    return correlations(np.asarray(noise._quantile(words), np.float64))


def bits(function, size=2**21):
    """Largest |z| of the chi-squares of low and of high bytes and of pairs of neighbouring low bytes."""
    words = np.asarray(function(jnp.arange(size, dtype=jnp.uint32), np.uint32(1), np.uint32(2)))
    low, high = (words & 255).astype(np.int64), (words >> 24).astype(np.int64)
    worst = 0.0
    for cells, count in ((low, 256), (high, 256), (low[:-1] * 256 + low[1:], 65536), (low * 256 + high, 65536)):
        chi = stats.chisquare(np.bincount(cells, minlength=count)).statistic
        worst = max(worst, abs(chi - count + 1) / np.sqrt(2 * count))
    return worst


def birthdays(function, size=2**20):
    """|z| of the number of equal words: n²/2³³, not none, as in a permutation."""
    words = np.asarray(function(jnp.arange(size, dtype=jnp.uint32), np.uint32(3), np.uint32(4)))
    expected = size**2 / 2**33
    return abs(size - len(np.unique(words)) - expected) / np.sqrt(expected)


def values(function):
    return np.asarray(noise._quantile(function(jnp.arange(2**20, dtype=jnp.uint32), np.uint32(5), np.uint32(6))), float)


MEASURES = {
    "avalanche": (avalanche, 6.5),
    "overlap": (overlap, 6.0),
    "bits": (bits, 6.5),
    "birthdays": (birthdays, 5.0),
    "lagged": (lambda function: lagged(values(function)), 5.5),
    "serial": (lambda function: serial(values(function)), 6.5),
}


@pytest.mark.extended
@pytest.mark.parametrize("measure", MEASURES)
def test_hash(measure):
    function, limit = MEASURES[measure]
    assert function(noise._hash) < limit


def weak_hash(count, start, turn, rounds, late=False):
    """Fewer rounds of `_hash`, or the second word past the xor-shift of its round."""
    place = x = count + start
    for round_, (shift, multiplier) in enumerate(zip((16, 17, 11, 15), noise._MULTIPLIERS, strict=True)):
        if round_ < rounds:
            x = x ^ (x >> shift)
            x = (x + turn if late and round_ == 2 else x) * np.uint32(multiplier)
            x = x + turn if round_ == 0 and not late else x
    return (x ^ (x >> 14)) + place


one_round, two_rounds, three_rounds = (partial(weak_hash, rounds=rounds) for rounds in (1, 2, 3))
late_word = partial(weak_hash, rounds=4, late=True)


def permutation(count, start, turn):
    return noise._hash(count, start, turn) - (count + start)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("weak", "detecting_measures"),
    [
        (one_round, ["avalanche", "bits", "birthdays", "lagged", "serial"]),
        pytest.param(two_rounds, ["avalanche", "bits", "serial"], marks=pytest.mark.extended),
        (three_rounds, ["avalanche", "overlap"]),
        (late_word, ["overlap"]),
        (permutation, ["birthdays"]),
    ],
)
def test_tests_see_weak_hashes(weak, detecting_measures):
    for measure in detecting_measures:
        function, limit = MEASURES[measure]
        assert function(weak) > 1.2 * limit, measure


# ---- Many streams ----


def keys_of(kind):
    if kind == "neighbouring keys":
        return jax.vmap(jax.random.key)(jnp.arange(32))
    if kind == "steps":
        return jax.vmap(lambda step: jax.random.fold_in(KEY, step))(jnp.arange(32))
    return jax.random.split(KEY, 32)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("neighbouring keys", F32), ("steps", F32), ("split", F32), ("neighbouring keys", jnp.float64)],
)
def test_streams_of_keys_are_uncorrelated(kind, dtype):
    size = 100_000 if dtype == F32 else 20_000
    streams = jax.jit(jax.vmap(lambda key: normal(key, (size,), dtype)))(keys_of(kind))
    assert correlations(np.asarray(streams, np.float64)) < 6


@pytest.mark.parametrize("size", [20_000, 50_000])  # the smaller leaves share a stream
def test_leaves_and_samples_are_uncorrelated(size):
    tree = {"a": [jnp.zeros(size, F32)] * 8, "b": jnp.zeros(size, F32)}
    noises = jax.jit(partial(normals, lead=(4,)))(KEY, tree)
    assert correlations(np.concatenate([np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(noises)])) < 6


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_every_kind_of_key(impl):
    streams = np.stack([normal(jax.random.key(seed, impl=impl), (50_000,)) for seed in range(8)])
    assert correlations(streams.astype(np.float64)) < 6
    assert not np.any(np.asarray(normal(jax.random.PRNGKey(0), (9,))) != np.asarray(normal(jax.random.key(0), (9,))))


# ---- Counters ----


def test_pieces_equal_the_whole_and_counters_do_not_repeat():
    full = np.asarray(normal(KEY, (4096,)))
    np.testing.assert_array_equal(normal(KEY, (96,), offset=4000), full[4000:])
    np.testing.assert_array_equal(normal(KEY, (64, 64)), full.reshape(64, 64))
    far = [np.asarray(normal(KEY, (20_000,), offset=offset)) for offset in (0, 2**31, 2**32, 2**33, 2**40, 2**63)]
    assert correlations(np.stack(far).astype(np.float64)) < 6
    across = normal(KEY, (20,), offset=2**32 - 10)
    np.testing.assert_array_equal(across[:10], normal(KEY, (10,), offset=2**32 - 10))
    np.testing.assert_array_equal(across[10:], normal(KEY, (10,), offset=2**32))


@pytest.mark.parametrize("offset", [0, 7, 2**32 - 3, 5 * 2**32 + 1])
def test_a_traced_offset_is_the_same_place(offset):
    expected = normal(KEY, (50,), offset=offset)
    traced = jax.jit(lambda at: normal(KEY, (50,), offset=at))
    np.testing.assert_array_equal(traced(jnp.uint64(offset)), expected)
    np.testing.assert_array_equal(traced(jnp.int64(offset)), expected)
    if offset < 2**31:
        np.testing.assert_array_equal(traced(jnp.int32(offset)), expected)


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="floating"):
        normal(KEY, (2,), jnp.int32)
    with pytest.raises(ValueError, match="offset"):
        normal(KEY, (2,), offset=-1)
    with pytest.raises(ValueError, match="2³²"):
        jax.eval_shape(lambda key: normal(key, (2**20, 2**13)), KEY)


# ---- JAX ----


@pytest.mark.extended
def test_same_numbers_under_every_transformation():
    keys = jax.random.split(KEY, 5)
    alone = np.stack([normal(key, (1001,)) for key in keys])
    np.testing.assert_array_equal(alone, np.stack([normal(key, (1001,)) for key in keys]))
    for other in (
        jax.vmap(lambda key: normal(key, (1001,)))(keys),
        lax.scan(lambda carry, key: (carry, normal(key, (1001,))), 0, keys)[1],
        jax.jit(lambda keys: jnp.stack([normal(key, (1001,)) for key in keys]))(keys),
    ):
        np.testing.assert_array_max_ulp(alone, np.asarray(other), 4)


@pytest.mark.extended
def test_trees_under_jit_and_vmap():
    tree = {"w": jnp.zeros((40_000,), F32), "b": jnp.zeros(3, F32), "n": (), "s": jnp.zeros((), jnp.float64)}
    one = normals(KEY, tree)
    assert jax.tree.structure(one) == jax.tree.structure(tree)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), one) == jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    many = jax.jit(jax.vmap(lambda key: normals(key, tree)))(jnp.stack([KEY, jax.random.key(3)]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b[0], rtol=1e-6), one, many)
    assert normals(KEY, ()) == ()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_types_are_rounded_from_float32(dtype):
    np.testing.assert_array_equal(normal(KEY, (99,), dtype), normal(KEY, (99,)).astype(dtype))


def test_a_key_is_consumed_once():
    tree = [jnp.zeros(40_000, F32), jnp.zeros(3, F32), jnp.zeros(4, F32)]
    with jax.debug_key_reuse(True):
        jax.jit(normals)(jax.random.key(1), tree)
        key = jax.random.key(2)
        normal(key, (3,))
        with pytest.raises(jax.errors.KeyReuseError):
            normal(key, (3,))


# ---- Memory ----


@pytest.mark.extended
@pytest.mark.parametrize("shape", [(1_000_000,), (1000, 1000), (10, 100, 1000)])
def test_noise_is_fused_into_what_uses_it(shape):
    m, s = jnp.zeros(shape, F32), jnp.ones(shape, F32)
    compiled = jax.jit(lambda key, m, s: m + normal(key, m.shape) / jnp.sqrt(s)).lower(KEY, m, s).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 10_000
    entry = compiled.as_text().split("ENTRY")[1]
    size = ",".join(map(str, shape))
    assert sum(f"= f32[{size}]" in line and "parameter" not in line for line in entry.splitlines()) == 1


def test_many_small_leaves_share_one_loop():
    tree = [jax.ShapeDtypeStruct((50 + i,), F32) for i in range(20)]
    text = (
        jax.jit(lambda key, tree: jax.tree.map(jnp.add, tree, normals(key, tree))).lower(KEY, tree).compile().as_text()
    )
    assert text.count(" convert(") < 10  # a loop of noise has three
