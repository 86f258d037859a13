"""Canaries for two defects of jaxlib on CPU, so that widening the bound on jax is a decision; and for its cache's key.

`pyproject.toml` keeps jax below 0.10: jaxlib 0.10.2 silently returns wrong numbers under `jit`
(https://github.com/jax-ml/jax/issues/39103), and 0.10.0 to 0.10.2 can dead-lock on two cores. Both tests fail
there. If one fails after an upgrade, the release is not fit for use, however well the other tests do.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

# The wrong kernel is chosen from 16,385 rows of three float64 numbers on, from 32,769 in float32.
PRODUCT_AND_SUM = """
import jax, jax.numpy as jnp, numpy as np
for rows in (16_384, 16_385, 20_000, 32_769, 40_000):
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-13)):
        random = np.random.default_rng(rows)
        x = random.normal(size=(rows, 3)).astype(dtype)
        for matrix in (np.eye(3, dtype=dtype), random.normal(size=(3, 3)).astype(dtype)):
            with jax.enable_x64(dtype == "float64"):
                squares = jax.jit(lambda m, x: jax.vmap(lambda row: jnp.sum((m @ row) ** 2))(x))(matrix, x)
                squares = np.asarray(squares)
            assert squares.dtype == dtype
            expected = ((x.astype("float64") @ matrix.T.astype("float64")) ** 2).sum(axis=1)
            np.testing.assert_allclose(squares, expected, rtol=0, atol=tolerance * expected.max())
"""


def test_vmapped_matrix_vector_product_and_reduction():
    """The fused kernel of a vmapped matrix–vector product and a sum agrees with NumPy at every row."""
    alone(PRODUCT_AND_SUM)


# With batches of 10,000, 0.10.2 hung in three runs of three; with 1,000, in none of three.
TWO_SOLVES = """
import jax, jax.numpy as jnp, numpy as np
random = np.random.default_rng(0)
a, c = random.normal(size=(2, 10_000, 4, 4)) + 8 * np.eye(4)
b, d = random.normal(size=(2, 10_000, 4, 4))
solve = jax.jit(lambda a, b, c, d: (jnp.linalg.solve(a, b), jnp.linalg.solve(c, d)))
for _ in range(100):
    x, y = jax.block_until_ready(solve(a, b, c, d))
assert x.dtype == "float64"
np.testing.assert_allclose(x, np.linalg.solve(a, b), atol=1e-12)
np.testing.assert_allclose(y, np.linalg.solve(c, d), atol=1e-12)
"""


def test_two_independent_batched_solves_do_not_dead_lock():
    """Two batched 4×4 solves in one program, run again and again, come to an end and are right.

    They run in a process of their own, so that a dead-lock fails this test instead of stopping the suite.
    The timeout is far above the two or three seconds that the runs take.
    """
    alone(TWO_SOLVES)


def alone(code):
    """Run this as a user would: in a process of its own, compiled as JAX does by default."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    environment = kept | {"JAX_ENABLE_X64": "true", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    try:
        subprocess.run(command, env=environment, timeout=120, check=True, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        pytest.fail("this program dead-locked")
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr)


def test_the_key_of_a_cached_program_names_the_instructions_of_the_processor():
    """The command line silences XLA's messages about programs of other processors, because none is ever read.

    Part of the key is the description of the devices, with the features for which XLA compiles.
    """
    from jax._src import cache_key
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]  # There is no public way.

    described = xla_client.get_topology_for_devices(jax.devices("cpu")).serialize()
    parts = []
    cache_key._hash_accelerator_config(SimpleNamespace(update=parts.append), np.array(jax.devices("cpu")))
    assert b"".join(parts) == described
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split("flags", 1)[-1].splitlines()[0].split() if cpuinfo.exists() else []
    for feature in {"avx", "avx2", "fma", "avx512f", "avx512bw", "sha_ni"} & set(flags):
        assert f"+{feature.removesuffix('_ni')}".encode() in described
