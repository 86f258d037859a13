"""Many devices and many processes: the same numbers as on one device, whatever is divided and however.

Virtual devices have to be asked for before JAX starts, so that the fits run in scripts of their own.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_allclose

import bayesrule as blr
from killed_fit import EVERY, STEPS
from sharded_fits import DIVIDED, cases

SCRIPTS = Path(__file__).parents[1]
QUICK = ("vogn", "ivon", "newton", "sites")


def run(script, *arguments, devices=1, processes=None, timeout=400):
    """Run a script of the folder above with so many virtual devices, or processes of one device each."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    paths = [str(SCRIPTS), str(Path(blr.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    launcher = [] if processes is None else ["-m", "bayesrule.launch", "--grace", "3", str(processes)]
    command = [sys.executable, *launcher, str(SCRIPTS / script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def fitted(folder, chosen, **where):
    """The numbers of the chosen cases, by kind and case."""
    done = run("sharded_fits.py", folder / "numbers.npz", *chosen, **where)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    with np.load(folder / "numbers.npz") as file:
        for name in file.files:
            found.setdefault(name.rsplit(":", 1)[0], []).append(file[name])
    return found


def assert_same(found, expected, tolerance=1e-10):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert_allclose(one.astype(float), other.astype(float), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
    chosen = [f"{kind}:{name}" for kind in ("one", "replicated") for name in QUICK]
    return fitted(tmp_path_factory.mktemp("eight"), [*chosen, "divided:ivon"], devices=8)


@pytest.mark.sampled("replicated:ivon", "replicated:newton", "replicated:sites", "divided:ivon")
@pytest.mark.parametrize("case", [f"replicated:{name}" for name in QUICK] + ["divided:ivon"])
def test_eight_devices_are_one_device(on_eight, case):
    """Rows that divide neither among the devices nor into batches; the script counts that the loop is compiled once."""
    assert_same(on_eight[case], on_eight[f"one:{case.split(':')[1]}"])


@pytest.mark.extended
def test_eight_devices_are_one_device_in_the_other_cases(tmp_path):
    rest = [name for name in cases() if name not in QUICK]
    divided = [name for name in DIVIDED if name != "ivon"]
    chosen = [f"{kind}:{name}" for kind in ("one", "replicated") for name in rest]
    chosen += [f"divided:{name}" for name in divided] + [f"one:{name}" for name in divided if name not in rest]
    found = fitted(tmp_path, chosen, devices=8)
    for name in rest:
        assert_same(found[f"replicated:{name}"], found[f"one:{name}"])
    for name in divided:
        assert_same(found[f"divided:{name}"], found[f"one:{name}"])


@pytest.mark.extended
@pytest.mark.parametrize("count", [2, 4])
def test_processes_are_devices(tmp_path, count):
    """So many processes of a device each give what one process with so many devices does."""
    names = [name for name in cases() if name != "shard samples"]  # Its 8 parts are those of 8 devices.
    chosen = [f"replicated:{name}" for name in names] + ["divided:vogn", "divided:ivon"]
    devices = fitted(tmp_path, chosen, devices=count)
    processes = fitted(tmp_path, chosen, processes=count)
    for case in chosen:
        assert_same(processes[case], devices[case], 1e-12)


# Faults.


def numbers_of(file):
    with np.load(file) as arrays:
        return [arrays[name] for name in arrays.files]


def killed(folder, form, count, process, step, seconds):
    """Run a fit of which one process is killed; the launcher ends the others and says so."""
    folder.mkdir()
    done = run("killed_fit.py", folder, form, process, step, seconds, processes=count)
    assert done.returncode == 137, done.stderr[-3000:]
    assert f"process {process} was killed by SIGKILL" in done.stderr
    assert not (folder / "end.npz").exists()
    return numbers_of(folder / "uncut.npz")


def resumed(folder, form, count):
    """Start it again: after how many steps it went on, and the numbers of its end."""
    done = run("killed_fit.py", folder, form, processes=count)
    assert done.returncode == 0, done.stderr[-3000:]
    return int(re.search(r"resumed after (\d+)", done.stdout)[1]), numbers_of(folder / "end.npz")


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.extended
def test_two_processes_of_which_one_is_killed(on_eight, tmp_path):
    """Their fit is that of one device, and goes on after one was killed as if nothing had happened, bit for bit."""
    uncut = killed(tmp_path / "run", "file", 2, 1, 3 * EVERY, 0.0)
    assert_same(uncut, on_eight["one:ivon"])
    after, end = resumed(tmp_path / "run", "file", 2)
    assert 2 * EVERY <= after < STEPS
    assert_equal(end, uncut)


@pytest.mark.extended
def test_ten_runs_of_four_processes_with_one_killed(tmp_path):
    """Killed at random moments of random processes: bit for bit on four processes, and to 1e-10 on two and on one.

    Two of the ten have divided parameters and save in parts.
    """
    random = np.random.default_rng(0)
    for place in range(10):
        folder, form = tmp_path / str(place), "parts" if place in (3, 9) else "file"
        step = EVERY * random.integers(1, STEPS // EVERY - 1)
        uncut = killed(folder, form, 4, random.integers(4), step, random.uniform(0, 0.05))
        count = {8: 1, 9: 2}.get(place, 4)
        after, end = resumed(folder, form, count)
        assert step - EVERY <= after < STEPS
        if count == 4:
            assert_equal(end, uncut)
        else:
            assert_same(end, uncut)


def test_the_launcher_notices_a_dead_process_within_seconds(tmp_path):
    """It needs no JAX for that: the others sleep for a minute, and are ended with a message and the exit code."""
    script = tmp_path / "sleep.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "place = int(os.environ['JAX_PROCESS_ID'])\n"
        "assert os.environ['JAX_COORDINATOR_ADDRESS'].startswith('127.0.0.1:')\n"
        "assert os.environ['JAX_COORDINATOR_BIND_ADDRESS'] == os.environ['JAX_COORDINATOR_ADDRESS']\n"
        "sys.exit(5) if sys.argv[1:] == ['exit'] and place == 1 else None\n"
        "os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1:] == ['kill'] and place == 1 else None\n"
        "time.sleep(0 if sys.argv[1:] == ['well'] else 60)\n"
    )
    for how, code, message in (
        ("kill", 137, "process 1 was killed by SIGKILL"),
        ("exit", 5, "process 1 ended with exit code 5"),
        ("well", 0, ""),
    ):
        began = time.monotonic()
        done = run(script, how, processes=3)
        assert (done.returncode, message in done.stderr) == (code, True), done.stderr
        assert time.monotonic() - began < 20


# Without other devices.


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((1,), ("data",))


def test_the_same_code_serves_one_device(mesh):
    x, y = jnp.arange(12.0).reshape(6, 2) / 10, jnp.array([0.1, 0.4, 0.3, 0.9, 0.7, 1.2])
    objective = blr.Objective(lambda w, e: 0.5 * (e[0] @ w - e[1]) ** 2, size=6, regularizer=1.0)
    plain = blr.fit(blr.newton(), objective, jnp.zeros(2), (x, y), steps=3)
    sharded = blr.fit(
        blr.newton(), objective, blr.shard_parameters(jnp.zeros(2), mesh), blr.shard((x, y), mesh), steps=3
    )
    assert_allclose(sharded.q.mean, plain.q.mean, rtol=1e-12)
    run = blr.run(blr.newton(), objective, jnp.zeros(2), blr.shard((x, y), mesh), steps=3)
    assert_allclose(run.q.mean, plain.q.mean, rtol=1e-12)


def test_an_unknown_axis_is_refused(mesh):
    with pytest.raises(ValueError, match="no 'model': pass axis="):
        blr.shard({"y": np.ones(3)}, mesh, "model")
    with pytest.raises(ValueError, match="no 'model': pass axis="):
        blr.shard_parameters(np.ones(3), mesh, "model")


@pytest.mark.extended
def test_padding_is_no_example():
    """Rows of padding count neither in N/M nor in a mini-batch, whatever they hold."""
    x, y = np.array([1.0, 2.0, 3.0, np.nan]), np.array([1.0, 2.5, 2.0, np.nan])
    padded = blr.Weighted((x, y), jnp.array([1.0, 1.0, 1.0, 0.0]), padding=1)
    objective = blr.Objective(lambda w, e: 0.5 * (e[0] * w - e[1]) ** 2, size=3, regularizer=1.0)
    plain = (x[:3], y[:3])
    assert_allclose(objective.data(jnp.array(0.7), padded)[0], objective.data(jnp.array(0.7), plain)[0], rtol=1e-14)
    options = {"steps": 9, "batch_size": 2, "key": jax.random.key(0)}
    one = blr.fit(blr.sgd(0.1), objective, jnp.array(0.0), plain, **options)
    other = blr.fit(blr.sgd(0.1), objective, jnp.array(0.0), padded, **options)
    assert_allclose(one.q.mean, other.q.mean, rtol=1e-14)


def test_a_model_with_local_blocks_refuses_padding_on_all_rows():
    rule, model, start, data, _ = cases()["svi"]
    padded = blr.Weighted({"y": np.concatenate([data["y"], data["y"][-1:]])}, jnp.ones(62).at[-1].set(0), padding=1)
    one_device = NamedSharding(jax.make_mesh((1,), ("data",)), PartitionSpec("data"))
    with pytest.raises(ValueError, match="a member for each row"):
        blr.fit(rule, model, start, jax.device_put(padded, one_device), steps=1)
