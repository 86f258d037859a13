"""How far the rule goes: rates, temperature, momentum and averaging, and the units of the rates."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .scaling import GradientAverage, Scaling
from .schedule import Number, Rates, _is_one, _said, at, number
from .sweep import Sweep

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
