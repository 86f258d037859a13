"""Compiled programs are kept between runs, and a second run, which reads them, logs nothing."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
from bayesrule.cli.errors import configure_jax
configure_jax()
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
jax.block_until_ready(jax.jit(lambda x: jnp.linalg.svd(x @ x.T)[1])(jnp.ones((20, 20))))
print(len(hits))
"""
SETTINGS = """
import os
from bayesrule.cli.errors import configure_jax
configure_jax()
print(os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["JAX_COMPILATION_CACHE_DIR"])
"""
OF_THE_SUITE = ("XLA_FLAGS", "TF_CPP_MIN_LOG_LEVEL", "JAX_COMPILATION_CACHE_DIR", "JAX_PLATFORMS")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the cache folder of Linux is set")


def run(program: str, home: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a program in a process of its own, as users do: without the settings of the suite."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_THE_SUITE}
    environment = {**kept, "XDG_CACHE_HOME": home, "HOME": home, **variables}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True, text=True)


@pytest.mark.extended
def test_a_second_run_reads_the_cache_and_logs_nothing(tmp_path):
    variables = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    first, second = (run(PROGRAM, str(tmp_path), **variables) for _ in range(2))
    assert (first.stdout.strip(), first.stderr) == ("0", "")
    assert int(second.stdout) > 0
    assert second.stderr == ""
    assert any((tmp_path / "bayesrule" / "jax").glob("jit_*"))


def test_what_the_user_has_set_stays(tmp_path):
    own = tmp_path / "bayesrule" / "jax"
    shown = lambda **variables: run(SETTINGS, str(tmp_path), **variables).stdout.strip()
    assert shown(JAX_PLATFORMS="cpu") == f"3 {own}"
    assert shown(TF_CPP_MIN_LOG_LEVEL="0", JAX_COMPILATION_CACHE_DIR="/elsewhere") == "0 /elsewhere"
    assert shown(JAX_PLATFORMS="cuda,cpu") == f"2 {own}"  # Errors of other devices are shown.
