"""How far: rates, temperature, momentum and averaging, and the step they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
    divisor: Divisor | None = None

    def shortened(self, factor: Any) -> Step:
        """The same step, `factor` as long: the whole displacement of λ shrinks, momentum included."""
        momentum = None if self.momentum is None else self.momentum * factor
        rate, precision_rate = self.rate * factor, self.precision_rate * factor
        return dataclasses.replace(self, rate=rate, precision_rate=precision_rate, momentum=momentum)


class Scheduled(eqx.Module):
    """A number that changes with the step count: any optax schedule."""

    schedule: Callable[[Any], Any] = eqx.field(static=True)

    def __repr__(self) -> str:
        return f"schedule {getattr(self.schedule, '__qualname__', str(self.schedule)).split('.')[0]}"


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

    def updated(self, average: PyTree, gradient: PyTree, count: Any, go: Any = None) -> tuple[PyTree, PyTree]:
        """The new average, and what stands for the gradient in this step; the old average where `go` is 0."""
        decay = at(self.decay, count)
        share = 1 - decay if go is None else go * (1 - decay)
        kept = decay if go is None else 1 - share
        new = jax.tree.map(
            lambda u, g: jnp.asarray(kept, u.dtype) * u + jnp.asarray(share, u.dtype) * g, average, gradient
        )
        if not self.debias:
            return new, new
        correction = 1 / (1 - decay ** (count + 1.0))
        return new, jax.tree.map(lambda u: jnp.asarray(correction, u.dtype) * u, new)


class Scaling(eqx.Module):
    r"""What divides the gradient of the mean loss in the mean's step, where that is not q's precision.

    With $v = (τS − δ)/N$, the curvature of the mean loss that q's precision S stands for (δ is the prior's):
    $m ← m − ρ\hat g / (\sqrt{\hat v} + δ/N + c)$ with `root` (`eq:rmsprop_update`), else
    $m ← m − ρ\hat g / (\hat v + δ/N + c)$. q stays as it is: posterior and preconditioner are two things. Without
    δ/N a prior would throw a parameter that the data never see, and v never scales, back and forth past its mean.

    `damping` is c; `"prior"` leaves it to δ/N (Vadam). `debias` divides v by $1 − (1−ρ)^t$, as Adam does.
    `start` is a curvature h₀: the rate is then in units of the divisor at $v = h_0$, so that the first step
    from there is $−ρ\hat g$, as gradient descent's (IVON).
    """

    damping: Any
    start: Any
    root: bool = eqx.field(static=True)
    debias: bool = eqx.field(static=True)
    by_prior: bool = eqx.field(static=True)

    def __init__(
        self, damping: Number | str = 0.0, *, root: bool = False, debias: bool = False, start: Number | None = None
    ):
        if isinstance(damping, str) and damping != "prior":
            raise ValueError(f'damping= is a number or "prior", got {damping!r}.')
        self.by_prior = isinstance(damping, str)
        self.damping = 0.0 if isinstance(damping, str) else number(damping, "The damping")
        self.start = None if start is None else number(start, "The curvature to start from")
        self.root, self.debias = root, debias

    def first(self, precision: PyTree, size: Any, temperature: Any, prior: PyTree) -> PyTree:
        """v at the start, where it has to be kept beside q: in float32 a prior would hide a small Nv in S."""
        if not self.root or prior is None:
            return None
        return jax.tree.map(lambda s, p: jnp.maximum((temperature * s - p) / size, 0).astype(s.dtype), precision, prior)

    def updated(self, v: PyTree, curvature: PyTree, size: Any, fraction: Any) -> PyTree:
        """v ← (1 − ρτ)v + ρτ h/N with the data's curvature h: as q's precision moves, but for the prior."""
        if v is None:
            return None
        mixed = lambda v, h: v + jnp.asarray(fraction, v.dtype) * (h / jnp.asarray(size, v.dtype) - v)
        return jax.tree.map(mixed, v, curvature)

    def divisor(self, size: Any, temperature: Any, prior: PyTree, v: PyTree, fraction: Any, count: Any) -> Divisor:
        """What the mean's step divides by at this step count, where `fraction` of the precision is replaced."""
        correction = 1 - (1 - fraction) ** (count + 1.0) if self.debias else None
        damping, start = at(self.damping, count), None if self.start is None else at(self.start, count)
        return Divisor(size, temperature, prior, v, damping, correction, start, self.root)

    def __str__(self) -> str:
        v = "v̂" if self.debias else "v"
        said = [f"√{v}" if self.root else v, "δ/N"]
        if not (isinstance(self.damping, float | int) and self.damping == 0):
            said.append(_said(self.damping))
        relative = "" if self.start is None else f", relative to v = {_said(self.start)}"
        return f"ĝ over ({' + '.join(said)}){relative}"


