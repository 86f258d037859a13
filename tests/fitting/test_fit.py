"""fit(): the loop, its mini-batches, its reasons to stop, and what it saves."""

import collections
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.fitting import checkpoint as saving
from bayesrule.fitting import driver

X = jax.random.normal(jax.random.key(10), (10, 2))
Y = X @ jnp.array([1.0, -2.0]) + 0.1 * jnp.arange(10.0)


def squared(theta, example):
    x, y = example
    return 0.5 * (y - x @ theta) ** 2


def regression(**more):
    return blr.Objective(squared, size=10, **more)


def cosh(x):
    return jnp.sum(jnp.cosh(x - 1.0)) + 0.5 * x @ x


derivatives = jax.jit(lambda x: (jax.grad(cosh)(x), jax.hessian(cosh)(x)))


def same(first, second):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        if jnp.issubdtype(jnp.asarray(a).dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert jnp.asarray(a).dtype == jnp.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


# The contract.


@pytest.mark.extended
def test_a_posterior_for_any_smooth_loss(tmp_path):
    """API.md, section 1, as it stands; the mode and Hessian by hand, and a better bound by quadrature."""
    f = cosh
    result = blr.fit(blr.newton(), f, blr.Gaussian(jnp.zeros(3), jnp.eye(3)), steps=50, tolerance=1e-10)
    slope, hessian = derivatives(result.q.mean)
    np.testing.assert_allclose(slope, 0.0, atol=1e-8)
    np.testing.assert_allclose(result.q.precision, hessian, rtol=1e-5, atol=1e-12)
    assert result.reason == "converged"
    result.save(tmp_path / "result")
    loaded = blr.load(tmp_path / "result")
    same(loaded.q, result.q)
    assert result.trace["objective"].shape == (result.steps,)
    assert np.all(np.diff(result.trace["objective"]) <= 1e-12)
    better = blr.fit(blr.newton(rate=0.5).replace(points=blr.Quadrature(5)), f, result.q, steps=200)
    assert better.reason == "steps"
    looking = blr.newton().replace(points=blr.Quadrature(5))
    assert better.bound > jax.jit(lambda q: looking.bound(f, q))(result.q)
    assert "converged" in repr(result)


@pytest.mark.extended
def test_training_by_steps():
    """API.md, section 2, with what exists: init from bare parameters, step under jit, q over the pytree."""
    params = {"w": jnp.zeros(2), "b": jnp.zeros(())}

    def apply(p, x):
        return x @ p["w"] + p["b"]

    def loss(output, y):
        return 0.5 * (output - y) ** 2

    zeros, ones = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.ones_like, params)
    objective = blr.Objective(loss, output=apply, size=len(X), prior=blr.DiagonalGaussian(zeros, ones))
    rule = blr.Rule(blr.DiagonalGaussian, blr.MonteCarlo(2), blr.GaussNewton(), blr.Steps(1e-2), blr.Retraction())
    state = rule.init(params, objective)
    keys = lambda count: jax.random.fold_in(jax.random.key(0), count)
    step = jax.jit(lambda state, batch, count: rule.step(objective, state, batch, keys(count)))
    first, batch = None, (X[:5], Y[:5])
    for count in range(300):
        state, info = step(state, batch, count)
        first = info.objective if first is None else first
    assert jax.tree.structure(state.q.mean) == jax.tree.structure(params)
    assert info.objective < 0.5 * first


# Mini-batches. The gradient of this loss is a one-hot vector, so θ records which rows were seen.


def entry(theta, row):
    return theta[row]


def recording(rows):
    return blr.Objective(entry, size=rows)


