"""One step of SGD, Adam, Vadam and IVON on 10⁷ (and 10⁵) float32 parameters, against optax and ivon-opt.

The gradient is a fixed array, so that only the step is timed: optax gets it as an argument, ours through a loss with
this derivative; `transformation(adam)` is our Adam in optax's place. Programs are jitted and their buffers donated; all
take turns. "Scanned" is five steps in one call, as in `fit`. ivon-opt runs if it is installed
(`pip install torch==2.13.0 ivon-opt==0.1.3`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from timing import compare, fastest

import bayesrule as blr
from bayesrule.interop import optax as bridge

LEAVES, SIZE, DECAY, SCANNED = 16, 1000, 1e-3, 5
TARGETS = {
    ("sgd", "optax sgd"): 1.05,
    ("adam", "optax adam"): 1.05,
    ("transformation(adam)", "optax adam"): 1.05,
    ("vadam", "optax adamw"): 3.0,
    ("ivon", "adam"): 4.0,
    ("ivon, scanned", "adam, scanned"): 4.0,
}


@jax.custom_vjp
def loss(params: dict, slope: dict) -> jax.Array:
    """A loss of value 0 whose derivative in the parameters is `slope`."""
    return jnp.zeros(())


loss.defvjp(
    lambda params, slope: (jnp.zeros(()), slope),
    lambda slope, cotangent: (jax.tree.map(lambda x: cotangent * x, slope), None),
)


@jax.custom_vjp
def loss_at(params: dict, slope: dict) -> jax.Array:
    """As `loss`, with a derivative that depends on where it is taken: a draw that nothing reads would not be made."""
    return jnp.zeros(())


loss_at.defvjp(
    lambda params, slope: (jnp.zeros(()), (params, slope)),
    lambda kept, cotangent: (jax.tree.map(lambda x, g: cotangent * (g + 1e-9 * x), *kept), None),
)


def arrays(count: int) -> tuple[dict, dict]:
    shape = (count // LEAVES,)
    params = {f"leaf{i:02}": jnp.full(shape, 0.1, jnp.float32) for i in range(LEAVES)}
    slope = {name: jnp.linspace(-1e-3, 1e-3, shape[0], dtype=jnp.float32) for name in params}
    return params, slope


def optax_step(transformation: optax.GradientTransformation, count: int) -> Callable[[], None]:
    params, slope = arrays(count)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: dict, state: optax.OptState, slope: dict) -> tuple:
        updates, state = transformation.update(slope, state, params)
        return optax.apply_updates(params, updates), state

    carry = [params, transformation.init(params)]

    def run() -> None:
        carry[0], carry[1] = step(*carry, slope)
        jax.block_until_ready(carry)

    return run


def ours(
    rule: blr.Rule, count: int, regularizer: float | None = None, steps: int = 1, function: Callable = loss
) -> tuple[Callable[[], None], float]:
    """A call of one or more steps, and the temporary memory of its program as a multiple of the parameters."""
    params, slope = arrays(count)
    objective = blr.Objective(function, size=SIZE, regularizer=regularizer)
    batch = jax.tree.map(lambda x: x[None], slope)

    @partial(jax.jit, donate_argnums=0)
    def step(state: blr.State, batch: dict, key: jax.Array) -> blr.State:
        if steps == 1:
            return rule.step(objective, state, batch, key)[0]
        one = lambda state, k: (rule.step(objective, state, batch, k)[0], None)
        return jax.lax.scan(one, state, jax.random.split(key, steps))[0]

    carry = [jax.tree.map(jnp.array, rule.init(params, objective))]
    keys = itertools.cycle(jax.random.split(jax.random.key(0), 1000))

    def run() -> None:
        carry[0] = step(carry[0], batch, next(keys))
        jax.block_until_ready(carry)

    compiled = step.lower(carry[0], batch, jax.random.key(0)).compile()
    return run, compiled.memory_analysis().temp_size_in_bytes / (4 * count)


def ivon_opt_step(count: int) -> Callable[[], None] | None:
    try:
        import ivon
        import torch
    except ImportError:
        return None
    params = [torch.nn.Parameter(torch.full((count // LEAVES,), 0.1)) for _ in range(LEAVES)]
    slope = torch.linspace(-1e-3, 1e-3, count // LEAVES)
    optimizer = ivon.IVON(params, lr=0.1, ess=SIZE, weight_decay=DECAY)

    def run() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            for p in params:
                p.grad = slope.clone()
        optimizer.step()

    return run


def main(data: Path | None = None) -> None:
    for count, repeats in ((10_000_000, 40), (100_000, 200)):
        own = {
            "sgd": ours(blr.sgd(0.1), count),
            "adam": ours(blr.adam(1e-3), count),
            "vadam": ours(blr.vadam(1e-3, weight_decay=DECAY), count, function=loss_at),
            "ivon": ours(blr.ivon(0.1), count, SIZE * DECAY),
        }
        runs = {name: pair[0] for name, pair in own.items()}
        runs |= {"optax sgd": optax_step(optax.sgd(0.1), count), "optax adam": optax_step(optax.adam(1e-3), count)}
        runs["optax adamw"] = optax_step(optax.adamw(1e-3, weight_decay=DECAY), count)
        as_optax = bridge.transformation(blr.adam(1e-3), size=SIZE)
        runs["transformation(adam)"] = optax_step(as_optax, count)
        for name, rule, prior in (("adam", blr.adam(1e-3), None), ("ivon", blr.ivon(0.1), SIZE * DECAY)):
            own[f"{name}, scanned"] = ours(rule, count, prior, SCANNED)
            runs[f"{name}, scanned"] = own[f"{name}, scanned"][0]
        peer = ivon_opt_step(count)
        targets = dict(TARGETS) if count > 10**6 else {}
        if peer is not None:
            runs["ivon-opt"] = peer
            targets["ivon", "ivon-opt"] = 0.15 if count > 10**6 else 0.5
        times = {name: t / (SCANNED if "scanned" in name else 1) for name, t in fastest(runs, repeats).items()}
        print(f"{count:,} parameters in {LEAVES} leaves")
        for name, seconds in times.items():
            memory = f"   temporaries {own[name][1]:.2f} × the parameters" if name in own else ""
            print(f"  {name:<22}{1e3 * seconds:8.2f} ms{memory}")
        for (name, peer_name), target in targets.items():
            print(compare(name, times[name], peer_name, times[peer_name], target))


if __name__ == "__main__":
    main()
