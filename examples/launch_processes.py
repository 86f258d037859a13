"""One fit in several processes, with a checkpoint to go on from after any of them was lost.

    python -m bayesrule.launch 4 examples/launch_processes.py run.npz

The same script runs alone (`python examples/launch_processes.py run.npz`), under the launcher, and under SLURM
(`examples/slurm.sh`). Kill one of its processes, and start it again: it goes on as if nothing had happened.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bayesrule as blr

ROWS, STEPS = 1000, 2000


def read(rows):
    """The rows of this process alone; a real script reads them from its own part of the files."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 20)).astype(np.float32)
    return x[rows], np.sin(x[rows].sum(1))


def loss(params, example):
    x, y = example
    output = jnp.tanh(x @ params["hidden"] + params["bias"]) @ params["output"]
    return 0.5 * (output - y) ** 2


def main(path):
    blr.join_processes()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    data = blr.shard(read(blr.rows_of_process(ROWS, mesh)), mesh)

    random = np.random.default_rng(1)
    start = {
        "hidden": random.normal(size=(20, 64)).astype(np.float32) / 4,
        "bias": np.zeros(64, np.float32),
        "output": random.normal(size=64).astype(np.float32) / 8,
    }
    taken = 0
    if path.exists():
        start = blr.load(path)
        taken = start.steps

    result = blr.fit(
        blr.ivon(0.1),
        blr.Objective(loss, size=ROWS, regularizer=1.0),
        start,
        data,
        steps=STEPS - taken,
        batch_size=128,
        key=jax.random.key(0),
        checkpoint=path,
        progress=True,
    )
    if jax.process_index() == 0:
        print(f"{result.reason} after {result.steps} steps on {jax.device_count()} devices")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "run.npz"))
