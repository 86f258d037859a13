"""How far: rates, temperature, momentum and averaging, and the step they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, PyTree

Number = float | int | Array | Callable[[Any], Any]


class Step(eqx.Module):
    r"""One step of the rule, ready for a family to take.

    $$λ ← λ − ρ ∇_μ[E_q \barℓ − τ H(q)] + γ (λ − λ_{t−1})$$

    `gradient` and `curvature` are $E_q∇\barℓ$ and $E_q∇^2\barℓ$ for a Gaussian; every other family
    takes $∇_μ E_q\barℓ$ as `gradient` and no curvature.
    """

    gradient: PyTree
    curvature: Any
    rate: Any
    precision_rate: Any
    temperature: Any
    momentum: Any = None
    previous: Any = None
    reverse: bool = eqx.field(static=True, default=False)
    retraction: bool = eqx.field(static=True, default=False)

    def shortened(self, factor: Any) -> Step:
        """The same step, `factor` as long: the whole displacement of λ shrinks, momentum included."""
        momentum = None if self.momentum is None else self.momentum * factor
        rate, precision_rate = self.rate * factor, self.precision_rate * factor
        return dataclasses.replace(self, rate=rate, precision_rate=precision_rate, momentum=momentum)


class Scheduled(eqx.Module):
    """A number that changes with the step count: any optax schedule."""

    schedule: Callable[[Any], Any] = eqx.field(static=True)

    def __repr__(self) -> str:
        return f"schedule {getattr(self.schedule, '__qualname__', self.schedule)}"


def number(value: Number, name: str, *, low: float = 0.0, high: float = float("inf")) -> Any:
    """A traced leaf for a constant (checked against its range), a `Scheduled` for a callable."""
    if isinstance(value, Scheduled):
        return value
    if callable(value):
        return Scheduled(value)
    if isinstance(value, Tracer):
        return value
    if jnp.ndim(value) == 0 and not low <= float(value) <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} must be {bounds}, got {float(value):g}.")
    return value


def at(value: Any, count: Any) -> Any:
    """The number at this step count."""
    return value.schedule(count) if isinstance(value, Scheduled) else value


class Rates(eqx.Module):
    """Separate rates ρ for the mean and for the precision (section 4.2 of the paper)."""

    mean: Any
    precision: Any

    def __init__(self, mean: Number, precision: Number):
        self.mean = number(mean, "The mean's rate")
        self.precision = number(precision, "The precision's rate")


class GradientAverage(eqx.Module):
    r"""An exponential average of the gradient, $u ← βu + (1−β)g$, in place of g (`eq:adam_momentum`).

    `over="data"` leaves the regularizer outside the average (IVON), `"total"` takes it in (Adam).
    `debias` divides by $1 − β^t$.
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

    def updated(self, average: PyTree, gradient: PyTree, count: Any) -> tuple[PyTree, PyTree]:
        """The new average, and what stands for the gradient in this step."""
        decay = at(self.decay, count)
        new = jax.tree.map(
            lambda u, g: jnp.asarray(decay, u.dtype) * u + jnp.asarray(1 - decay, u.dtype) * g,
            average,
            gradient,
        )
        if not self.debias:
            return new, new
        correction = 1 - decay ** (count + 1.0)
        return new, jax.tree.map(lambda u: u / jnp.asarray(correction, u.dtype), new)


class Steps(eqx.Module):
    """How far the rule goes: rate(s), temperature, momentum or averaging, and in which coordinates.

    `rate` is ρ, one number or schedule, or `Rates(mean, precision)`. `temperature` is τ, the weight
    of the entropy: 1 in the paper, 0 for no decay. `momentum` is the natural momentum γ of
    `eq:bayes_learn_rule_momentum`. `reverse=True` steps in μ instead of λ (mirror descent in λ, the
    end of section 2.2). `lazy=True` is online learning's lazy form: the gradients so far are summed and
    the whole sum is taken from the start, $λ_{t+1} = λ_1 − ρ_t\\sum_{s≤t}∇_μ E_{q_s}ℓ_s$ (section 5.4).
    """

    rates: Rates
    temperature: Any
    momentum: Any
    average: GradientAverage | None
    reverse: bool = eqx.field(static=True)
    lazy: bool = eqx.field(static=True)

    def __init__(
        self,
        rate: Number | Rates = 1.0,
        *,
        temperature: Number = 1.0,
        momentum: Number | None = None,
        average: GradientAverage | None = None,
        reverse: bool = False,
        lazy: bool = False,
    ):
        if lazy and (momentum is not None or average is not None or reverse or temperature != 0):
            raise ValueError(
                "The lazy form sums the gradients of losses seen one after another: it goes with temperature=0, and "
                "without momentum, averaging or reverse."
            )
        self.rates = rate if isinstance(rate, Rates) else Rates(rate, rate)
        self.temperature = number(temperature, "The temperature")
        self.momentum = None if momentum is None else number(momentum, "The momentum", high=1.0)
        self.average = average
        self.reverse = reverse
        self.lazy = lazy

    def __str__(self) -> str:
        mean, precision = self.rates.mean, self.rates.precision
        same = mean is precision or (isinstance(mean, float | int) and mean == precision)
        said = [f"ρ = {mean}" if same else f"ρ = {mean} (mean), {precision} (precision)"]
        if not isinstance(self.temperature, float | int) or self.temperature != 1.0:
            said.append(f"τ = {self.temperature}")
        if self.momentum is not None:
            said.append(f"natural momentum γ = {self.momentum} (eq:bayes_learn_rule_momentum)")
        if self.average is not None:
            said.append(f"gradient averaged over the {self.average.over}, β = {self.average.decay} (eq:adam_momentum)")
        if self.reverse:
            said.append("in μ (mirror descent in λ, section 2.2)")
        if self.lazy:
            said.append("lazily: the whole sum from the start (section 5.4)")
        return ", ".join(said)