@pytest.mark.extended
@pytest.mark.parametrize(("rows", "batch_size"), [(10, 4), (6, 3)])
def test_an_epoch_sees_every_row_once(rows, batch_size):
    """Each step's displacement marks its rows, by N/M with the true M of the ragged last batch."""
    rule, per_epoch = blr.gradient_descent(1.0), -(-rows // batch_size)
    start, displacements = jnp.zeros(rows), []
    data, key = jnp.arange(rows), jax.random.key(1)
    result = blr.fit(rule, recording(rows), start, data, steps=0, batch_size=batch_size, key=key)
    for _ in range(3 * per_epoch):
        before = result.q.mean
        result = blr.fit(rule, recording(rows), result, data, steps=1, batch_size=batch_size)
        displacements.append(before - result.q.mean)
    displacements = np.array(displacements).reshape(3, per_epoch, rows)
    last = rows - (per_epoch - 1) * batch_size
    for epoch in displacements:
        np.testing.assert_array_equal((epoch > 0).sum(0), 1)
        sizes = (epoch > 0).sum(1)
        np.testing.assert_array_equal(sizes, [batch_size] * (per_epoch - 1) + [last])
        for batch, size in zip(epoch, sizes, strict=True):
            np.testing.assert_allclose(batch[batch > 0], rows / size, rtol=1e-13)
        # Weighted by its M/N, each batch's gradient adds up to that of all the data: unbiased, ragged or not.
        np.testing.assert_allclose((sizes / rows) @ epoch, np.ones(rows), rtol=1e-13)
    if per_epoch == 3 and rows == 10:  # 3,150 ways to cut an epoch: two the same are no accident
        assert len({(epoch > 0).tobytes() for epoch in displacements}) > 1


@pytest.mark.extended
def test_one_call_takes_the_same_batches_as_many():
    """The batches depend on the key and the step count only, not on how the steps are cut into calls."""
    rule, data, key = blr.gradient_descent(1.0), jnp.arange(10), jax.random.key(1)
    uncut = blr.fit(rule, recording(10), jnp.zeros(10), data, steps=8, batch_size=4, key=key)
    part = blr.fit(rule, recording(10), jnp.zeros(10), data, steps=4, batch_size=4, key=key)
    rest = blr.fit(rule, recording(10), part, data, steps=4, batch_size=4)
    same(uncut.state, rest.state)
    np.testing.assert_array_equal(uncut.trace["objective"][4:], rest.trace["objective"])


@pytest.mark.extended
def test_a_joint_loss_leaves_the_ragged_rest_out():
    """A from_batch objective sees full batches only, each row at most once an epoch."""

    def loss(theta, batch, aux, key):
        return theta * jnp.zeros(batch.shape), aux.at[batch].add(1)

    objective = blr.Objective.from_batch(loss, size=10, aux=jnp.zeros(10))
    result = blr.fit(
        blr.gradient_descent(1.0), objective, jnp.zeros(1), jnp.arange(10), steps=2, batch_size=4, key=jax.random.key(0)
    )
    assert sorted(result.state.aux.tolist()) == [0.0] * 2 + [1.0] * 8


@pytest.mark.extended
def test_weighted_data_in_mini_batches():
    """Weights go with their rows, and M counts rows."""
    weights = jnp.arange(6.0)
    data = blr.Weighted(jnp.arange(6), weights)
    rule, key = blr.gradient_descent(1.0), jax.random.key(2)
    result = blr.fit(rule, recording(6), jnp.zeros(6), data, steps=3, batch_size=2, key=key)
    np.testing.assert_allclose(-result.q.mean, 3 * weights, rtol=1e-13)


# Reasons.


def test_newton_stops_by_the_decrement():
    """Newton's decrement, ½gᵀS⁻¹g + ¼tr[(S⁻¹H − I)²], is below the tolerance twice, or once far below it."""
    result = blr.fit(blr.newton(), cosh, jnp.zeros(3), steps=50, tolerance=1e-6)
    assert result.reason == "converged"
    decrements = result.trace["decrement"]
    assert decrements[-1] < decrements[-2] <= 1e-6 < decrements[-3]
    assert result.steps == len(decrements) < 50
    slope, hessian = map(np.asarray, derivatives(jnp.zeros(3)))  # from N(0, I)
    np.testing.assert_allclose(decrements[0], 0.5 * slope @ slope + 0.25 * np.sum((hessian - np.eye(3)) ** 2))


@pytest.mark.extended
def test_reasons_and_traces():
    assert blr.fit(blr.newton(), cosh, jnp.zeros(3), steps=2).reason == "steps"
    result = blr.fit(blr.newton(), cosh, jnp.zeros(3), steps=0)
    assert (result.reason, result.steps, result.trace["objective"].shape) == ("steps", 0, (0,))
    result = blr.fit(blr.gradient_descent(0.01), cosh, jnp.zeros(3), steps=1000)
    assert {name: len(values) for name, values in result.trace.items()} == dict.fromkeys(
        ("objective", "rate", "fraction", "bound", "decrement", "guard"), 1000
    )


def test_a_reason_is_a_string_with_a_message():
    result = blr.fit(blr.newton(), cosh, jnp.zeros(3), steps=2)
    assert result.reason is blr.Reason.STEPS
    assert (str(result.reason), repr(result.reason), f"{result.reason}") == ("steps", "'steps'", "steps")
    assert json.loads(json.dumps({"reason": result.reason})) == {"reason": "steps"}
    assert result.reason.message == "all steps were taken"
    assert [blr.Reason.of(reason.code) for reason in blr.Reason] == list(blr.Reason)
    with pytest.raises(ValueError, match="tired"):
        blr.Reason("tired")


def test_chunks_share_one_program_and_update_in_place():
    """40 steps are at least two chunks, of 16 at first: compiled once, and each reuses the last one's buffers."""
    traces, means, traces_so_far = [], [], []

    def counting(x):
        traces.append(1)
        return cosh(x)

    def after_chunk(result):
        means.append(result.q.mean)
        traces_so_far.append(len(traces))

    blr.fit(blr.gradient_descent(0.01), counting, jnp.zeros(3), steps=40, progress=after_chunk)
    assert len(means) >= 2
    assert len(set(traces_so_far)) == 1
    assert means[0].is_deleted()
    assert not means[-1].is_deleted()


def test_the_start_is_left_alone():
    """fit gives its own buffers away, never the caller's."""
    start = blr.Gaussian(jnp.zeros(3), jnp.eye(3))
    first = blr.fit(blr.newton(), cosh, start, steps=2)
    second = blr.fit(blr.newton(), cosh, first, steps=2)
    np.testing.assert_array_equal(start.mean, 0.0)
    assert np.all(np.isfinite(first.q.mean))
    assert (first.steps, second.steps) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": -1}, "whole number"),
        ({"steps": 2.5}, "whole number"),
        ({"data": None}, "pass data="),
        ({"batch_size": 0}, "between 1 and"),
        ({"batch_size": 11}, "between 1 and"),
        ({"batch_size": 5, "key": None}, "pass key="),
        ({"key": 3}, "jax.random.key"),
        ({"data": (X, Y[:9])}, "same number of rows"),
        ({"data": (X[:0], Y[:0])}, "empty"),
    ],
)
def test_arguments_that_make_no_sense(arguments, message):
    all_arguments = {"data": (X, Y), "steps": 3, "key": jax.random.key(0)} | arguments
    with pytest.raises(ValueError, match=message):
        blr.fit(blr.newton(), regression(), jnp.zeros(2), **all_arguments)


