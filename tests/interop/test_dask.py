"""Data in Dask's partitions: sums, merges and rows; fits equal to those in memory; lost workers."""

import os
import signal
import sys
import threading
from pathlib import Path

import dask
import dask.array as da
import dask.dataframe as dd
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import bayesrule as blr
from bayesrule import factors
from bayesrule.interop import dask as on_dask
from bayesrule.interop.dask import DaskParts, add
from bayesrule.models import regression
from bayesrule.objectives.batches import Weighted

sys.path.insert(0, str(Path(__file__).parent))
from dask_cluster import two_workers

RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(200, 3))
Y = (RANDOM.uniform(size=200) < 1 / (1 + np.exp(-X @ [1.0, -2.0, 0.5]))).astype(float)
CUTS = {"one": (200,), "even": (50,) * 4, "uneven with empty ones": (0, 7, 0, 150, 43, 0)}
START = regression.zeros(3)


@pytest.fixture(autouse=True)
def in_this_thread():
    """Most tests need no cluster: everything is computed by the synchronous scheduler."""
    with dask.config.set(scheduler="synchronous"):
        yield


@pytest.fixture(scope="module")
def client():
    with two_workers() as client:
        yield client


def parts_of(cuts=(50,) * 4):
    return DaskParts((da.from_array(X, chunks=(cuts, 3)), da.from_array(Y, chunks=(cuts,))))


def objective():
    return regression.regression("logistic", len(X), {"w": 1.0, "b": 0.1})


def fit_to(data, **options):
    return blr.fit(blr.newton(), objective(), START, data, steps=20, tolerance=1e-12, **options)


def same(one, other, tolerance):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


def sum_of_squares(part):
    return {"x": np.sum(part[0] ** 2), "y": np.sum(part[1] ** 2)}


def shifted(part, by):
    return part[0] + by, part[1]


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_sums_and_rows(cuts):
    parts = parts_of(cuts)
    assert parts.rows == 200
    assert parts.count == 200
    same(parts.reduce(sum_of_squares, add), sum_of_squares((X, Y)), 1e-12)
    same(parts.map(shifted, np.ones(3)).reduce(sum_of_squares, add), sum_of_squares((X + 1, Y)), 1e-12)
    wanted = np.array([0, 3, 6, 7, 120, 199])
    same(parts.take(wanted), (X[wanted], Y[wanted]), 0)
    same(parts.take(slice(None)), (X, Y), 0)
    same(parts.head(5), (X[:5], Y[:5]), 0)


def test_unknown_lengths():
    chosen = X[:, 0] > 0.3
    array = da.from_array(X, chunks=(40, 3))
    picked = array[array[:, 0] > 0.3], da.from_array(Y, chunks=40)[array[:, 0] > 0.3]
    frame = dd.from_pandas(pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "y": Y}), npartitions=4)
    frame = frame[frame.a > 0.3]
    for collections in (picked, (frame[["a", "b", "c"]], frame["y"])):
        parts = DaskParts(collections)
        assert parts.rows == chosen.sum()
        same(parts.take(np.array([1, 20, 40])), (X[chosen][[1, 20, 40]], Y[chosen][[1, 20, 40]]), 0)


def test_columns_of_parquet_files_keep_their_partitions(tmp_path):
    """Dask would join the files of the one column, and not those of the two."""
    table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "y": Y})
    for number, begin in enumerate((0, 100)):
        table[begin : begin + 100].to_parquet(tmp_path / f"{number}.parquet")
    read = dd.read_parquet(f"{tmp_path}/*.parquet")
    assert len(read["y"].to_delayed()) < len(read[["a", "b"]].to_delayed()) == 2
    rows = DaskParts((read[["a", "b"]], read["y"]))
    same(rows.take(np.array([3, 150])), (X[[3, 150], :2], Y[[3, 150]]), 0)


@pytest.mark.extended
def test_a_large_partition_is_measured_in_blocks():
    parts = DaskParts((da.from_array(X, chunks=(90, 3)), da.from_array(Y, chunks=90)), block_rows=32)
    longest = parts.reduce(rows_of_block, np.maximum)
    assert longest == 30  # 90 rows in three blocks
    same(fit_to(parts).q, fit_to((X, Y)).q, 1e-12)


def rows_of_block(part):
    return len(part[1])


@pytest.mark.sampled("even", "uneven with empty ones")
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_a_fit_is_that_in_memory(cuts):
    here, there = fit_to((X, Y)), fit_to(parts_of(cuts))
    same(there.q, here.q, 1e-12)
    assert there.reason == "converged"
    assert there.bound == pytest.approx(here.bound, abs=1e-10)


@pytest.mark.extended
def test_weights():
    weights = RANDOM.uniform(0.0, 2.0, 200)
    weights[100:150] = 0.0  # a whole partition counts for nothing
    collections = da.from_array(X, chunks=(50, 3)), da.from_array(Y, chunks=50), da.from_array(weights, chunks=50)
    parts = DaskParts(collections).map(weighted)
    assert parts.count == pytest.approx(weights.sum())
    model = regression.regression("logistic", weights.sum(), {"w": 1.0, "b": 0.1})
    fits = [
        blr.fit(blr.newton(), model, START, data, steps=20, tolerance=1e-12)
        for data in (Weighted((X, Y), weights, weights.sum()), parts)
    ]
    same(fits[1].q, fits[0].q, 1e-12)


def weighted(part):
    x, y, weights = part
    return Weighted((x, y), weights, weights.sum())


