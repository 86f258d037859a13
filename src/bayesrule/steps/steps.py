"""How far the rule goes: rates, temperature, momentum and averaging, and the units of the rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from .acceleration import Anderson
from .averages import AbstractAverage, Shaping, WeightDecay
from .scaling import Scaling, cosine
from .schedule import Number, Planned, Rates, Scheduled, at, equals, format_number, number
from .sweep import Sweep
from .window import Window

_UNITS = {
    "natural": "the rule's own ρ",
    "fraction": "ρτ, the fraction of λ that a step replaces: a cold posterior remembers as long as a warm one",
    "mean": "ρN, the rate of a step on the mean loss",
}


class Steps(eqx.Module):
    r"""How far the rule goes: rate(s), temperature, momentum or averaging, and in which coordinates.

    Args:
        rate: ρ: one number or schedule, a dict of them for parts of the parameters, or `Rates(mean, precision)`.
        temperature: τ, the weight of the entropy: 1 in the paper, 0 for no decay. A number, a schedule, or a `WarmUp`.
        momentum: The natural momentum γ of `eq:bayes_learn_rule_momentum`.
        average: Replaces the gradient by its exponential average (`GradientAverage`, `eq:adam_momentum`) or by a
            decaying sum of the gradients (`Trace`).
        shaping: An optax transformation of the gradient of the mean loss, before it is averaged:
            `optax.clip_by_global_norm(1.0)`.
        weight_decay: w of a decoupled weight decay, which shrinks the mean beside the step (AdamW), or a `WeightDecay`
            with a mask. For a prior give the objective `regularizer=` instead.
        scaling: A preconditioner for the mean other than q's precision (`eq:rmsprop_update`).
        sweep: Takes a model's blocks in turn (section 5.2).
        reverse: Step in μ instead of λ: mirror descent in λ (the end of section 2.2).
        lazy: Online learning's lazy form: the gradients so far are summed and the sum is taken from the start,
            $λ_{t+1} = λ_1 − ρ_t\sum_{s≤t}∇_μ E_{q_s}ℓ_s$ (section 5.4).
        acceleration: Tries a step that is extrapolated from the last ones before the plain one, where fits on all data
            converge slowly: `Anderson()`.
        units: What the rates are: `"natural"` ρ itself, `"fraction"` ρτ, `"mean"` ρN.
        measured: Start the precision from the curvature that the first batches have, in place of a number: the first
            step only measures, at the mean, and from there on S is the average of what was measured until the window of
            its rate is full. It takes a prior, without which a weight that no example depends on would have S = 0, and
            a start from bare parameters; otherwise the precision starts as the family says.

    >>> import bayesrule as blr
    >>> print(blr.Steps(0.5, temperature=0.1))
    ρ = 0.5, τ = 0.1
    >>> print(blr.von(0.1).replace(steps=blr.Steps(0.5, momentum=0.9)).steps)
    ρ = 0.5, natural momentum γ = 0.9 (eq:bayes_learn_rule_momentum)
    """

    rates: Rates
    temperature: Any
    momentum: Any
    average: AbstractAverage | None
    shaping: Shaping | None
    weight_decay: WeightDecay | None
    scaling: Scaling | None
    sweep: Sweep | None
    acceleration: Anderson | None
    reverse: bool = eqx.field(static=True)
    lazy: bool = eqx.field(static=True)
    units: str = eqx.field(static=True)
    measured: bool = eqx.field(static=True)

    def __init__(
        self,
        rate: Number | Mapping[str, Number] | Rates = 1.0,
        *,
        temperature: Number | Planned = 1.0,
        momentum: Number | None = None,
        average: AbstractAverage | None = None,
        shaping: Any = None,
        weight_decay: Number | WeightDecay | None = None,
        scaling: Scaling | None = None,
        sweep: Sweep | None = None,
        acceleration: Anderson | None = None,
        reverse: bool = False,
        lazy: bool = False,
        units: str = "natural",
        measured: bool = False,
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
        if average is not None and not isinstance(average, AbstractAverage):
            raise ValueError(
                f"average= takes GradientAverage(β) or Trace(γ), got {type(average).__name__}. An optax transformation "
                "goes to shaping=."
            )
        beside = shaping is not None or weight_decay is not None
        if beside and (momentum is not None or reverse or lazy or sweep is not None or acceleration is not None):
            raise ValueError(
                "A shaped gradient and a decoupled weight decay go with plain steps, averages and scaling: without "
                "natural momentum, the reverse and the lazy form, a sweep and acceleration."
            )
        if sweep is not None and (momentum is not None or average is not None or scaling is not None or lazy):
            raise ValueError("A sweep takes plain steps block by block: without momentum, averaging, scaling or lazy.")
        if lazy and (momentum is not None or average is not None or reverse or temperature != 0):
            raise ValueError(
                "The lazy form sums the gradients of losses seen one after another: it goes with temperature=0, and "
                "without momentum, averaging or reverse."
            )
        if acceleration is not None and (momentum, average, scaling, sweep, reverse, lazy) != (
            *[None] * 4,
            False,
            False,
        ):
            raise ValueError(
                "Anderson acceleration extrapolates plain steps of all of λ: it goes without momentum, averaging, "
                "scaling, a sweep, the reverse and the lazy form."
            )
        self.rates = rate if isinstance(rate, Rates) else Rates(rate, rate)
        if self.rates.groups and (momentum is not None or reverse or lazy or sweep is not None or acceleration):
            raise ValueError(
                "Rates for parts of the parameters are factors of their gradients: without natural momentum, the "
                "reverse and the lazy form, a sweep and acceleration."
            )
        self.temperature = number(temperature, "The temperature")
        self.momentum = None if momentum is None else number(momentum, "The momentum", high=1.0)
        self.average = average
        self.shaping = shaping if shaping is None or isinstance(shaping, Shaping) else Shaping(shaping)
        if weight_decay is None or isinstance(weight_decay, WeightDecay):
            self.weight_decay = weight_decay
        else:
            self.weight_decay = WeightDecay(weight_decay)
        self.scaling = scaling
        self.sweep = sweep
        self.acceleration = acceleration
        self.reverse = reverse
        self.lazy = lazy
        self.units = units
        if measured and (units != "fraction" or reverse):
            raise ValueError(
                'A measured start replaces all of the precision in the first step: it goes with units="fraction" and '
                "steps in λ."
            )
        if isinstance(self.rates.precision, Window) and units != "fraction":
            raise ValueError('A Window is the fraction of the precision that a step replaces: give units="fraction".')
        self.measured = measured

    def shaped(self, transformation: Any) -> Steps:
        """The same steps with the gradient shaped by an optax transformation first: see `Shaping`.

        >>> import bayesrule as blr, optax
        >>> rule = blr.adam(1e-3)
        >>> clipped = rule.replace(steps=rule.steps.shaped(optax.clip_by_global_norm(1.0)), name="clipped adam")
        >>> blr.difference(rule, clipped).pieces
        ('steps',)
        """
        pieces = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {
            "shaping": transformation
        }
        return Steps(pieces.pop("rates"), **pieces)

    @property
    def temperature_schedule(self) -> Scheduled | Planned | None:
        """The schedule of τ that q's precision S = (Nv + δ)/τ follows from step to step; None where it follows none."""
        changes = isinstance(self.temperature, Scheduled | Planned)
        return self.temperature if self.units == "fraction" and changes else None

    @property
    def planned(self) -> bool:
        """Whether anything depends on how many steps are planned (`State.horizon`)."""
        return isinstance(self.temperature, Planned) or (self.scaling is not None and self.scaling.as_adam)

    def rate_left(self, count: Any, horizon: Any = None) -> Any:
        """The part of a constant rate in Adam's units that is left after so many of the planned steps.

        It falls to 0 along half a cosine. It is 1 where no number of steps is known, in other units and for schedules.
        Called where the precision is measured.
        """
        constant = not isinstance(self.rates.mean, Scheduled)
        falls = constant and horizon is not None and self.scaling is not None and self.scaling.as_adam
        return cosine(count, horizon) if falls else 1.0

    def rates_at(self, count: Any, size: Any, temperature: Any, share: Any = None) -> tuple[Any, Any]:
        """ρ₁ for the mean and ρ₂ for the precision, in the rule's own units, at this step count.

        Args:
            count: How many steps were taken before.
            size: N.
            temperature: τ.
            share: M/N, the part of the data in this step's batch, where that is known and a window may be used.
        """
        unit = {"natural": 1.0, "fraction": temperature, "mean": size}[self.units]
        window = self.rates.precision
        forgotten = window.forgotten(share, count) if isinstance(window, Window) else at(window, count)
        mean, precision = jnp.asarray(at(self.rates.mean, count), float), jnp.asarray(forgotten, float)
        if self.units == "natural":
            return mean, precision
        return mean if self._scaled_fraction else mean / unit, precision / unit

    @property
    def _scaled_fraction(self) -> bool:
        # A scaling divides by the curvature of the mean loss, which contains τ already.
        return self.units == "fraction" and self.scaling is not None

    @property
    def approximation(self) -> str:
        """How Table 1 names what the steps do to the natural gradient, as phrases separated by commas."""
        phrases = []
        on_batches = self.sweep is not None and self.sweep.local is not None and not equals(self.rates.mean, 1)
        if self.units == "mean" or on_batches:
            # Rates for the mean loss, or a rate below 1 beside local steps of 1, are for mini-batches.
            phrases.append("stochastic approx.")
        if on_batches:
            phrases.append("local ρ = 1")
        if self.scaling is not None and self.scaling.root:
            phrases.append("square-root scaling")
        if self.units == "fraction" and not self.rates.single:
            phrases.append("slow-moving scale vectors")
        return ", ".join(phrases)

    @property
    def full_step(self) -> str:
        """How Table 1 names ρ = 1, where nothing is approximated; empty for other rates."""
        if not (equals(self.rates.mean, 1) and self.rates.single):
            return ""
        return "ρ = 1" if self.sweep is None else "ρ = 1 for all nodes"

    def __str__(self) -> str:
        unit = {"natural": "", "fraction": "τ", "mean": "N"}[self.units]
        unit = "" if self.units == "fraction" and equals(self.temperature, 1) else unit
        mean, precision = format_number(self.rates.mean), format_number(self.rates.precision)
        mean_unit = "" if self._scaled_fraction else unit
        if self.rates.single and mean == precision and mean_unit == unit:
            parts = [f"ρ{unit} = {mean}"]
        else:
            parts = [f"ρ₁{mean_unit} = {mean} (mean), ρ₂{unit} = {precision} (precision)"]
        parts += [f"ρ of {path} = {format_number(rate)}" for path, rate in self.rates.groups.items()]
        if not equals(self.temperature, 1):
            parts.append(f"τ = {format_number(self.temperature)}")
        if self.momentum is not None:
            parts.append(f"natural momentum γ = {format_number(self.momentum)} (eq:bayes_learn_rule_momentum)")
        parts += [
            str(piece)
            for piece in (self.shaping, self.average, self.scaling, self.weight_decay, self.sweep, self.acceleration)
            if piece is not None
        ]
        if self.weight_decay is not None:  # No prior is taken beside it.
            parts = [part.replace(" + δ/N", "") for part in parts]
        if self.measured:
            parts.append("S starts from the first batches' curvature (ρ₂τ = 1/t)")
        if self.reverse:
            parts.append("in μ (mirror descent in λ, section 2.2)")
        if self.lazy:
            parts.append("lazily: the sum of all gradients from the start (section 5.4)")
        return ", ".join(parts)
