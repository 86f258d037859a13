"""Compiled programs are kept between runs, each processor's in a folder of its own, and a second run logs nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bayesrule.cli.errors import describe_processor

PROGRAM = """
from bayesrule.cli.errors import configure_jax
configure_jax()
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
jax.block_until_ready(jax.jit(lambda x: jnp.linalg.svd(x @ x.T)[1])(jnp.ones((20, 20))))
print(len(hits))
"""
CPUINFO = """processor : 0
vendor_id : GenuineIntel
cpu family : 6
model : {model}
flags : {flags}

processor : 1
flags : other
"""


def run(cache: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run the program in a process of its own, as users do: without the flags of the suite."""
    suite = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PLATFORMS")
    kept = {name: value for name, value in os.environ.items() if name not in (*suite, "TF_CPP_MIN_LOG_LEVEL")}
    environment = {**kept, "XDG_CACHE_HOME": str(cache), "HOME": str(cache), **variables}
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True, text=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the cache folder of Linux is set")
def test_a_second_run_uses_the_cache_and_logs_nothing(tmp_path):
    first, second = run(tmp_path), run(tmp_path)
    assert (first.stdout.strip(), first.stderr) == ("0", "")
    assert int(second.stdout) > 0
    assert second.stderr == ""
    own = tmp_path / "bayesrule" / "jax" / (describe_processor() or "")
    assert any(own.glob("jit_*"))
    # What the user has set stays: a level of messages, or a folder, which other machines may share.
    shown = "import os; print(os.environ['TF_CPP_MIN_LOG_LEVEL'], os.environ['JAX_COMPILATION_CACHE_DIR'])"
    program = f"from bayesrule.cli.errors import configure_jax\nconfigure_jax()\n{shown}"
    for variables, expected in [
        ({"TF_CPP_MIN_LOG_LEVEL": "0"}, f"0 {own}"),
        ({"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}, f"2 {tmp_path}"),
        ({"JAX_PLATFORMS": "cuda,cpu"}, f"2 {own}"),
    ]:
        base = {"PATH": "", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
        base |= {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=base | variables, check=True, capture_output=True, text=True)
        assert done.stdout.strip() == expected


def test_processors_with_other_instructions_have_other_folders(tmp_path):
    def described(text):
        (tmp_path / "cpuinfo").write_text(text)
        return describe_processor(tmp_path / "cpuinfo")

    names = [
        described(CPUINFO.format(model=207, flags="sse avx avx512f")),
        described(CPUINFO.format(model=207, flags="sse avx")),
        described(CPUINFO.format(model=85, flags="sse avx")),
        described("processor : 0\nFeatures : fp asimd\n"),
    ]
    assert len({*names}) == 4
    assert None not in names
    assert described(CPUINFO.format(model=207, flags="avx sse")) == names[1]
    # Without the features a program of another processor could be read, and XLA's messages about it are not silenced.
    assert described("processor : 0\n") is None
    assert describe_processor(tmp_path / "none") is None
