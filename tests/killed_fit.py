"""A fit with a checkpoint that one of its processes does not survive, and that goes on when it is started again.

    python killed_fit.py FOLDER FORM [PROCESS STEP SECONDS]

A script of `fitting/test_sharding.py`. FOLDER has the checkpoint, in one file or in parts as FORM says, and gets the
numbers of the end. With the other arguments the fit is first run without a checkpoint, uncut; and then again, when the
process PROCESS kills itself SECONDS after the step STEP, in the middle of another step or of a save.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import jax
import numpy as np

import bayesrule as blr
from sharded_fits import NETWORK, ROWS, X, Y, network_loss, whole

STEPS, EVERY = 40, 4


def main(folder, form, *kill):
    blr.join_processes()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    own = blr.rows_of_process(ROWS, mesh)
    data = blr.shard((X[own], Y[own]), mesh)
    objective = blr.Objective(network_loss, size=ROWS, regularizer=1.0)
    options = {"batch_size": 20, "key": jax.random.key(0), "every": EVERY}

    def fit(start, name, **more):
        result = blr.fit(blr.ivon(0.1), objective, start, data, **options, **more)
        state = result.state
        numbers = [whole(leaf, mesh) for leaf in jax.tree.leaves((state.q, state.average, state.aux, state.scale))]
        if jax.process_index() == 0:
            np.savez(folder / name, *numbers)

    def on_step(result):
        if kill and jax.process_index() == int(kill[0]) and result.steps == int(kill[1]):
            threading.Timer(float(kill[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()

    in_parts = form == "parts"
    start, taken = blr.shard_parameters(NETWORK, mesh) if in_parts else NETWORK, 0
    if kill:
        fit(start, "uncut.npz", steps=STEPS, on_step=lambda result: None)
    if in_parts:
        checkpoint = blr.ShardedCheckpoint(folder / "parts", every=0)
        saved = checkpoint.load(mesh)
    else:
        checkpoint = blr.Checkpoint(folder / "checkpoint.npz", every=0)
        saved = checkpoint.load()
    if saved is not None:
        start, taken = saved, saved.steps
        print("resumed after", taken, flush=True)
    fit(start, "end.npz", steps=STEPS - taken, on_step=on_step, checkpoint=checkpoint)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(Path(sys.argv[1]), *sys.argv[2:])
