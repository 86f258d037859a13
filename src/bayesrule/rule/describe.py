"""An algorithm in words: the printed derivation of a rule, and the pieces in which two rules differ.

Everything is read off the pieces. The update is the family's own formula with the terms that the steps and the guard
change: averages in place of gradients, a scaling in place of the precision, momentum, a retraction.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import equinox as eqx

from ..steps.guards import Retraction
from ..steps.scaling import ADAM_LENGTH, LONGEST_RATE
from ..steps.schedule import Scheduled, format_number

if TYPE_CHECKING:
    from .rule import Rule


def describe(rule: Rule) -> str:
    """The derivation of an algorithm: its name, a line for each piece, and the update as a formula."""
    where = f" (Khan and Rue, section {rule.section})" if rule.section else ""
    rows = [
        ("family", repr(rule.family), rule.family.kind.meaning),
        ("points", repr(rule.points), rule.points.meaning),
        ("curvature", repr(rule.curvature), rule.curvature.meaning),
        ("steps", str(rule.steps), ""),
        ("guard", repr(rule.guard), rule.guard.meaning),
    ]
    if rule.search is not None:
        rows.append(("search", repr(rule.search), rule.search.meaning))
    width = max(len(value) for piece, value, _ in rows if piece != "steps")
    lines = [f"  {piece:<10} {value:<{width}}  {meaning}".rstrip() for piece, value, meaning in rows]
    first, *definitions = update_formulas(rule)
    lines += [f"  {'update':<10} {first}", *(f"  {'':<10} {text}" for text in definitions)]
    return "\n".join([f"{rule.name}{where}", *lines])


# The update as a formula.

# How the families' formulas write the gradient of the expected loss.
_GRADIENTS = ("E_q∇ℓ̄", "E_z[(z/π₁)∘∇ℓ̄(z∘m)]", "E_{q_k}∇f_k", "∇_μ E_q ℓ̄")


def update_formulas(rule: Rule) -> list[str]:
    """The update as a formula, with its label in the paper, and then the definitions of the symbols in it."""
    steps = rule.steps
    if steps.lazy:
        return ["λ ← λ₁ − ρ Σ_{s≤t} ∇_μ E_{q_s} ℓ̄_s  (section 5.4)"]
    if steps.reverse:
        momentum = "" if steps.momentum is None else " + γ(μ − μ₋)"
        return [f"μ ← μ − ρ ∇_λ[E_q ℓ̄ − τH(q)]{momentum}  (section 2.2)"]
    if steps.scaling is not None:
        return _scaled_formulas(rule)
    formula, label = _without_label(rule.family.kind.update_with(rule.family.part))
    if steps.momentum is not None:
        return [_momentum_formula(rule, formula, label)]
    definitions = []
    if not steps.rates.single:
        precision, arrow, mean = formula.rpartition(",  m ←")
        formula = precision.replace("ρ", "ρ₂") + arrow + mean.replace("ρ", "ρ₁") if arrow else formula
    if isinstance(rule.guard, Retraction):
        formula, definition = _retracted(formula)
        definitions += definition
    if steps.average is not None:
        formula, definition = _averaged(rule, formula)
        definitions.append(definition)
    if rule.family.point_masses is not None:
        definitions.append("θ_* = argmax ⟨λ_j, T(θ_j)⟩ in place of q_j for the parameters  (section 5.2)")
    return [formula + label, *definitions]


def _without_label(formula: str) -> tuple[str, str]:
    """The formula, and its label in the paper with the space before it."""
    match = re.search(r"\s+\((?:eq|section)[^()]*\)$", formula)
    return (formula, "") if match is None else (formula[: match.start()], match.group())


def _momentum_formula(rule: Rule, formula: str, label: str) -> str:
    if rule.family.structure == "none":  # λ = Sm with a fixed S, so the momentum of λ is that of m.
        return f"{formula} + γ(m − m₋){label[:-1]}, eq:sgd_momentum)"
    return "λ ← (1 − ρτ)λ − ρ ∇_μ E_q[ℓ̄ + τ log h] + γ(λ − λ₋)  (eq:bayes_learn_rule_momentum)"


def _retracted(formula: str) -> tuple[str, list[str]]:
    """The precision's part of the formula to second order on the manifold of positive-definite matrices."""
    match = re.match(r"(\S+) ← \(1 − (ρ.?)τ\)\1 \+ ρ.? (.*?),  (?=m ←)", formula)
    if match is None:
        return formula, []
    symbol, rate, curvature = match.groups()
    square = "D∘D/s" if symbol == "s" else f"D{symbol}⁻¹D"
    start = f"{symbol} ← {symbol} + {rate}D + ½{rate}²{square},  "
    return start + formula[match.end() :], [f"D = {curvature} − τ{symbol}"]


def _averaged(rule: Rule, formula: str) -> tuple[str, str]:
    """The formula with the average in place of the gradient, and the definition of the average."""
    average: Any = rule.steps.average
    gradient = next((token for token in _GRADIENTS if token in formula), "∇_μ E_q ℓ̄")
    if average.over == "total":
        return formula.replace(gradient, average.symbol), average.formula(f" {gradient}")
    regularizer = "∇_μ E_q R" if gradient == "∇_μ E_q ℓ̄" else "∇R"
    formula = formula.replace(gradient, f"({average.symbol} + {regularizer})")
    return formula, average.formula(f"({gradient} − {regularizer})")


