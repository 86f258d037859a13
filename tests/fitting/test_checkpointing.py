"""What a fit has saved survives signals, kills, damaged files and full disks."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.fitting import checkpoint as saving
from bayesrule.fitting import checkpointing, driver

ROWS, STEPS = 12, 200
RULE = blr.vogn(0.1)
START = jnp.zeros(2)
needs_signals = pytest.mark.skipif(os.name == "nt", reason="sends signals")


def data():
    x = np.random.default_rng(0).normal(size=(ROWS, 2))
    return jnp.asarray(x), jnp.asarray(x @ np.array([1.0, -2.0]) + 0.1)


def squared(theta, example):
    x, y = example
    return 0.5 * (y - x @ theta) ** 2


OBJECTIVE = blr.Objective(squared, size=ROWS, regularizer=1.0)


def fit(start=START, steps=STEPS, **more):
    key = None if isinstance(start, blr.Result) else jax.random.key(5)
    return blr.fit(RULE, OBJECTIVE, start, data(), steps=steps, batch_size=4, key=key, **more)


@pytest.fixture(scope="module")
def whole():
    return fit()


def same(first, second):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def cut_at(count, how):
    """A progress function that sends a signal, or calls a function, once so many steps are taken."""
    done = []

    def progress(result):
        if result.steps >= count and not done:
            done.append(1)
            signal.raise_signal(how) if isinstance(how, signal.Signals) else how()

    return progress


# How often, how many.


@pytest.mark.extended
def test_the_last_ones_are_kept(tmp_path):
    checkpoint = blr.Checkpoint(tmp_path / "run.npz", every=0, keep=3)
    seen = []
    fit(checkpoint=checkpoint, progress=lambda result: seen.append(result.steps))
    assert len(seen) > 3
    assert names(tmp_path) == ["run.npz", "run.npz.1", "run.npz.2"]
    assert checkpoint.files() == [tmp_path / name for name in names(tmp_path)]
    assert [blr.load(path).steps for path in checkpoint.files()] == seen[:-4:-1]
    assert checkpoint.load().steps == STEPS


def test_saved_at_an_interval_and_at_the_end(tmp_path, monkeypatch):
    """The interval is counted from the end of one save, and by default is longer for a state that is slow to write."""
    clock = [0.0]
    monkeypatch.setattr(checkpointing.time, "perf_counter", lambda: clock[0])
    saved = []

    class Slow(blr.Checkpoint):
        def save(self, result):
            saved.append(clock[0])
            clock[0] += 10.0

    def times(**more):
        saved.clear()
        machine = checkpointing.Checkpointing(Slow(tmp_path / "run.npz", **more))
        result = blr.Result(RULE.init(START, OBJECTIVE), "steps", {}, jax.random.key(0), True, None)
        for _ in range(80):
            clock[0] += 5.0
            if machine.is_due():
                machine.after(result)
        return np.diff(saved)

    assert np.all(times(every=40.0) == 50.0)
    assert times()[0] == 100.0  # 10 seconds of writing, 90 without
    assert np.all(times(every=0) == 15.0)  # after every chunk


@pytest.mark.extended
def test_a_fit_shorter_than_the_interval_is_saved_at_its_end(tmp_path, whole):
    fit(checkpoint=blr.Checkpoint(tmp_path / "run.npz"))
    same(blr.load(tmp_path / "run.npz").state, whole.state)
    assert names(tmp_path) == ["run.npz"]


def test_wrong_arguments(tmp_path):
    for wrong, message in (
        ({"every": -1.0}, "every= is the number of seconds"),
        ({"keep": 0}, "how many checkpoints to keep"),
        ({"signals": ["SIGKILL"]}, "not a signal that a program can handle"),
        ({"signals": ["SIGNONSENSE"]}, "not a signal"),
    ):
        with pytest.raises(ValueError, match=message):
            blr.Checkpoint(tmp_path / "run.npz", **wrong)
    with pytest.raises(ValueError, match=r"a path, a blr\.Checkpoint"):
        fit(checkpoint=3)


def test_the_position_of_a_source_is_saved(tmp_path):
    result = blr.fit(blr.newton(), lambda x: jnp.sum(x**2), START, steps=1)
    result.position = {"shard": 3, "offset": np.arange(2)}
    result.save(tmp_path / "run.npz")
    loaded = blr.load(tmp_path / "run.npz")
    assert loaded.position["shard"] == 3
    np.testing.assert_array_equal(loaded.position["offset"], np.arange(2))


# Damaged files.


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    fit(steps=5, checkpoint=blr.Checkpoint(folder / "run.npz"))
    fit(start=blr.load(folder / "run.npz"), steps=5, checkpoint=blr.Checkpoint(folder / "run.npz"))
    assert names(folder) == ["run.npz", "run.npz.1"]
    return folder


@pytest.mark.parametrize("kind", ["flipped", "cut"])
def test_a_damaged_checkpoint_is_never_loaded_silently(kind, two_checkpoints, tmp_path):
    """One bit is wrong, or the end is missing, at 50 places: an error, or the one before with a warning."""
    shutil.copytree(two_checkpoints, tmp_path, dirs_exist_ok=True)
    newest, before = tmp_path / "run.npz", tmp_path / "run.npz.1"
    content, checkpoint = newest.read_bytes(), blr.Checkpoint(newest)
    rng = np.random.default_rng(1)
    ends = [0, 1, len(content) - 1, len(content) - 30, len(content) - 70, len(content) - 90]  # with the checksum
    for place in [*ends, *np.linspace(2, len(content) - 2, 50).astype(int)]:
        damaged = bytearray(content[:place] if kind == "cut" else content)
        if kind == "flipped":
            damaged[place] ^= 1 << int(rng.integers(8))
        newest.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"run\.npz\.1: blr\.Checkpoint\('.*run\.npz'\)\.load\(\)"):
            blr.load(newest)
        with pytest.warns(UserWarning, match="damaged") as caught:
            assert checkpoint.load().steps == 5
        assert str(newest) in str(caught[0].message)
        assert f"from the checkpoint before, {before}, after 5 steps" in str(caught[0].message)
    before.write_bytes(before.read_bytes()[:-1])
    with pytest.raises(ValueError, match="No earlier checkpoint is left"):
        checkpoint.load()


def test_a_whole_file_is_no_worse_for_its_age(two_checkpoints):
    """The digest is of all bytes but itself, and NumPy reads the archive as any other."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert blr.Checkpoint(two_checkpoints / "run.npz").load().steps == 10
    with np.load(two_checkpoints / "run.npz") as file:
        assert '"format": 3' in str(file["header"])


