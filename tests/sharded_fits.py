"""Fits by every kind of recipe, to run on one device, on many, and in many processes: a script of the tests.

    python sharded_fits.py result.npz KIND:CASE…        with KIND "one", "replicated" or "divided"

It fits cases with their data on one device, divided over all devices, or with the parameters divided too, and writes
the numbers of the last states.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import bayesrule as blr
from bayesrule import factors
from bayesrule.fitting.loop import run_chunk
from bayesrule.numerics import programs

ROWS = 61  # It divides neither among devices nor into batches of 20.
random = np.random.default_rng(0)
X = random.normal(size=(ROWS, 6))
Y = (X @ random.normal(size=6) + random.normal(size=ROWS) > 0).astype(float)
NETWORK = {"a": random.normal(size=(6, 8)), "b": np.zeros(8), "c": random.normal(size=8)}


def network_loss(params, example):
    output = jnp.tanh(example[0] @ params["a"] + params["b"]) @ params["c"]
    return jnp.logaddexp(0.0, output) - example[1] * output


def batch_loss(params, batch, aux, key):
    return jax.vmap(lambda example: network_loss(params, example))(batch), aux


def regression():
    prior = blr.Gaussian(jnp.zeros(6), jnp.eye(6))
    terms = {"prior": factors.prior("w", prior), "y": factors.bernoulli_logit("y", {"w": "x"})}
    return blr.Model({"w": prior}, terms)


def mixture():
    """Two components in two dimensions, with every row's choice as a local block."""
    weights, component = blr.Dirichlet(jnp.ones(2)), blr.NormalWishart(jnp.zeros(2), 0.1, 4.0, jnp.eye(2))
    start = blr.NormalWishart(jnp.array(X[:2, :2]), jnp.ones(2), jnp.full(2, 4.0), jnp.stack([jnp.eye(2)] * 2))
    terms = {
        "prior of weights": factors.prior("weights", weights),
        "prior of components": factors.prior("components", component),
        "z": factors.categorical("z", probabilities="weights"),
        "y": factors.choice("z", factors.multivariate_normal("y", joint="components")),
    }
    return blr.Model({"weights": weights, "components": start}, terms, local={"z": blr.Categorical(jnp.zeros(2))})


def linear_loss(w, example):
    return jnp.logaddexp(0.0, example[0] @ w) - example[1] * (example[0] @ w)


def first(rows, data):
    return {name: array[:rows] for name, array in data.items()}


def cases():
    """Each case's rule, objective, start and data, and how it is fitted."""
    network = blr.Objective(network_loss, size=ROWS, regularizer=1.0)
    linear = blr.Objective(linear_loss, size=ROWS, regularizer=1.0)
    whole = blr.Objective.from_batch(batch_loss, size=ROWS, regularizer=1.0)
    batches = {"batch_size": 20, "steps": 40, "key": jax.random.key(0)}
    named = {"x": X, "y": Y}
    return {
        "adam": (blr.adam(1e-2), network, NETWORK, (X, Y), batches),
        "vogn": (blr.vogn(1e-2), network, NETWORK, (X, Y), batches),
        "ivon": (blr.ivon(0.1), network, NETWORK, (X, Y), batches),
        "newton": (blr.newton(), linear, np.zeros(6), (X, Y), {"steps": 30, "tolerance": 1e-9}),
        "svi": (blr.svi(0.5), mixture(), None, {"y": X[:, :2]}, batches),
        "sites": (blr.cvi(0.5, sites=True), regression(), None, named, batches),
        "sites on all rows": (blr.cvi(0.5, sites=True), regression(), None, named, {"steps": 20}),
        # Rows that divide, so that each device stores the sites, and the local blocks, of its own.
        "sites of devices": (blr.cvi(0.5, sites=True), regression(), None, first(56, named), batches),
        "local blocks of devices": (blr.svi(0.5), mixture(), None, first(56, {"y": X[:, :2]}), {"steps": 10}),
        "from_batch": (blr.adam(1e-2), whole, NETWORK, (X, Y), batches | {"batch_size": 24}),
        "shard samples": (
            blr.ivon(0.1).replace(points=blr.ShardSamples(8)),
            network,
            NETWORK,
            (X, Y),
            batches | {"batch_size": 24},
        ),
        "microbatches": (blr.vogn(1e-2), network, NETWORK, (X, Y), batches | {"batch_size": 24, "microbatches": 3}),
    }


DIVIDED = ("adam", "vogn", "ivon", "from_batch", "shard samples")
"""The cases whose parameters have axes that divide among 8 devices."""


def numbers(name, kind, mesh):
    """The numbers of a case's last state, and how often its loop was compiled."""
    rule, objective, start, data, options = cases()[name]
    if kind != "one":
        own = blr.rows_of_process(len(jax.tree.leaves(data)[0]), mesh)
        data = blr.shard(jax.tree.map(lambda x: x[own], data), mesh)
    if kind == "divided":
        start = blr.shard_parameters(start, mesh)
    programs.release_programs()
    result = blr.fit(rule, objective, start, data, **options)
    leaves = jax.tree.leaves((result.state.q, result.state.average, result.state.aux, result.state.scale))
    if kind == "divided":
        assert sum(not leaf.sharding.is_fully_replicated for leaf in leaves) >= 6, "the precision is not divided"
    compilations = sum(program._cache_size() for key, program in programs._programs.items() if key[0] is run_chunk)
    assert kind == "one" or compilations == 1, f"{name}: {compilations} programs"
    assert np.all(np.isfinite(result.trace["objective"]))
    return [np.asarray(leaf) if kind == "one" else whole(leaf, mesh) for leaf in leaves]


def whole(leaf, mesh):
    """An array on the host, whatever devices and processes it is divided over."""
    everywhere = jax.sharding.NamedSharding(
        jax.sharding.Mesh(mesh.devices, mesh.axis_names), jax.sharding.PartitionSpec()
    )
    return np.asarray(jax.jit(lambda x: x, out_shardings=everywhere)(leaf))


def main(path, chosen):
    blr.join_processes()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    found = {}
    for kind, name in (choice.split(":") for choice in chosen):
        for place, array in enumerate(numbers(name, kind, mesh)):
            found[f"{kind}:{name}:{place}"] = array
    if jax.process_index() == 0:
        np.savez(path, **found)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(sys.argv[1], sys.argv[2:])