def test_a_plain_function_takes_no_data():
    with pytest.raises(ValueError, match=r"wrap a loss over examples in blr\.Objective"):
        blr.fit(blr.newton(), cosh, jnp.zeros(2), X, steps=1)


# Resuming.


RESUMED = {
    "von": blr.von(0.05, samples=2),
    "momentum": blr.gradient_descent(0.01, momentum=0.9),
    "average": blr.Rule(
        blr.DiagonalGaussian,
        blr.MonteCarlo(1),
        blr.GaussNewton(),
        blr.Steps(blr.Rates(0.05, 0.1), average=blr.GradientAverage(0.9, over="data")),
        blr.Retraction(),
    ),
}


@pytest.mark.parametrize("name", RESUMED)
def test_resuming_is_not_having_stopped(name, tmp_path):
    """Saved in the middle of an epoch, loaded and run on: bit for bit the uncut run."""
    rule, objective, start = RESUMED[name], regression(regularizer=1.0), jnp.zeros(2)
    arguments = {"data": (X, Y), "batch_size": 4}
    uncut = blr.fit(rule, objective, start, steps=20, key=jax.random.key(3), **arguments)
    cut = blr.fit(rule, objective, start, steps=10, key=jax.random.key(3), **arguments)  # 3 steps an epoch
    cut.save(tmp_path / "cut")
    rest = blr.fit(rule, objective, blr.load(tmp_path / "cut"), steps=10, **arguments)
    same(uncut.state, rest.state)
    for trace, values in uncut.trace.items():
        np.testing.assert_array_equal(values, np.concatenate([cut.trace[trace], rest.trace[trace]]))