def _scaled_formulas(rule: Rule) -> list[str]:
    """The update of mean and scale vector in terms of the mean loss, as a `Scaling` computes it."""
    steps = rule.steps
    scaling: Any = steps.scaling
    rate, precision_rate = ("ρ", "ρτ") if steps.rates.single else ("ρ₁", "ρ₂τ")
    gradient, definitions = "(ĝ + ∇R/N)", []
    if steps.average is not None:
        total = steps.average.over == "total"
        definitions.append(steps.average.formula(gradient if total else "ĝ"))
        gradient = steps.average.symbol if total else f"({steps.average.symbol} + ∇R/N)"
    if scaling.debias:
        definitions.append(f"v̂ = v/(1 − (1 − {precision_rate})ᵗ)")
    # With a square root v is kept beside q and does not take part in the retraction of q's precision.
    retracted = isinstance(rule.guard, Retraction) and not scaling.root
    scale = f"v ← (1 − {precision_rate})v + {precision_rate} ĥ"
    if retracted:
        scale = f"v ← v + {precision_rate}(ĥ − v) + ½({precision_rate})²(ĥ − v)²/(v + δ/N)"
    label = "(eq:rmsprop_update)" if scaling.root else "(eq:don)"
    symbols = "ĝ, ĥ: gradient and curvature of the data's mean loss; R: the regularizer, δ = ∇²R"
    if scaling.as_adam:
        falls = "" if isinstance(steps.rates.mean, Scheduled) else ", falling to 0 in fit"
        symbols += f"; c = {ADAM_LENGTH:g}√(M/N) and ρ₁ ≤ {LONGEST_RATE:g}{falls} (Adam's units)"
        symbols += "; the first step leaves m"
    elif scaling.measured:
        symbols += "; c: the harmonic mean of the divisors of the first step, which measures v and leaves m"
    decay, precision = "", "s = (Nv + δ)/τ"
    if steps.weight_decay is not None:  # No prior is taken beside it.
        decay, precision = f" − {rate}w m", "s = Nv/τ, without a δ: the decay is no prior"
        symbols = symbols.partition(";")[0]
    precision = rule.family.kind.precision_formula or precision
    update = f"{scale},  {scaling.formula(rate, gradient)}{decay}  {label}"
    if decay:
        update, definitions = update.replace(" + δ/N", ""), [d.replace("(ĝ + ∇R/N)", "ĝ") for d in definitions]
    return [update, ",  ".join([*definitions, precision]), symbols]


# The difference between two rules.

_PIECES = ("family", "points", "curvature", "steps", "guard", "search")


@dataclasses.dataclass(frozen=True)
class Difference:
    """The pieces in which two algorithms differ: made by `blr.difference`.

    `len` counts the pieces, `pieces` names them, iteration gives a row for each aspect of a piece that differs:
    (piece, aspect, first, second), all strings. An empty difference is false.
    """

    names: tuple[str, str]
    """The names of the two algorithms."""
    rows: tuple[tuple[str, str, str, str], ...]
    """(piece, aspect, first, second) for every aspect that differs; the aspect is empty where all of it differs."""

    @property
    def pieces(self) -> tuple[str, ...]:
        """The pieces that differ, of family, points, curvature, steps, guard and search."""
        return tuple(dict.fromkeys(piece for piece, *_ in self.rows))

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[tuple[str, str, str, str]]:
        return iter(self.rows)

    def __str__(self) -> str:
        first, second = self.names
        if not self.rows:
            return f"{first} and {second} are made of the same pieces."
        table = [("", first, second)]
        table += [(f"{piece}.{aspect}" if aspect else piece, a, b) for piece, aspect, a, b in self.rows]
        widths = [max(len(row[column]) for row in table) for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in table)

    __repr__ = __str__


def difference(first: Rule, second: Rule) -> Difference:
    """Which pieces of two algorithms differ, and how.

    Args:
        first: An algorithm.
        second: Another one.

    Returns:
        A `Difference`: it prints as a table, `len` counts the pieces that differ and `.pieces` names them. It is empty
        if, and only if, the two are equal.

    >>> import bayesrule as blr
    >>> blr.difference(blr.ogn(1e-2), blr.vogn(1e-2))
            ogn      vogn
    points  Delta()  MonteCarlo(1)
    >>> blr.difference(blr.newton(), blr.gradient_descent(0.1)).pieces
    ('family', 'curvature', 'steps', 'guard')
    """
    rows = []
    for piece in _PIECES:
        rows += [(piece, *row) for row in _aspects(getattr(first, piece), getattr(second, piece))]
    return Difference((first.name, second.name), tuple(rows))


def _aspects(first: Any, second: Any) -> list[tuple[str, str, str]]:
    """(aspect, first, second) for every field in which two pieces differ, or one row if they are of different types."""
    if bool(eqx.tree_equal(first, second)):
        return []
    if type(first) is not type(second):
        return [("", _printed(first), _printed(second))]
    rows = []
    for field in dataclasses.fields(first):
        mine, other = getattr(first, field.name), getattr(second, field.name)
        if bool(eqx.tree_equal(mine, other)):
            continue
        if not isinstance(mine, eqx.Module) or type(mine) is not type(other):
            rows.append((field.name, _printed(mine), _printed(other)))
        else:
            rows += [(f"{field.name}.{aspect}", a, b) for aspect, a, b in _aspects(mine, other)]
    return rows


def _printed(value: Any) -> str:
    """A field of a piece, for a table."""
    if value is None:
        return "none"
    if isinstance(value, type):
        return value.__name__
    return str(value) if isinstance(value, bool) else format_number(value)