class Divisor(eqx.Module):
    """A `Scaling` in one step, where N, τ and the prior are known."""

    size: Any
    temperature: Any
    prior: PyTree
    v: PyTree
    damping: Any
    correction: Any
    start: Any
    root: bool = eqx.field(static=True)

    def __call__(self, precision: PyTree) -> PyTree:
        """What divides the gradient of the sum over N examples, for every entry of the precision."""
        rest = [tree for tree in (self.prior, self.v) if tree is not None]
        return jax.tree.map(self._of, precision, *rest)

    def _of(self, s: Array, prior: Array | None = None, v: Array | None = None) -> Array:
        # Numbers are multiplied and divided among themselves first: a division for every entry costs as much as all
        # the rest of Adam's arithmetic.
        cast = lambda x: jnp.asarray(x, s.dtype)
        spare = None if prior is None else prior * cast(1 / self.size)
        share = self.temperature / self.size
        if self.root or self.correction is not None:
            unbias = 1.0 if self.correction is None else 1 / self.correction
            if v is not None:
                v = v * cast(unbias)
            elif spare is None:
                v = s * cast(share * unbias)
            else:
                v = jnp.maximum(s * cast(share) - spare, 0) * cast(unbias)
            whole = self._scaled(v, spare)
        else:
            whole = s * cast(share)
        whole = whole + cast(self.damping)
        if self.start is None:
            return whole * cast(self.size)
        return whole * (cast(self.size) / (self._scaled(cast(self.start), spare) + cast(self.damping)))

    def _scaled(self, v: Array, spare: Array | None) -> Array:
        scaled = jnp.sqrt(v) if self.root else v
        return scaled if spare is None else scaled + spare


