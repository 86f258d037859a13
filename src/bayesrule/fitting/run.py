"""run(): a number of steps as a pure function, for use inside `jax.jit`, `vmap`, `scan` and `grad`.

`fit` looks at its loop between chunks of steps (progress, checkpoints, Ctrl-C), so it is a Python function and cannot
be traced. `run` is the same loop and takes the same steps, as one program that can: many fits side by side, a fit
inside of another program, or the derivative of anything after the last step in anything that came before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array

from ..numerics.checks import nonnegative_int
from ..numerics.programs import compiled
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..objectives.objective import as_objective
from ..rule.rule import Rule
from ..rule.state import State
from ..rule.update import planned
from .convergence import first_watch
from .loader import Loader
from .loop import Carry, copy_for_donation, empty_trace, take_steps
from .reason import Reason
from .sharding import Placement, on_devices, state_on_devices


class Fitted(NamedTuple):
    """What `run` returns: a pytree of arrays, so that it passes through JAX's transformations.

    Attributes:
        state: the rule's state after the last step.
        trace: arrays of a value for each step as in `Result.trace`, NaN for steps that were not taken.
        code: why the steps ended, as the integer `Reason.code`.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> loss = lambda x, y: jnp.sum(jnp.cosh(x - y))
    >>> fit_to = lambda y: blr.run(blr.newton(), lambda x: loss(x, y), jnp.zeros(1), steps=9, tolerance=1e-6)
    >>> fitted = jax.vmap(fit_to)(jnp.array([1.0, 2.0]))                              # two fits side by side
    >>> fitted.q.mean[:, 0].tolist(), [str(reason) for reason in fitted.reason]
    ([1.0, 2.0], ['converged', 'converged'])
    """

    state: State
    trace: dict[str, Array]
    code: Array

    @property
    def q(self) -> Any:
        """The posterior, a member of the rule's family."""
        return self.state.q

    @property
    def reason(self) -> Any:
        """Why the steps ended, a `Reason`; an array of them after `vmap`. Not inside of a trace: read `code` there."""
        if isinstance(self.code, Tracer):
            raise ValueError("A reason is a string, which a traced function cannot hold: compare `code` there.")
        codes = jax.device_get(self.code)
        return Reason.of(int(codes)) if codes.ndim == 0 else [Reason.of(int(code)) for code in codes.reshape(-1)]


def run(
    rule: Rule,
    objective: Any,
    start: Any,
    data: PyTree = None,
    *,
    steps: int,
    batch_size: int | None = None,
    key: Key | None = None,
    tolerance: ArrayLike | None = None,
) -> Fitted:
    r"""Take steps of a rule: `fit` as a pure function of arrays, for `jit`, `vmap`, `scan`, and `grad` in both modes.

    The steps are the plain ones of `fit` with the same key. What `fit` decides between its chunks of steps is not
    there: no acceleration after 50 of them, no other start where the first one is impossible; and "converged" is the
    estimate of `tolerance` alone, which no finer points or condition numbers have confirmed. Reverse mode
    differentiates through all steps and keeps what it needs of each in memory. Where only the fixed point matters,
    `empirical_bayes` differentiates that instead.

    Args:
        rule: The algorithm.
        objective: An `Objective`, a `Model`, or a plain function of θ. It may be built inside the traced function, from
            the numbers to differentiate in.
        start: A member of the rule's family, bare parameters, or a `State` to go on from.
        data: A pytree of arrays with one row per example (or `Weighted`). Traced rows of which only some entries were
            observed need `model.for_data` beforehand, outside of the trace.
        steps: The number of steps, which is compiled in.
        batch_size: The number of rows in a mini-batch, as in `fit`.
        key: A JAX key, for mini-batches and random points.
        tolerance: As in `fit`: steps after convergence are not taken. Under `vmap` they are computed and dropped.

    Returns:
        The last state, the trace and why the steps ended, all as arrays.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> x, y = jnp.array([[1.0], [2.0], [3.0], [4.0]]), jnp.array([1.1, 1.9, 3.2, 3.9])
    >>> def error_of_last_row(log_prior):                             # after training on the other rows
    ...     loss = lambda w, e: 0.5 * (e[0] @ w - e[1]) ** 2
    ...     objective = blr.Objective(loss, size=3, regularizer=jnp.exp(log_prior))
    ...     w = blr.run(blr.newton(), objective, jnp.zeros(1), (x[:3], y[:3]), steps=5).q.mean
    ...     return (x[3] @ w - y[3]) ** 2
    >>> [round(float(slope), 3) for slope in jax.vmap(jax.grad(error_of_last_row))(jnp.array([-1.0, 0.0, 1.0]))]
    [-0.028, 0.017, 0.486]
    """
    objective = as_objective(objective)
    steps = nonnegative_int("steps", steps, meaning="how many steps to take")
    loader = Loader.of(objective, data, batch_size)
    objective = objective.with_size(loader.rows)
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(loader.data)):  # else rows cannot be inspected
        adapted, data = objective.for_data(loader.data)
        objective, loader = adapted, loader._replace(data=data)
    if key is None:
        if rule.points.random or loader.batch_size is not None or objective.random:
            raise ValueError("This run is random (sampled points or mini-batches): pass key=jax.random.key(…).")
        key = jax.random.key(0)
    horizon = steps if loader.batch_size is not None and tolerance is None else None
    if not isinstance(start, State):
        state = rule.init(start, objective, key, horizon=horizon)
    elif horizon is None or start.horizon is None:
        state = start
    else:
        state = planned(rule, start, start.count + horizon)
    diagnose = tolerance is not None or loader.batch_size is None
    carry = Carry(
        copy_for_donation(state),
        loader.initial_order(),
        empty_trace(steps, diagnose),
        watch=None if tolerance is None else first_watch(),
    )
    placement = None
    if loader.sharding is not None:
        rule, objective, key = on_devices(loader.sharding.mesh, (rule, objective, key))
        carry = carry._replace(state=state_on_devices(loader.sharding.mesh, carry.state))
        carry = on_devices(loader.sharding.mesh, carry, numbers=True)
        placement = Placement.of(loader.sharding, carry)
    first = carry.state.count
    carry = _take_steps(
        rule,
        objective,
        loader.data,
        key,
        tolerance,
        first,
        first + steps,
        carry,
        batch_size=loader.batch_size,
        diagnose=diagnose,
        fixed_steps=steps,
        placement=placement,
    )
    return Fitted(carry.state, carry.trace, jnp.asarray(carry.code))


_take_steps = compiled(static=("batch_size", "diagnose", "microbatches", "fixed_steps", "placement"))(take_steps)
