"""What takes the gradient's place in a step: averages and sums of the gradients so far, and optax's shaping of it."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import AbstractVar
from jaxtyping import Array

from ..numerics.pytree import PyTree
from .schedule import Number, at, format_number, number


class AbstractAverage(eqx.Module):
    """What `Steps(average=…)` takes: an accumulator of gradients, and what it puts in the gradient's place."""

    over: AbstractVar[str]
    """`"total"` for the gradient of the data and the regularizer, `"data"` for that of the data alone."""

    @abstractmethod
    def updated(
        self, average: PyTree, gradient: PyTree, count: Any, gate: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        """The new accumulator, and what replaces the gradient in this step.

        Args:
            average: The accumulator before the step; zeros like the gradient before the first.
            gradient: The gradient of this step.
            count: How many steps were taken before it.
            gate: 0 leaves the accumulator as it was, for a step that is rejected; 1 or None updates it.
        """

    @property
    @abstractmethod
    def symbol(self) -> str:
        """What replaces the gradient, in a printed formula."""

    @abstractmethod
    def formula(self, gradient: str) -> str:
        """The accumulator as a formula, for this gradient."""


class GradientAverage(AbstractAverage):
    r"""An exponential average of the gradient, $u ← βu + (1−β)g$, in place of g (`eq:adam_momentum`).

    Args:
        decay: β, between 0 and 1: a number or a schedule.
        over: `"total"` averages the gradient of the data and the regularizer (Adam); `"data"` leaves the regularizer
            outside of the average (IVON).
        debias: Divide by $1 − β^t$, so that the first averages are not too small.

    >>> import jax.numpy as jnp
    >>> average = jnp.zeros(())
    >>> for step, gradient in enumerate([1.0, 3.0]):
    ...     average, used = GradientAverage(0.9).updated(average, jnp.asarray(gradient), step)
    >>> float(average), float(used)                                                   # 0.39, and divided by 1 − 0.9²
    (0.39, 2.0526)
    """

    decay: Any
    over: str = eqx.field(static=True)
    debias: bool = eqx.field(static=True)

    def __init__(self, decay: Number = 0.9, *, over: str = "total", debias: bool = True):
        if over not in ("data", "total"):
            raise ValueError(f'GradientAverage(over=…) is "data" or "total", got {over!r}.')
        self.decay = number(decay, "The average's decay", high=1.0)
        self.over = over
        self.debias = debias

    def updated(
        self, average: PyTree, gradient: PyTree, count: Any, gate: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        decay = at(self.decay, count)
        share = 1 - decay if gate is None else gate * (1 - decay)
        kept = decay if gate is None else 1 - share
        new = jax.tree.map(
            lambda u, g: jnp.asarray(kept, u.dtype) * u + jnp.asarray(share, u.dtype) * g, average, gradient
        )
        if not self.debias:
            return new, new
        correction = 1 / (1 - decay ** (count + 1.0))
        return new, jax.tree.map(lambda u: jnp.asarray(correction, u.dtype) * u, new)

    @property
    def symbol(self) -> str:
        return "û" if self.debias else "u"

    def formula(self, gradient: str) -> str:
        average = f"u ← βu + (1 − β){gradient}"
        return f"û = u/(1 − βᵗ),  {average}" if self.debias else average

    def __str__(self) -> str:
        return f"gradient averaged over the {self.over}, β = {format_number(self.decay)} (eq:adam_momentum)"


class Trace(AbstractAverage):
    r"""A sum of the gradients that decays, $u ← γu + g$, in place of g: the momentum of optax and PyTorch.

    At a constant rate it is Polyak's heavy ball, which is the rule's own natural momentum (`Steps(momentum=γ)`,
    `eq:sgd_momentum`). Under a schedule the two differ: here the rate multiplies all of u, there only the newest
    gradient.

    Args:
        decay: γ, between 0 and 1: a number or a schedule.
        nesterov: Look one step ahead: $γu + g$ with the new u takes the place of g.
        over: As for `GradientAverage`.

    >>> import jax.numpy as jnp
    >>> trace = jnp.zeros(())
    >>> for step, gradient in enumerate([1.0, 3.0]):
    ...     trace, used = Trace(0.9).updated(trace, jnp.asarray(gradient), step)
    >>> float(trace), float(used)                                                     # 0.9 · 1 + 3
    (3.9, 3.9)
    """

    decay: Any
    nesterov: bool = eqx.field(static=True)
    over: str = eqx.field(static=True)

    def __init__(self, decay: Number = 0.9, *, nesterov: bool = False, over: str = "total"):
        if over not in ("data", "total"):
            raise ValueError(f'Trace(over=…) is "data" or "total", got {over!r}.')
        self.decay = number(decay, "The momentum", high=1.0)
        self.nesterov, self.over = nesterov, over

    def updated(
        self, average: PyTree, gradient: PyTree, count: Any, gate: Array | None = None
    ) -> tuple[PyTree, PyTree]:
        decay = at(self.decay, count)
        added = 1.0 if gate is None else gate
        kept = decay if gate is None else 1 - gate * (1 - decay)
        plus = lambda u, g, kept, added: jnp.asarray(kept, u.dtype) * u + jnp.asarray(added, u.dtype) * g
        new = jax.tree.map(lambda u, g: plus(u, g, kept, added), average, gradient)
        return new, jax.tree.map(lambda u, g: plus(u, g, decay, 1.0), new, gradient) if self.nesterov else new

    @property
    def symbol(self) -> str:
        return "û" if self.nesterov else "u"

    def formula(self, gradient: str) -> str:
        trace = f"u ← γu + {gradient.strip()}"
        return f"û = γu + {gradient.strip()},  {trace}" if self.nesterov else trace

    def __str__(self) -> str:
        kind = "Nesterov's momentum" if self.nesterov else "momentum"
        return f"{kind} as a trace of the gradient of the {self.over}, γ = {format_number(self.decay)}"


class Shaping(eqx.Module):
    """An optax transformation of the gradient before anything else is done with it: clipping, masking, centring.

    It sees the gradient of the mean loss over the batch, without the regularizer, as it would in an `optax.chain`
    before the optimizer. A curvature that is the square of the gradient (Adam's) is that of the shaped one; every other
    is measured before.

    Args:
        transformation: An `optax.GradientTransformation`, such as `optax.clip_by_global_norm(1.0)`.

    >>> import jax.numpy as jnp, optax
    >>> shaping, params = Shaping(optax.clip_by_global_norm(1.0)), jnp.zeros(2)
    >>> gradient = jnp.array([30.0, 40.0])                            # of a sum over 10 examples; the mean's is (3, 4)
    >>> shaping.updated(shaping.first(params), gradient, params, 10, None)[1].tolist()
    [6.0, 8.0]
    """

    transformation: Any = eqx.field(static=True)

    def __init__(self, transformation: Any):
        if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
            raise ValueError(
                "shaping= takes an optax.GradientTransformation, such as optax.clip_by_global_norm(1.0), got "
                f"{type(transformation).__name__}."
            )
        self.transformation = transformation

    def first(self, params: PyTree) -> PyTree:
        """The transformation's state before the first step."""
        return self.transformation.init(params)

    def updated(
        self, state: PyTree, gradient: PyTree, params: PyTree, size: Any, gate: Array | None
    ) -> tuple[PyTree, PyTree]:
        """The transformation's new state, and the shaped gradient.

        Args:
            state: The transformation's state.
            gradient: The gradient of the sum over N examples.
            params: q's parameters.
            size: N.
            gate: 0 leaves the state as it was, for a step that is rejected.
        """
        times = lambda tree, factor: jax.tree.map(lambda g: jnp.asarray(factor, g.dtype) * g, tree)
        shaped, new = self.transformation.update(times(gradient, 1 / size), state, params)
        if gate is not None:
            new = jax.tree.map(lambda a, b: jnp.where(gate > 0, a, b), new, state)
        return new, times(shaped, size)

    def __str__(self) -> str:
        name = getattr(self.transformation.update, "__qualname__", "optax").split(".")[0]
        return f"gradient shaped by optax's {name}"


class WeightDecay(eqx.Module):
    r"""Decoupled weight decay, $m ← m − ρ(\ldots) − ρwm$: AdamW's.

    It shrinks the mean beside the step. It is no prior: the objective stays the data's loss alone, and the decay is no
    part of q's precision.

    Args:
        decay: w, a number or a schedule, multiplied by the rate as in optax.
        mask: A pytree of booleans whose structure is a prefix of the parameters', or a function that makes one of them;
            False for parameters that do not decay.

    >>> import jax.numpy as jnp
    >>> decay = WeightDecay(0.1, mask={"w": True, "b": False})
    >>> {name: pull.tolist() for name, pull in decay.pull({"w": jnp.array([2.0]), "b": jnp.array([2.0])}, 0).items()}
    {'b': [0.0], 'w': [0.2]}
    """

    decay: Any
    mask: Any
    make_mask: Callable[[PyTree], PyTree] | None = eqx.field(static=True)

    def __init__(self, decay: Number, mask: Any = None):
        self.decay = number(decay, "The weight decay")
        self.mask, self.make_mask = (None, mask) if callable(mask) else (mask, None)

    def pull(self, params: PyTree, count: Any) -> PyTree:
        """w·m, entry by entry, and 0 where the mask says so."""
        decay = at(self.decay, count)
        pull = jax.tree.map(lambda m: jnp.asarray(decay, m.dtype) * m, params)
        mask = self.mask if self.make_mask is None else self.make_mask(params)
        if mask is None:
            return pull
        masked = lambda keep, part: jax.tree.map(lambda x: jnp.where(keep, x, 0), part)
        return jax.tree.map(masked, mask, pull)

    def __str__(self) -> str:
        part = "" if self.mask is None and self.make_mask is None else " where the mask says so"
        return f"decoupled weight decay w = {format_number(self.decay)}{part}: no prior"