def test_other_precision():
    """Workers compute in the precision that the client has."""
    with jax.enable_x64(False):
        parts = DaskParts((da.from_array(X.astype(np.float32), chunks=(50, 3)), da.from_array(Y, chunks=50)))
        assert parts.reduce(precision, np.maximum) == 4
    assert parts.reduce(precision, np.maximum) == 8


def precision(part):
    return np.asarray(jnp.zeros(()).dtype.itemsize)


def test_a_message_has_numbers_and_all_else_apart():
    """Keys travel; what is not a number is pickled once, whatever the numbers are."""
    rule, sent = blr.newton(), []
    for value in (1.0, 2.0):
        job = on_dask._Job(jax.tree.structure(0), (), sum_of_squares, add, (rule, jax.random.key(3), value), 8, True)
        sent.append(on_dask._Message.of(job))
    assert sent[0].digest == sent[1].digest
    loaded = sent[1].load()
    assert loaded.arguments[0] == rule
    assert loaded.arguments[2] == 2.0
    assert jax.random.key_data(loaded.arguments[1]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    assert loaded.function is sum_of_squares


def test_errors():
    x, y = da.from_array(X, chunks=(50, 3)), da.from_array(Y, chunks=50)
    with pytest.raises(ValueError, match="200 rows, and a Dask array beside it 150"):
        DaskParts((x, y[:150]))
    with pytest.raises(ValueError, match="partitions, and those of one number belong"):
        DaskParts((x, dd.from_pandas(pd.Series(Y), npartitions=3)))
    with pytest.raises(ValueError, match="have \\[49, 50\\] rows"):
        DaskParts((x, y.map_blocks(lambda block: block[1:], chunks=(np.nan,)))).reduce(sum_of_squares, add)
    with pytest.raises(ValueError, match="has no rows"):
        DaskParts(x[x[:, 0] > 99]).reduce(np.sum, add)
    with pytest.raises(ValueError, match="whose sizes are not known"):
        DaskParts((x[x[:, 0] > 0], Y))
    with pytest.raises(ValueError, match="cannot be sent to Dask's workers"):
        DaskParts(y).reduce(partial_of_lock(), add)


def partial_of_lock():
    lock = threading.Lock()
    return lambda part: lock


# Sites at their partitions.


def site_model(rows):
    blocks = {"w": blr.Gaussian(jnp.zeros(3), jnp.eye(3))}
    prior = factors.prior("w", blr.Gaussian(jnp.zeros(3), 0.5 * jnp.eye(3)))
    return blr.Model(blocks, {"prior": prior, "y": factors.bernoulli_logit("y", {"w": "x"})}, size=rows)


def named_parts(cuts):
    return DaskParts({"x": da.from_array(X, chunks=(cuts, 3)), "y": da.from_array(Y, chunks=(cuts,))})


@pytest.mark.extended
def test_sites_stay_at_their_partitions(client):
    """The fixed point is that of all sites in memory, and that of the global form (eq:blr_local)."""
    data, options = {"x": X, "y": Y}, {"steps": 60, "tolerance": 1e-18}
    rule, cuts = blr.cvi(0.7, sites=True), CUTS["uneven with empty ones"]
    here = blr.fit(rule, site_model(200), None, data, **options)
    whole = blr.fit(blr.cvi(0.7), site_model(200), None, data, **options)
    with client.as_current():
        there = blr.fit(rule, site_model(200), None, named_parts(cuts), **options)
    same(there.q, here.q, 1e-9)
    same(there.q, whole.q, 1e-9)


# On a cluster.


def test_a_fit_on_a_cluster(client):
    with client.as_current():
        same(fit_to(parts_of()).q, fit_to((X, Y)).q, 1e-12)


def test_what_a_worker_cannot_import(client):
    """A function of a module that workers do not have is an error that says so."""
    module = type(sys)("only_here")
    exec("def f(part):\n    return part", module.__dict__)
    sys.modules["only_here"] = module
    try:
        with client.as_current(), pytest.raises(RuntimeError, match=r"cannot load .*only_here"):
            parts_of().reduce(module.f, add)
    finally:
        del sys.modules["only_here"]


def kill_a_worker(client, place):
    pids = sorted(client.run(os.getpid).values())
    os.kill(pids[place], signal.SIGKILL)


def fit_with_a_lost_worker(at_step, delay, place):
    """A fit on persisted partitions, one of whose workers is killed so many seconds after a step.

    The cluster is its own: Dask now and then does not start a worker again that was killed twice in a short time.
    """
    with two_workers() as client, client.as_current():
        collections = client.persist([da.from_array(X, chunks=(25, 3)), da.from_array(Y, chunks=25)])
        timer = threading.Timer(delay, kill_a_worker, (client, place))

        def look(result):
            if result.steps == at_step:
                timer.start()

        result = fit_to(DaskParts(tuple(collections)), on_step=look, every=1)
        timer.join()
    return result


@pytest.fixture(scope="module")
def undisturbed():
    with two_workers() as client, client.as_current():
        return fit_to(DaskParts((da.from_array(X, chunks=(25, 3)), da.from_array(Y, chunks=25)))).q


def assert_equal(q, other):
    for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_lost_worker(undisturbed):
    assert_equal(fit_with_a_lost_worker(2, 0.01, 0).q, undisturbed)


@pytest.mark.extended
@pytest.mark.parametrize("run", range(10))
def test_ten_lost_workers(undisturbed, run):
    random = np.random.default_rng(run)
    at_step, delay = int(random.integers(1, 4)), random.uniform(0, 0.05)
    assert_equal(fit_with_a_lost_worker(at_step, delay, run % 2).q, undisturbed)
