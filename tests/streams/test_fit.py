"""A fit on a stream is the fit on the same batches in memory, and one that goes on is the one that never ended."""

import itertools
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

import bayesrule as blr
from bayesrule.fitting import stream_driver
from bayesrule.fitting.loop import run_chunk
from bayesrule.fitting.progress import ProgressBar

ROWS, COLUMNS, BATCH = 103, 3, 10
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, COLUMNS))
Y = (X @ [1.0, -1.0, 0.5] + rng.normal(size=ROWS) > 0).astype(float)
KEY = jax.random.key(1)
SEED = [int(word) for word in np.asarray(jax.random.key_data(jax.random.split(KEY)[0]))]
RULE = blr.vogn(0.1)
START = jnp.zeros(COLUMNS)


def loss(w, example):
    x, y = example
    return jnp.logaddexp(0.0, x @ w) - y * (x @ w)


OBJECTIVE = blr.Objective(loss, size=ROWS, regularizer=1.0)


def batch_losses(w, batch, aux, key):
    return jax.vmap(lambda *example: loss(w, example))(*batch), aux


BATCHED = blr.Objective.from_batch(batch_losses, size=ROWS, regularizer=1.0)
MODEL = blr.Model(
    {"mean": blr.DiagonalGaussian(0.0), "precision": blr.Gamma(1.0, 1.0)},
    {
        "prior mean": blr.factors.prior("mean", blr.DiagonalGaussian(0.0, 0.01)),
        "prior precision": blr.factors.prior("precision", blr.Gamma(1.0, 1.0)),
        "y": blr.factors.normal("y", mean="mean", precision="precision"),
    },
)


def fit(data, steps=25, rule=RULE, objective=OBJECTIVE, start=START, **more):
    return blr.fit(rule, objective, start, data, steps=steps, batch_size=BATCH, **({"key": KEY} | more))


def assert_equal(result, other):
    for leaf, same in zip(jax.tree.leaves(result.state), jax.tree.leaves(other.state), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(same))


def assert_near(q, other):
    for leaf, same in zip(jax.tree.leaves(q), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(same), rtol=1e-12, atol=1e-12)


def by_hand(data, steps=25, rule=RULE, objective=OBJECTIVE, start=START, whole=False):
    """The state after a loop of `rule.step` over the batches of a stream."""
    objective = objective.with_size(ROWS)
    state, step_key = rule.init(start, objective, KEY, horizon=steps), jax.random.split(KEY)[1]
    epochs = (data.batches(BATCH, seed=SEED, epoch=epoch) for epoch in itertools.count())
    per_epoch = ROWS // BATCH if whole else None
    batches = itertools.chain.from_iterable(itertools.islice(epoch, per_epoch) for epoch in epochs)
    step = jax.jit(lambda state, batch, key: rule.step(objective, state, batch, key)[0])
    for number, batch in zip(range(steps), batches, strict=False):
        state = step(state, batch, jax.random.fold_in(step_key, number))
    return state


@pytest.mark.parametrize(
    ("rule", "objective", "data", "whole"),
    [
        (RULE, OBJECTIVE, (X, Y), False),
        (RULE, OBJECTIVE, blr.Weighted((X, Y), np.linspace(0.0, 2.0, ROWS)), False),
        (blr.adam(0.1), BATCHED, (X, Y), True),
    ],
    ids=["Objective", "Weighted", "Batched"],
)
def test_the_steps_are_those_on_the_same_batches(rule, objective, data, whole):
    """Two epochs and a bit, whose last batch has 3 rows (or is left out)."""
    stream = blr.stream(data, buffer=32)
    result = fit(stream, rule=rule, objective=objective)
    assert result.steps == 25
    assert_near(result.q, by_hand(stream, rule=rule, objective=objective, whole=whole).q)


def test_a_model_with_shared_blocks():
    stream, rule = blr.stream({"y": X[:, 0]}, buffer=32), blr.svi(0.3)
    result = fit(stream, rule=rule, objective=MODEL, start=None)
    assert_near(result.q, by_hand(stream, rule=rule, objective=MODEL, start=None).q)
    with pytest.raises(ValueError, match="this result has none"):
        result.loo()


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_groups_change_nothing(monkeypatch, size):
    stream = blr.stream((X, Y), buffer=32)
    monkeypatch.setattr(stream_driver, "_GROUP_BATCHES", size)
    assert_equal(fit(stream), fit(blr.stream((X, Y), buffer=32), progress=lambda result: None))


def test_microbatches():
    stream = blr.stream((X, Y), buffer=32)
    assert_near(fit(stream, microbatches=5).q, fit(stream).q)


def test_one_row():
    objective = blr.Objective(loss, size=1, regularizer=1.0)
    one = blr.fit(RULE, objective, START, blr.stream((X[:1], Y[:1])), steps=5, batch_size=1, key=KEY)
    state = RULE.init(START, objective, KEY, horizon=5)
    step = jax.jit(lambda state, key: RULE.step(objective, state, (X[:1], Y[:1]), key)[0])
    for number in range(5):
        state = step(state, jax.random.fold_in(jax.random.split(KEY)[1], number))
    assert_near(one.q, state.q)