# Signals.


@needs_signals
@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_saves_and_exits(name, tmp_path, whole):
    checkpoint = blr.Checkpoint(tmp_path / "run.npz", signals=("SIGTERM", "usr1"))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(SystemExit) as left:
        fit(checkpoint=checkpoint, progress=cut_at(17, signal.Signals[name]))
    assert left.value.code == 143
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == handlers
    cut = checkpoint.load()
    assert cut.reason == "interrupted"
    assert 17 <= cut.steps < STEPS
    rest = fit(start=cut, steps=STEPS - cut.steps, checkpoint=checkpoint)
    same(rest.state, whole.state)
    joined = np.concatenate([cut.trace["objective"], rest.trace["objective"]])
    np.testing.assert_array_equal(joined, whole.trace["objective"])


@needs_signals
def test_ctrl_c_saves_and_returns(tmp_path, whole):
    result = fit(checkpoint=tmp_path / "run.npz", progress=cut_at(17, signal.SIGINT))
    saved = blr.load(tmp_path / "run.npz")
    assert result.reason == saved.reason == "interrupted"
    same(saved.state, result.state)
    same(fit(start=saved, steps=STEPS - saved.steps).state, whole.state)


@needs_signals
def test_a_large_state_is_saved_after_the_step_it_is_at(tmp_path, monkeypatch):
    """Where every step is a program of its own, a signal does not wait for the chunk of 16 steps to end."""
    calls, run = [], driver.run_chunk

    def signalled(*arguments, **more):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return run(*arguments, **more)

    monkeypatch.setattr(driver, "is_large", lambda state: True)
    monkeypatch.setattr(driver, "run_chunk", signalled)
    with pytest.raises(SystemExit):
        fit(checkpoint=tmp_path / "run.npz")
    assert blr.load(tmp_path / "run.npz").steps == 3


