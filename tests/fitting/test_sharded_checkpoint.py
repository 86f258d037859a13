"""Checkpoints in parts: the same state bit for bit, the one before where the newest is damaged, and never silently."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.fitting.sharded_checkpoint import _bit_sum

pytest.importorskip("orbax.checkpoint")
X, Y = np.arange(12.0).reshape(6, 2) / 10, np.array([0.1, 0.4, 0.3, 0.9, 0.7, 1.2])


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((1,), ("data",))


def fit(start, mesh, steps, **options):
    objective = blr.Objective(lambda w, e: 0.5 * (e[0] @ w - e[1]) ** 2, size=6, regularizer=1.0)
    more = {"batch_size": 4, "key": jax.random.key(0), "on_step": lambda result: None, "every": 2}
    return blr.fit(blr.ivon(0.1), objective, start, blr.shard((X, Y), mesh), steps=steps, **more, **options)


# Where one array cannot be read, Orbax leaves the tasks that read the others to themselves.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_fit_goes_on_from_its_parts(mesh, tmp_path):
    checkpoint = blr.ShardedCheckpoint(tmp_path / "run", keep=2, every=0)
    assert checkpoint.load(mesh) is None
    saved = fit(blr.shard_parameters(jnp.zeros(2), mesh), mesh, 6, checkpoint=checkpoint)
    loaded = checkpoint.load(mesh)
    # There is one after every chunk of steps, of which a slow machine makes more.
    before, last = sorted(int(path.name) for path in checkpoint.folder.iterdir())
    assert last == 6
    assert (loaded.reason, loaded.steps) == (saved.reason, 6)
    np.testing.assert_array_equal(loaded.trace["objective"], saved.trace["objective"])
    ends = [fit(start, mesh, 4).state for start in (saved, loaded)]
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(one, other)

    # Bits are flipped in every file of the newest that has arrays.
    for path in (checkpoint.folder / "6").rglob("*"):
        if path.is_file() and "/d/" in str(path):
            data = bytearray(path.read_bytes())
            for place in range(0, len(data), 7):
                data[place] ^= 0x10
            path.write_bytes(data)
    with pytest.warns(UserWarning, match=f"step 6.*goes on from that of step {before}"):
        assert checkpoint.load(mesh).steps == before
    for path in (checkpoint.folder / str(before)).rglob("*"):
        if path.is_file() and "/d/" in str(path):
            path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(ValueError, match="all checkpoints are damaged"):
        checkpoint.load(mesh)


@pytest.mark.parametrize("kind", [np.float64, np.float32, jnp.bfloat16, np.int32, bool])
def test_the_sum_of_bits_sees_one_flipped_bit(kind):
    values = np.array(jnp.arange(6).astype(kind))
    total = int(_bit_sum(jnp.asarray(values)))
    raw = values.view(np.uint8).copy()
    raw[-1] ^= 1
    assert int(_bit_sum(jnp.asarray(raw.view(values.dtype).reshape(values.shape)))) != total