def test_no_program_for_each_group(monkeypatch):
    monkeypatch.setattr(stream_driver, "_GROUP_BATCHES", 2)
    stream = blr.stream((X, Y), buffer=32)
    fit(stream, steps=26)
    before = run_chunk.count()
    fit(stream, steps=26, key=jax.random.key(5))
    fit(blr.stream((X + 1, Y), buffer=16), steps=26)
    assert run_chunk.count() == before


# Going on.


class Shuffled:
    """Batches in an order that depends on how often it was iterated before, and that a state names."""

    def __init__(self):
        self.epoch = self.taken = self.begin = 0

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(ROWS)
        begin, self.begin, self.taken = self.begin, 0, 0
        for number in range(begin, -(-ROWS // 8)):
            self.taken = number + 1
            rows = order[number * 8 : number * 8 + 8]
            yield X[rows], Y[rows]
        self.epoch, self.taken = self.epoch + 1, 0


class Stateful(Shuffled):
    """As torchdata's StatefulDataLoader has it: the loader has the state."""

    def state_dict(self):
        return {"epoch": self.epoch, "taken": self.taken, "noise": [torch.arange(3), b"ab", {1: None}]}

    def load_state_dict(self, state):
        assert state["noise"][0].tolist() == [0, 1, 2]
        self.epoch, self.begin = state["epoch"], state["taken"]


class Positioned:
    """As Grain has it: the iterator has the state."""

    def __init__(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return _Positioned(self.epoch)


class _Positioned:
    def __init__(self, epoch):
        self.order, self.next = np.random.default_rng(epoch).permutation(ROWS), 0

    def __iter__(self):
        return self

    def __next__(self):
        rows = self.order[self.next : self.next + 8]
        self.next += len(rows)
        if not len(rows):
            raise StopIteration
        return X[rows], Y[rows]

    def get_state(self):
        return str(self.next).encode()

    def set_state(self, state):
        self.next = int(state.decode())


def table(path):
    columns = {f"x{i}": X[:, i] for i in range(COLUMNS)} | {"y": Y}
    parquet.write_table(pa.table(columns), path / "a.parquet", row_group_size=25)
    return path / "a.parquet"


def loader(**how):
    tensors = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(tensors, batch_size=8, **how)


SOURCES = {
    "arrays": lambda path: blr.stream((X, Y), buffer=32),
    "Parquet": lambda path: blr.stream(table(path), target="y", buffer=32),
    "a DataLoader": lambda path: blr.stream(loader(), buffer=20),
    "a function": lambda path: blr.stream(
        lambda epoch: loader(shuffle=True, generator=torch.Generator().manual_seed(epoch)), buffer=20
    ),
    "a loader with a state": lambda path: blr.stream(Stateful(), rows=ROWS, buffer=20),
    "iterators with a state": lambda path: blr.stream(Positioned, rows=ROWS, buffer=20),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("size", "cuts"),
    [(4, (4, 11, 18)), (1000, (18,)), pytest.param(3, range(25), marks=pytest.mark.extended)],
    ids=["groups", "one group", "every step"],
)
def test_resumed_is_uncut(tmp_path, monkeypatch, source, size, cuts):
    """Bit for bit, from a file, with a new stream; cut within and between groups, windows and epochs."""
    monkeypatch.setattr(stream_driver, "_GROUP_BATCHES", size)
    make = lambda: SOURCES[source](tmp_path)
    uncut = fit(make())
    for cut in cuts:
        stop = lambda result, cut=cut: result.steps == cut
        fit(make(), steps=25 if cut else 0, on_step=stop, every=cut or 1).save(tmp_path / "cut")
        saved = blr.load(tmp_path / "cut")
        assert saved.steps == cut
        assert_equal(fit(make(), 25 - cut, start=saved, key=None), uncut)


@pytest.mark.parametrize("cut", [1, 11, 12])
def test_an_iterable_that_cannot_say_where_it_is(cut):
    stream = blr.stream(loader(shuffle=True), rows=ROWS)
    part = fit(stream, on_step=lambda result: result.steps == cut, every=cut)
    with pytest.raises(ValueError, match=r"cannot say where it is.*lambda epoch"):
        fit(stream, 25 - cut, start=part, key=None)


def test_a_state_that_is_code_is_refused():
    class Odd(Stateful):
        def state_dict(self):
            return {"function": print}

    with pytest.raises(ValueError, match="no code"):
        fit(blr.stream(Odd(), rows=ROWS, buffer=20))


# Threads.


def reading_threads():
    return [thread for thread in threading.enumerate() if thread.name == "bayesrule reads ahead"]


def test_no_thread_is_left():
    stream = blr.stream((X, Y), buffer=32)
    fit(stream)
    fit(stream, on_step=lambda result: True, every=2)

    def fail(result):
        raise ArithmeticError("stop")

    with pytest.raises(ArithmeticError):
        fit(stream, on_step=fail)
    assert not reading_threads()


def test_an_error_of_the_source_ends_the_fit_with_its_cause():
    def source(epoch):
        yield X[:20], Y[:20]
        if epoch == 1:
            raise OSError("the disk is gone")
        yield X[20:], Y[20:]

    with pytest.raises(OSError, match="the disk is gone") as caught:
        fit(blr.stream(source, rows=ROWS, buffer=1), steps=10_000)
    assert any(frame.name == "source" for frame in caught.traceback)
    assert not reading_threads()


@pytest.mark.parametrize("times", [1, 2])
def test_control_c(monkeypatch, times):
    """Once between two chunks; twice at once, also while the fit waits for rows that do not come."""
    monkeypatch.setattr(stream_driver, "_GROUP_BATCHES", 1)
    waiting = threading.Event()

    def source(epoch):
        yield X, Y
        if epoch == 2:
            waiting.wait(1.0)  # until all steps that can be taken are taken, and the fit waits
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                waiting.wait(0.2)
            waiting.wait(0.0 if times == 1 else 3.0)

    def released(epoch):
        yield X, Y

    result = fit(blr.stream(source, rows=ROWS, buffer=1), steps=100)
    assert result.reason == "interrupted"
    assert 0 < result.steps < 100
    assert not reading_threads()
    rest = fit(blr.stream(released, rows=ROWS, buffer=1), 100 - result.steps, start=result, key=None)
    assert_equal(rest, fit(blr.stream(released, rows=ROWS, buffer=1), steps=100))


# What a stream can and cannot be combined with.


def test_memory_maps_are_streams_by_themselves(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", X)
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert_equal(fit((x, Y)), fit(blr.stream((X, Y))))
    before = blr.fit(blr.newton(), OBJECTIVE, START, (X, Y), steps=3)
    assert_equal(blr.fit(blr.newton(), OBJECTIVE, START, (x, Y), steps=3), before)


def test_validation_on_a_stream():
    looks = [fit((X, Y), validation=data, every=5) for data in ((X, Y), blr.stream((X, Y)))]
    np.testing.assert_allclose(looks[0].validation["loss"], looks[1].validation["loss"], rtol=1e-13)


def test_unused_parameters_are_found():
    start = {"w": START, "idle": jnp.zeros(2)}
    objective = blr.Objective(lambda p, e: loss(p["w"], e), size=ROWS, regularizer=1.0)
    with pytest.warns(UserWarning, match="does not depend on the parameters .*idle"):
        fit(blr.stream((X, Y)), objective=objective, start=start)


def test_wrong_data_are_named():
    with pytest.raises(ValueError, match="there is no 'y'"):
        fit(blr.stream({"z": X[:, 0]}), rule=blr.svi(0.3), objective=MODEL, start=None)
    with pytest.raises(ValueError, match="between 1 and the number of examples, 5; got 10"):
        fit(blr.stream((X[:5], Y[:5])))


def test_what_needs_all_rows_in_memory_is_refused():
    stream = blr.stream((X, Y))
    with pytest.raises(ValueError, match=r"starts=.*stream.head"):
        fit(stream, starts=3)
    with pytest.raises(ValueError, match="only fit\\(\\) reads a stream"):
        blr.run(RULE, OBJECTIVE, START, stream, steps=3, batch_size=BATCH, key=KEY)
    local = blr.Model(
        {"precision": blr.Gamma(1.0, 1.0)},
        {
            "y": blr.factors.normal("y", mean="offset", precision="precision"),
            "offsets": blr.factors.prior("offset", blr.DiagonalGaussian(0.0)),
            "precisions": blr.factors.prior("precision", blr.Gamma(1.0, 1.0)),
        },
        local={"offset": blr.DiagonalGaussian(0.0)},
    )
    with pytest.raises(ValueError, match=r"local blocks .*'offset'.* in memory"):
        fit(blr.stream({"y": Y}), rule=blr.svi(0.3), objective=local, start=None)


def test_a_first_step_that_is_not_finite_is_explained():
    y = np.full(ROWS, np.inf)
    with pytest.raises(ValueError, match="The first step is not finite: factor 'y'"):
        fit(blr.stream({"y": y}), rule=blr.svi(0.3), objective=MODEL, start=None)


# Progress.


def test_the_bar_shows_steps_rows_per_second_and_the_objective(monkeypatch):
    with ProgressBar(True, 100, 50) as bar:
        clock = iter([10.0, 12.0])
        monkeypatch.setattr("bayesrule.fitting.progress.time.perf_counter", lambda: next(clock))
        bar.update(10, {"objective": np.arange(100.0)})
        bar.update(90, {"objective": np.arange(100.0)}, "loss 0.5")
        (task,) = bar.bar.tasks
        assert task.completed == 90
        assert task.fields["speed"] == "2,000 rows/s"
        assert task.description == "objective 89, validation loss 0.5"
