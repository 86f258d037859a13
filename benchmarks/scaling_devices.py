"""What a step on many devices sends and takes: collectives of the compiled program, strong and weak scaling.

    python benchmarks/scaling_devices.py [--devices 8] [--seconds 1.0]

The devices are virtual ones of one CPU, so that the bytes are those of any machine, and the times are not: all devices
share the machine's cores and its memory. They show what dividing a step costs, and no gain.
"""

import argparse
import os
import re
import time
from itertools import pairwise

DTYPES = {"f64": 8, "f32": 4, "bf16": 2, "s64": 8, "s32": 4, "u32": 4, "u64": 8, "pred": 1, "u8": 1, "s8": 1}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collective_bytes(text):
    """The bytes that each kind of collective of a compiled program returns on one device, and how many there are."""
    found = {}
    pattern = re.compile(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    for line in text.splitlines():
        match = pattern.search(line)
        if match:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            sizes = [DTYPES.get(kind, 4) * _product(shape) for kind, shape in shapes]
            count, total = found.get(match[2], (0, 0))
            found[match[2]] = count + 1, total + sum(sizes)
    return found


def _product(shape):
    product = 1
    for length in filter(None, shape.split(",")):
        product *= int(length)
    return product


def network(widths, seed=0):
    """The parameters of a multilayer perceptron, and its loss of one example."""
    import jax.numpy as jnp
    import numpy as np

    random = np.random.default_rng(seed)
    params = [
        {"w": (random.normal(size=(a, b)) / a**0.5).astype(np.float32), "b": np.zeros(b, np.float32)}
        for a, b in pairwise(widths)
    ]

    def loss(params, example):
        x, y = example
        for layer in params[:-1]:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return 0.5 * jnp.sum((x @ params[-1]["w"] + params[-1]["b"] - y) ** 2)

    return params, loss


def lowered_step(rule, objective, params, batch, key):
    """One step as a compiled program, from a state on the devices of the batch."""
    import jax

    from bayesrule.fitting.sharding import on_devices, sharding_of_rows, state_on_devices

    mesh = sharding_of_rows(batch).mesh
    state = state_on_devices(mesh, rule.init(on_devices(mesh, params), objective))
    places = jax.tree.map(lambda leaf: leaf.sharding, state)
    step = lambda state, batch, key: rule.step(objective, state, batch, key)[0]
    return jax.jit(step, out_shardings=places, donate_argnums=0), state, on_devices(mesh, key)


def rules():
    import bayesrule as blr

    sharded = lambda devices: blr.ivon(0.1).replace(points=blr.ShardSamples(devices))
    return {
        "adam": lambda devices: blr.adam(1e-3),
        "vogn": lambda devices: blr.vogn(1e-3),
        "ivon": lambda devices: blr.ivon(0.1),
        "ivon, ShardSamples(k)": sharded,
    }


def traffic(widths, rows, devices):
    """The table of bytes: for each recipe, with parameters on every device and divided."""
    import jax
    import numpy as np

    import bayesrule as blr

    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    params, loss = network(widths)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    random = np.random.default_rng(1)
    x, y = random.normal(size=(rows, widths[0])), random.normal(size=(rows, widths[-1]))
    batch = blr.shard((x.astype(np.float32), y.astype(np.float32)), mesh)
    objective = blr.Objective(loss, size=10 * rows, regularizer=1.0)
    print(f"\nBytes over 4P that one device gets in a step: P = {size}, {rows} rows, {devices} devices")
    print(f"{'recipe':24}{'parameters':14}{'all-reduce':>12}{'all-gather':>12}{'others':>10}{'operations':>12}")
    for name, make in rules().items():
        for how in ("everywhere", "divided"):
            start = params if how == "everywhere" else blr.shard_parameters(params, mesh)
            step, state, key = lowered_step(make(devices), objective, start, batch, jax.random.key(0))
            found = collective_bytes(step.lower(state, batch, key).compile().as_text())
            share = {kind: found.get(kind, (0, 0))[1] / (4 * size) for kind in COLLECTIVES}
            others, count = sum(share[kind] for kind in COLLECTIVES[2:]), sum(count for count, _ in found.values())
            print(f"{name:24}{how:14}{share['all-reduce']:12.3f}{share['all-gather']:12.3f}{others:10.3f}{count:12d}")


def seconds_of_step(widths, rows, devices, seconds):
    """The median time of a step of ivon on so many devices."""
    import jax
    import numpy as np

    import bayesrule as blr

    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    params, loss = network(widths)
    random = np.random.default_rng(1)
    x, y = random.normal(size=(rows, widths[0])), random.normal(size=(rows, widths[-1]))
    batch = blr.shard((x.astype(np.float32), y.astype(np.float32)), mesh)
    objective = blr.Objective(loss, size=10 * rows, regularizer=1.0)
    step, state, key = lowered_step(blr.ivon(0.1), objective, params, batch, jax.random.key(0))
    times, began = [], time.perf_counter()
    while len(times) < 5 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        state = jax.block_until_ready(step(state, batch, key))
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def scaling(widths, rows, most, seconds):
    """The tables of times: the same batch on more devices, and a batch that grows with them."""
    counts = [count for count in (1, 2, 4, 8, 16) if count <= most]
    print(f"\nA step of ivon, milliseconds (layers {widths}); all devices share {os.cpu_count()} cores")
    print(f"{'devices':>8}{f'{rows} rows in all':>20}{f'{rows} rows a device':>22}{'the same on one':>18}")
    for count in counts:
        strong = seconds_of_step(widths, rows, count, seconds)
        weak = seconds_of_step(widths, rows * count, count, seconds)
        alone = seconds_of_step(widths, rows * count, 1, seconds)
        print(f"{count:8d}{1e3 * strong:20.2f}{1e3 * weak:22.2f}{1e3 * alone:18.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    flag = f"--xla_force_host_platform_device_count={options.devices}"
    os.environ["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), flag)))
    widths = [64, 256, 256, 16]
    traffic(widths, 64 * options.devices, options.devices)
    scaling(widths, 256, options.devices, options.seconds)


if __name__ == "__main__":
    main()