class Sweep(eqx.Module):
    """Blocks in turn instead of all at once: each sees where those before it have gone.

    `order` lists the blocks, or groups of them that move together; by default every block by itself, local ones first;
    "parallel" is one group. With `local` the local blocks take whole steps, ρ = 1, whatever the rate (SVI): so many of
    them, or fewer if the mean change of λ in every row falls below `tolerance`; with `together` that many rows at a
    time, each group until its own rows have settled. `peaks` is the same for blocks that are read at their peak, whose
    M-step may take several of Newton's.
    """

    tolerance: Any
    order: tuple[tuple[str, ...], ...] | str | None = eqx.field(static=True)
    local: int | None = eqx.field(static=True)
    together: int | None = eqx.field(static=True)
    peaks: int = eqx.field(static=True)

    def __init__(
        self,
        order: Sequence[str | Sequence[str]] | str | None = None,
        *,
        local: int | None = None,
        together: int | None = None,
        peaks: int = 1,
        tolerance: Number = 0.0,
    ):
        if isinstance(order, str) and order != "parallel":
            raise ValueError(f'order= lists blocks, or is "parallel", got {order!r}.')
        if peaks < 1 or (local is not None and local < 1) or (together is not None and together < 1):
            raise ValueError(
                f"A sweep takes at least one step in every block, of one row or more together, got local={local}, "
                f"peaks={peaks}, together={together}."
            )
        self.order = None if order is None else "parallel"
        if order is not None and not isinstance(order, str):
            self.order = tuple((group,) if isinstance(group, str) else tuple(group) for group in order)
        self.local, self.together, self.peaks = local, together, peaks
        self.tolerance = number(tolerance, "The tolerance")

    def groups(self, blocks: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The groups of blocks in turn."""
        if self.order is None:
            return tuple((name,) for name in blocks)
        if isinstance(self.order, str):
            return (tuple(blocks),)
        named = [name for group in self.order for name in group]
        if set(named) != set(blocks):
            raise ValueError(f"The sweep goes over {named}, and the model's blocks are {list(blocks)}.")
        return self.order

    def __str__(self) -> str:
        turn = lambda group: "+".join(group)
        said = "block by block" if self.order is None else "all blocks at once"
        if isinstance(self.order, tuple):
            said = f"in turn {', '.join(map(turn, self.order))}"
        if self.local is not None:
            said += ", ρ = 1 in local blocks" + (f" (up to {self.local} steps)" if self.local > 1 else "")
        return said + (f", up to {self.peaks} steps at a peak" if self.peaks > 1 else "")


_UNITS = {
    "natural": "the rule's own ρ",
    "fraction": "ρτ, the fraction of λ that a step replaces: a cold posterior remembers as long as a warm one",
    "mean": "ρN, the rate of a step on the mean loss",
}


class Steps(eqx.Module):
    """How far the rule goes: rate(s), temperature, momentum or averaging, and in which coordinates.

    `rate` is ρ, one number or schedule, or `Rates(mean, precision)`. `temperature` is τ, the weight
    of the entropy: 1 in the paper, 0 for no decay. `momentum` is the natural momentum γ of
    `eq:bayes_learn_rule_momentum`. `reverse=True` steps in μ instead of λ (mirror descent in λ, the
    end of section 2.2). `lazy=True` is online learning's lazy form: the gradients so far are summed and
    the whole sum is taken from the start, $λ_{t+1} = λ_1 − ρ_t\\sum_{s≤t}∇_μ E_{q_s}ℓ_s$ (section 5.4).
    `scaling` is a preconditioner for the mean other than q's precision. `sweep` takes a model's blocks in
    turn. `units` says what the rates are: "natural" ρ itself, "fraction" ρτ, "mean" ρN.
    """

    rates: Rates
    temperature: Any
    momentum: Any
    average: GradientAverage | None
    scaling: Scaling | None
    sweep: Sweep | None
    reverse: bool = eqx.field(static=True)
    lazy: bool = eqx.field(static=True)
    units: str = eqx.field(static=True)

    def __init__(
        self,
        rate: Number | Rates = 1.0,
        *,
        temperature: Number = 1.0,
        momentum: Number | None = None,
        average: GradientAverage | None = None,
        scaling: Scaling | None = None,
        sweep: Sweep | None = None,
        reverse: bool = False,
        lazy: bool = False,
        units: str = "natural",
    ):
        if units not in _UNITS:
            raise ValueError(f"units= is one of {list(_UNITS)}, got {units!r}.")
        if units == "fraction" and isinstance(temperature, float | int) and temperature == 0:
            raise ValueError(
                'A rate in units="fraction" is ρτ, and with temperature=0 nothing of λ is ever replaced: give a '
                'positive temperature, or units="natural".'
            )
        if scaling is not None and (momentum is not None or reverse or lazy):
            raise ValueError(
                "A scaling replaces the precision in the mean's step, so it goes with GradientAverage, not with "
                "natural momentum, the reverse or the lazy form, which are moves of λ."
            )
        if sweep is not None and (momentum is not None or average is not None or scaling is not None or lazy):
            raise ValueError("A sweep takes plain steps block by block: without momentum, averaging, scaling or lazy.")
        if lazy and (momentum is not None or average is not None or reverse or temperature != 0):
            raise ValueError(
                "The lazy form sums the gradients of losses seen one after another: it goes with temperature=0, and "
                "without momentum, averaging or reverse."
            )
        self.rates = rate if isinstance(rate, Rates) else Rates(rate, rate)
        self.temperature = number(temperature, "The temperature")
        self.momentum = None if momentum is None else number(momentum, "The momentum", high=1.0)
        self.average = average
        self.scaling = scaling
        self.sweep = sweep
        self.reverse = reverse
        self.lazy = lazy
        self.units = units

    def rates_at(self, count: Any, size: Any, temperature: Any) -> tuple[Any, Any]:
        """ρ for the mean and for the precision, in the rule's own units, at this step count."""
        unit = {"natural": 1.0, "fraction": temperature, "mean": size}[self.units]
        mean, precision = (jnp.asarray(at(rate, count), float) for rate in (self.rates.mean, self.rates.precision))
        if self.units == "natural":
            return mean, precision
        # A scaling divides by the curvature of the mean loss, in which τ is already.
        scaled = self.units == "fraction" and self.scaling is not None
        return mean if scaled else mean / unit, precision / unit

    def __str__(self) -> str:
        mean, precision = _said(self.rates.mean), _said(self.rates.precision)
        same = mean == precision
        rate = {"natural": "ρ", "fraction": "ρτ", "mean": "ρN"}[self.units]
        rate = "ρ" if self.units == "fraction" and _is_one(self.temperature) else rate
        said = [f"{rate} = {mean}" if same else f"{rate} = {mean} (mean), {precision} (precision)"]
        if not _is_one(self.temperature):
            said.append(f"τ = {_said(self.temperature)}")
        if self.momentum is not None:
            said.append(f"natural momentum γ = {_said(self.momentum)} (eq:bayes_learn_rule_momentum)")
        if self.average is not None:
            said.append(
                f"gradient averaged over the {self.average.over}, β = {_said(self.average.decay)} (eq:adam_momentum)"
            )
        if self.scaling is not None:
            said.append(str(self.scaling))
        if self.sweep is not None:
            said.append(str(self.sweep))
        if self.reverse:
            said.append("in μ (mirror descent in λ, section 2.2)")
        if self.lazy:
            said.append("lazily: the whole sum from the start (section 5.4)")
        return ", ".join(said)


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float | int) else str(value)


def _is_one(value: Any) -> bool:
    return isinstance(value, float | int) and value == 1