def test_ctrl_c_loses_nothing(monkeypatch):
    """The second call of the compiled loop is interrupted: the state after the first is returned."""
    calls, run = [], driver.run_chunk

    def interrupted(*arguments, **more):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(*arguments, **more)

    monkeypatch.setattr(driver, "run_chunk", interrupted)
    result = blr.fit(blr.gradient_descent(0.01), cosh, jnp.zeros(3), steps=1000)
    assert result.reason == "interrupted"
    assert result.steps == len(result.trace["objective"]) == 16
    monkeypatch.undo()
    reference = blr.fit(blr.gradient_descent(0.01), cosh, jnp.zeros(3), steps=16)
    same(result.state, reference.state)


@pytest.mark.extended
@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_for_real():
    """A signal in the middle of a long fit: it ends in time, with a finite q and every step's trace."""
    program = """
        import bayesrule as blr, jax.numpy as jnp, numpy as np
        loss = lambda x: jnp.sum(jnp.cosh(x - 1.0))
        start = jnp.zeros(100_000)
        blr.fit(blr.gradient_descent(1e-9), loss, start, steps=1)
        print("ready", flush=True)
        result = blr.fit(blr.gradient_descent(1e-9), loss, start, steps=1_000_000)
        assert 0 < result.steps == len(result.trace["objective"])
        assert np.all(np.isfinite(result.q.mean))
        print(result.reason, flush=True)
    """
    source = str(Path(blr.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(3)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=60)[0] == "interrupted\n"
        assert child.returncode == 0
    finally:
        child.kill()
        child.communicate()


def test_progress_without_a_terminal(capsys):
    result = blr.fit(blr.newton(), cosh, jnp.zeros(3), steps=2, progress=True)
    assert "2/2" in capsys.readouterr().out
    assert result.reason == "steps"


def test_checkpoints(tmp_path):
    """The file is there when the fit ends, loads, and goes on to the same end; nothing else is left behind."""
    path = tmp_path / "checkpoint"
    arguments = {"data": (X, Y), "batch_size": 4, "key": jax.random.key(3)}
    rule, objective = blr.von(0.05, samples=2), regression(regularizer=1.0)
    result = blr.fit(rule, objective, jnp.zeros(2), steps=20, checkpoint=path, **arguments)
    saved = blr.load(path)
    same(saved.state, result.state)
    assert (saved.reason, saved.steps) == ("steps", 20)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint"]


# Saving.


class Foreign(eqx.Module):
    weight: jax.Array
    bias: jax.Array


Named = collections.namedtuple("Named", ["weight", "bias"])

SAVED = {
    "array": jnp.arange(3.0),
    "dict": {"w": jnp.arange(3.0), "b": {"c": jnp.zeros((2, 2))}},
    "list": [jnp.arange(3.0), jnp.ones(())],
    "tuple": (jnp.arange(3.0), [jnp.ones(1), {"x": jnp.zeros(2)}]),
    "float32": {"w": jnp.arange(3.0, dtype=jnp.float32)},
    "bfloat16": {"w": jnp.arange(3.0, dtype=jnp.bfloat16)},
    "empty": {"w": jnp.zeros((0, 2)), "v": jnp.ones(2)},
}


def result_around(params):
    return blr.fit(
        blr.gradient_descent(0.1, momentum=0.9), lambda p: 0.0 * _total(p), params, steps=0, key=jax.random.key(7)
    )


def _total(params):
    return sum(jnp.sum(leaf.astype(float)) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("kind", SAVED)
def test_round_trips(kind, tmp_path):
    """State, trace, key, reason and bound come back as they were, dtypes included."""
    result = result_around(SAVED[kind])
    result.save(tmp_path / "file")
    loaded = blr.load(tmp_path / "file")
    assert type(loaded.q) is type(result.q)
    same(loaded.state, result.state)
    same(loaded.key, result.key)
    same(loaded.trace, result.trace)
    assert (loaded.reason, loaded.normalized) == (result.reason, result.normalized)
    assert loaded.bound == result.bound


@pytest.mark.parametrize(
    "params",
    [
        Foreign(jnp.arange(3.0), jnp.ones(())),
        Named(jnp.arange(3.0), jnp.ones(())),
        {0: jnp.arange(3.0), 1: jnp.ones(2)},
    ],
    ids=["equinox", "namedtuple", "integer keys"],
)
def test_other_peoples_containers_need_like(params, tmp_path):
    result = result_around(params)
    result.save(tmp_path / "file")
    with pytest.raises(ValueError, match="pass like="):
        blr.load(tmp_path / "file")
    with pytest.raises(ValueError, match="pass like="):
        blr.load(tmp_path / "file", like=[jnp.zeros(1)])
    loaded = blr.load(tmp_path / "file", like=jax.tree.map(jnp.zeros_like, params))
    same(loaded.state, result.state)
    assert type(loaded.q.mean) is type(params)


FAMILIES = {
    "Gaussian": blr.Gaussian({"a": jnp.zeros(2)}, jnp.eye(2)),
    "LowRankGaussian": blr.LowRankGaussian(jnp.zeros(3), 1.0, jnp.ones((3, 1))),
    "Gamma": blr.Gamma(2.0, 3.0),
    "Product": blr.Product({"x": blr.Gamma(2.0, 3.0), "y": blr.Categorical(jnp.zeros(3))}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_round_trip(family, tmp_path):
    saving.write(tmp_path / "file", FAMILIES[family])
    loaded = saving.read(tmp_path / "file")
    assert type(loaded) is type(FAMILIES[family])
    same(loaded, FAMILIES[family])


def damaged(path, kind):
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("not a result")
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    elif kind == "flipped":
        content = bytearray(path.read_bytes())
        place = content.index(b"array0.npy") + 140  # in the first array's numbers
        content[place] ^= 0xFF
        path.write_bytes(bytes(content))
    elif kind == "one array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    elif kind == "pickle":
        with path.open("wb") as file:
            np.savez(file, header=np.array([{"a": 1}], dtype=object))
    elif kind == "other arrays":
        with path.open("wb") as file:
            np.savez(file, weights=np.zeros(3))
    elif kind == "other header":
        with path.open("wb") as file:
            np.savez(file, header=np.array("[1, 2]"))
    elif kind == "missing array":
        with np.load(path) as file:
            kept = {name: file[name] for name in file.files if name != "array0"}
        with path.open("wb") as file:
            np.savez(file, **kept)
    elif kind == "directory":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "text",
        "truncated",
        "flipped",
        "one array",
        "pickle",
        "other arrays",
        "other header",
        "missing array",
        "directory",
    ],
)
def test_a_damaged_or_foreign_file(kind, tmp_path):
    result_around(SAVED["dict"]).save(tmp_path / "file")
    damaged(tmp_path / "file", kind)
    message = "is not a run" if kind == "directory" else r"not a file that Result\.save wrote"
    with pytest.raises(ValueError, match=message):
        blr.load(tmp_path / "file")


def rewritten(path, change):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["header"] = np.array(change(str(arrays["header"])))
    with path.open("w+b") as file:
        saving._write_archive(file, arrays)  # With a checksum that is right: it is no protection against malice.


@pytest.mark.parametrize("name", ["subprocess.Popen", "Path", "equinox.nn.Linear"])
@pytest.mark.parametrize("form", [1, 2])
def test_a_file_cannot_name_other_peoples_types(name, form, tmp_path):
    """Loading runs no code that the file brings along: only the library's own modules are built."""
    path = tmp_path / "file"
    saving.write(path, blr.Gamma(2.0, 3.0))
    module = {"module": name.rpartition(".")[::2]} if form == 1 else {"class": name}
    rewritten(path, lambda header: header.replace('"class": "Gamma"', json.dumps(module)[1:-1]))
    with pytest.raises(ValueError, match="not one of the library's own types"):
        saving.read(path)


def test_a_file_of_another_format(tmp_path):
    path = tmp_path / "file"
    result_around(SAVED["dict"]).save(path)
    rewritten(path, lambda header: header.replace('"format": 3', '"format": 99'))
    with pytest.raises(ValueError, match="version that wrote it"):
        blr.load(path)


def test_what_cannot_be_saved(tmp_path):
    """A value with no arrays in it is refused, and no half-written file stays."""
    with pytest.raises(ValueError, match="cannot be saved"):
        saving.write(tmp_path / "file", {"function": len})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        blr.load(tmp_path / "file")


@pytest.mark.extended
def test_one_quiet_batch_is_not_convergence():
    """5 informative rows in 100: a batch without them has no gradient, and that is not an optimum."""
    x = jnp.zeros(100).at[:5].set(1.0)
    objective = blr.Objective(lambda w, e: 0.5 * e * (w - 5.0) ** 2, size=100)
    rule = blr.gradient_descent(0.01)
    result = blr.fit(
        rule, objective, jnp.zeros(()), x, steps=3000, batch_size=4, key=jax.random.key(0), tolerance=1e-10
    )
    assert result.reason == "converged"
    np.testing.assert_allclose(result.q.mean, 5.0, atol=1e-3)


def test_weighted_counts_carry_over_to_mini_batches():
    """Four rows that stand for ten: the same gradient in expectation, whole or in halves."""
    objective = blr.Objective(lambda w, e: w * e, size=10)
    data = blr.Weighted(jnp.ones(4), jnp.ones(4), 10)
    full_batch = blr.fit(blr.gradient_descent(1.0), objective, jnp.zeros(()), data, steps=1)
    half = blr.fit(
        blr.gradient_descent(1.0), objective, jnp.zeros(()), data, steps=1, batch_size=2, key=jax.random.key(0)
    )
    np.testing.assert_allclose([full_batch.q.mean, half.q.mean], -4.0, rtol=1e-12)


@pytest.mark.extended
def test_the_bound_sees_the_aux_of_the_end():
    def loss(w, batch, aux, key):
        return (w - aux) ** 2 * jnp.ones(len(batch)), aux + 1.0

    objective = blr.Objective.from_batch(loss, size=3, aux=jnp.zeros(()), regularizer=1.0)
    result = blr.fit(blr.laplace(), objective, jnp.zeros(()), jnp.ones(3), steps=4, key=jax.random.key(0))
    assert float(result.state.aux) == 4
    bound = jax.jit(lambda q, aux: blr.laplace().bound(objective, q, jnp.ones(3), jax.random.key(0), aux=aux))
    np.testing.assert_allclose(result.bound, bound(result.q, result.state.aux), rtol=1e-12)
    assert abs(result.bound - bound(result.q, None)) > 1