@pytest.mark.extended
@needs_signals
def test_signals_are_left_alone_without_a_checkpoint_and_in_threads(tmp_path):
    seen = []
    look = lambda result: seen.append(signal.getsignal(signal.SIGTERM))
    fit(steps=2, progress=look)
    thread = threading.Thread(target=fit, kwargs={"steps": 2, "progress": look, "checkpoint": tmp_path / "run.npz"})
    thread.start()
    thread.join()
    assert set(seen) == {signal.getsignal(signal.SIGTERM)}
    assert (tmp_path / "run.npz").exists()


CHILD = """
    import sys
    from pathlib import Path
    import jax
    jax.config.update("jax_enable_x64", True)
    sys.path.insert(0, sys.argv[1])
    import bayesrule as blr
    from test_checkpointing import fit

    def tell(result):
        if 0 < result.steps:
            print("running", flush=True)

    fit(steps=10**6, checkpoint=blr.Checkpoint(sys.argv[2]), progress=tell)
"""


def started(program, *arguments):
    source = str(Path(blr.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


@pytest.mark.extended
@needs_signals
def test_sigterm_from_outside(tmp_path):
    """A process that is ended in the middle of a long fit exits with 143; what it saved goes on to the same end."""
    child = started(CHILD, Path(__file__).parent, tmp_path / "run.npz")
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        time.sleep(0.3)
        child.terminate()
        child.communicate(timeout=60)
        assert child.returncode == 143
    finally:
        child.kill()
        child.communicate()
    saved = blr.load(tmp_path / "run.npz")
    assert saved.steps > 0
    assert names(tmp_path) == ["run.npz"]
    plan, more = 10**6, 50
    # The plan of 10⁶ steps is part of the state, so that both fits are cut on their way and not planned shorter.
    stop = lambda result: result.steps >= saved.steps + more
    rest = fit(start=saved, steps=plan - saved.steps, on_step=stop, every=saved.steps + more)
    uncut = fit(steps=plan, on_step=stop, every=saved.steps + more)
    same(rest.state, uncut.state)


KILLED = """
    import os, random, signal, sys, time
    import numpy as np
    from pathlib import Path
    import bayesrule as blr
    from bayesrule.fitting.checkpoint import read, write

    path = Path(sys.argv[1])
    checkpoint = blr.Checkpoint(path, keep=3)
    value = lambda number: {"number": number, "array": np.full(200_000, float(number))}
    write(path, value(0))
    rng, last = random.Random(0), 0
    for _ in range(int(sys.argv[2])):
        child = os.fork()
        if child == 0:
            for number in range(last + 1, 10**9):
                write(path, value(number), checkpoint._keep_others)
        time.sleep(rng.uniform(0.005, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        numbers = []
        for file in checkpoint.files():
            found = read(file)
            assert np.all(found["array"] == found["number"])
            numbers.append(found["number"])
        assert checkpoint.files()[0] == path and numbers == sorted(numbers, reverse=True) and numbers[0] >= last
        last = numbers[0]
    print(last, flush=True)
"""


@pytest.mark.extended
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_killed_while_it_writes(tmp_path):
    """SIGKILL at random moments of writes one after another: the file is the old one or the new one, and whole."""
    child = started(KILLED, tmp_path / "run.npz", 30)
    text, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    assert int(text) > 3
    saving.check_writable(tmp_path / "run.npz")  # As before the next fit: what the killed ones left is removed.
    # A place among the earlier ones is empty where the last kill came between two renamings.
    assert {"run.npz"} < set(names(tmp_path)) <= {"run.npz", "run.npz.1", "run.npz.2"}


# Disks.


FAILURES = "cannot be written|could not be written"


def failing(error):
    def write(file, arrays):
        file.write(b"a part of it")
        raise OSError(error, os.strerror(error))

    return write


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_fit_goes_on_if_it_cannot_be_saved(error, tmp_path, monkeypatch, whole):
    """A warning for all the failures on the way, one for the end, and what was saved before is as it was."""
    checkpoint = blr.Checkpoint(tmp_path / "run.npz", every=0)
    fit(steps=3, checkpoint=checkpoint)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(saving, "_write_archive", failing(error))
    with pytest.warns(UserWarning, match=FAILURES) as caught:
        result = fit(checkpoint=checkpoint)
    same(result.state, whole.state)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert f"{tmp_path / 'run.npz'} cannot be written: {os.strerror(error)}. The fit goes on" in messages[0]
    assert "The end of the fit, after 200 steps, could not be written" in messages[1]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_it_is_saved_as_soon_as_there_is_room(tmp_path, monkeypatch, whole):
    checkpoint = blr.Checkpoint(tmp_path / "run.npz", every=0)
    monkeypatch.setattr(saving, "_write_archive", failing(errno.ENOSPC))
    with pytest.warns(UserWarning, match="No space left") as caught:
        fit(checkpoint=checkpoint, progress=cut_at(17, monkeypatch.undo))
    assert len(caught) == 1
    same(checkpoint.load().state, whole.state)
    assert not any(name.startswith(".") for name in names(tmp_path))


def test_a_folder_that_vanishes(tmp_path, whole):
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.warns(UserWarning, match=FAILURES) as caught:
        result = fit(
            checkpoint=blr.Checkpoint(folder / "run.npz", every=0), progress=cut_at(17, lambda: shutil.rmtree(folder))
        )
    same(result.state, whole.state)
    assert "cannot be written: No such file or directory" in str(caught[0].message)
    assert "the last that could be is the one after" in str(caught[1].message)


def test_a_path_that_cannot_work_is_found_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file" / "run.npz", tmp_path / "no such folder" / "run.npz", tmp_path]
    if Path("/proc/self").exists():
        places.append(Path("/proc/run.npz"))  # A folder in which not even root can make a file.
    for place in places:
        with pytest.raises(OSError, match=r"cannot be written.* Give a path in a folder that exists") as caught:
            fit(checkpoint=place, progress=lambda result: pytest.fail("a step was taken"))
        assert str(place) in str(caught.value)
    assert names(tmp_path) == ["file"]


def test_parameters_that_cannot_be_saved_are_found_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match="no public name"):
        checkpointing.Checkpointing(tmp_path / "run.npz").check({"prior": OBJECTIVE.regularizer})


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None or os.name == "nt" or os.geteuid() != 0:
        pytest.skip("only root may mount")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("cannot mount here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_full(tiny_disk, whole):
    checkpoint = blr.Checkpoint(tiny_disk / "run.npz", every=0, keep=2)
    fit(steps=3, checkpoint=checkpoint)
    (tiny_disk / "other").write_bytes(b"0" * (64 * 1024 - 4096 * 6))
    with pytest.warns(UserWarning, match=FAILURES) as caught:
        result = fit(checkpoint=checkpoint)
    assert "No space left on device" in str(caught[0].message)
    same(result.state, whole.state)
    assert checkpoint.load().steps < STEPS
    assert not any(name.startswith(".") for name in names(tiny_disk))
    (tiny_disk / "other").unlink()
    result.save(tiny_disk / "elsewhere.npz")
    with pytest.raises(OSError, match=r"No space left on device: '.*disk/large\.npz'"):
        blr.save(tiny_disk / "large.npz", jnp.zeros(2**14))


@needs_signals
def test_infer_saves_at_sigterm(tmp_path):
    skewed = lambda x: jnp.sum(3.0 * x - jnp.exp(x))
    stop = lambda text: signal.raise_signal(signal.SIGTERM) if "step 1," in text else None
    with pytest.raises(SystemExit) as left:
        blr.infer(skewed, START, key=jax.random.key(0), progress=stop, checkpoint=tmp_path / "best.npz")
    assert left.value.code == 143
    assert np.all(np.isfinite(blr.load(tmp_path / "best.npz").mean))
    with pytest.raises(OSError, match="cannot be written"):
        blr.infer(skewed, START, key=jax.random.key(0), checkpoint=tmp_path / "no such folder" / "best.npz")
