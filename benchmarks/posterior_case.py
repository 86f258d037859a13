"""A posterior with known moments, and how far an approximation of it is off.

A case is a NumPyro model with its data, or a log density of a dictionary of arrays; the moments of some scalar
functions of its latent variables are known, from the literature, in closed form, by quadrature or from a long run of
NUTS. `judge` compares draws, or moments, with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Draws = Mapping[str, Array]  # site → (n, …), as NumPyro's `get_samples` gives them
Space = Literal["constrained", "unconstrained"]

# What it should take for every mean to come within 0.1 sd and every sd within 10 %.
Expected = Literal[
    "gaussian",  # a full Gaussian on the unconstrained space
    "centring",  # a Gaussian after location-scale sites are reparametrised, alone or with another family
    "skew",  # a skewed family
    "heavy",  # heavier tails
    "mixture",  # several modes, or a curved ridge that a mixture can follow
    "hard",  # none of these: NUTS
]


class Moments(NamedTuple):
    """Means and standard deviations of k scalars, each with its own standard error (0 where they are exact)."""

    names: tuple[str, ...]
    mean: Array
    sd: Array
    mean_error: Array
    sd_error: Array

    @classmethod
    def exact(cls, names: tuple[str, ...], mean: Any, sd: Any) -> Moments:
        mean, sd = (np.broadcast_to(np.asarray(x, float), (len(names),)) for x in (mean, sd))
        return cls(names, mean, sd, np.zeros(len(names)), np.zeros(len(names)))

    @classmethod
    def of_draws(cls, names: tuple[str, ...], draws: Array) -> Moments:
        """Of independent draws (n, k)."""
        draws = np.asarray(draws, float)
        mean, sd = draws.mean(0), draws.std(0)
        fourth = ((draws - mean) ** 4).mean(0) / np.maximum(sd, np.finfo(float).tiny) ** 4
        n = len(draws)
        return cls(names, mean, sd, sd / np.sqrt(n), sd * np.sqrt(np.maximum(fourth - 1, 0) / (4 * n)))


class Mode(NamedTuple):
    """A part of the posterior around one of its modes, and the probability of it."""

    name: str
    weight: float
    contains: Callable[[Draws], Array]  # whether each draw lies in it


@dataclass(frozen=True)
class Case:
    """One posterior with known moments: either `model` or `log_density` is given.

    Args:
        name: of the case.
        reference: the known moments, by the space in which they are compared.
        quantities: for each space of `reference`, the function from the draws of the latent sites, site → (n, …), to
            the k scalars whose moments are known, (n, k). "constrained" are the latent variables as the model has
            them; "unconstrained" are functions without bounds, such as logarithms of scales. These need not be the
            coordinates that NumPyro's transforms use.
        dimension: the number of latent dimensions.
        expected: what a good approximation should take.
        model, args, kwargs: a NumPyro model and its data.
        log_density, start, constraints: a function of a dictionary of arrays up to a constant, values of the right
            shapes, and the constraints by name where they are not "real"; it is a density of the constrained values.
        modes: the parts of the posterior, where it has several.
        group: where the case is from.
        source: of the data, the model and the moments.
        precision: the dtype without which the case has no meaning; "float64" for a nearly singular one.
    """

    name: str
    reference: Mapping[Space, Moments]
    quantities: Mapping[Space, Callable[[Draws], Array]]
    dimension: int
    expected: Expected
    model: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    log_density: Callable[[Any], Any] | None = None
    start: Mapping[str, Any] | None = None
    constraints: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[Mode, ...] = ()
    group: Literal["posteriordb", "inference_gym", "synthetic"] = "synthetic"
    source: str = ""
    precision: Literal["any", "float64"] = "any"

    def __post_init__(self) -> None:
        if (self.model is None) == (self.log_density is None):
            raise ValueError(f"{self.name}: a case has either a model or a log density.")
        if set(self.reference) != set(self.quantities):
            raise ValueError(f"{self.name}: the spaces of the reference and of the quantities differ.")

    def as_numpyro(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The model with its data; a log density as a model with flat priors and a factor."""
        if self.model is not None:
            return self.model, self.args, dict(self.kwargs)
        import numpyro
        import numpyro.distributions as dist

        log_density, start = self.log_density, self.start
        assert log_density is not None
        assert start is not None

        def model() -> None:
            values = {}
            for name, value in start.items():
                support = getattr(dist.constraints, self.constraints.get(name, "real"))
                shape = np.shape(value)
                batch, event = (shape, ()) if support.event_dim == 0 else ((), shape)
                values[name] = numpyro.sample(name, dist.ImproperUniform(support, batch, event))
            numpyro.factor("log_density", log_density(values))

        return model, (), {}

    def moments_of(self, draws: Draws, space: Space) -> Moments:
        """Means and standard deviations of what the case compares, of independent draws."""
        return Moments.of_draws(self.reference[space].names, np.asarray(self.quantities[space](as_arrays(draws))))

    def missed_modes(self, draws: Draws) -> list[str]:
        """The modes of at least 2 % of the probability in which no draws lie, but for the tail of another mode's."""
        arrays = as_arrays(draws)
        share = lambda mode: float(np.mean(mode.contains(arrays)))
        return [mode.name for mode in self.modes if mode.weight >= 0.02 and share(mode) < 0.02 * mode.weight]


@dataclass(frozen=True)
class Errors:
    """How far means and standard deviations are off: the worst of all scalars that were compared.

    Args:
        mean: the largest |mean − reference mean| in units of the reference standard deviation.
        sd: the largest |sd / reference sd − 1|.
        mean_beyond, sd_beyond: the same after two standard errors (of the reference and of the draws, together) have
            been taken off each difference: an error that chance does not explain.
        mean_of, sd_of: the names of the worst scalars.
    """

    mean: float
    sd: float
    mean_beyond: float
    sd_beyond: float
    mean_of: str
    sd_of: str

    def within(self, mean: float, sd: float) -> bool:
        """Whether all means lie within `mean` standard deviations and all sds within a fraction, up to chance."""
        return self.mean_beyond <= mean and self.sd_beyond <= sd


def judge(
    case: Case, answer: Draws | Moments | Mapping[Space, Moments], space: Space | Literal["both"] = "both"
) -> Errors:
    """The largest errors of an answer's means and standard deviations.

    Args:
        case: the posterior with its reference moments.
        answer: draws of the latent sites, site → (n, …), in the model's own (constrained) variables; or moments of the
            case's quantities: by space, or of the one space that `space` names.
        space: where to compare; "both" takes the worst of the spaces that the case has.
    """
    spaces: list[Space] = [name for name in case.reference if space in ("both", name)]
    if not spaces:
        raise ValueError(f"{case.name} has no reference in the {space} space, only in {', '.join(case.reference)}.")
    if isinstance(answer, Moments):
        if len(spaces) > 1:
            raise ValueError("Say which space the moments belong to: space='constrained' or 'unconstrained'.")
        found = {spaces[0]: answer}
    elif all(isinstance(value, Moments) for value in answer.values()):
        found = {name: answer[name] for name in spaces}
    else:
        found = {name: case.moments_of(answer, name) for name in spaces}

    columns = [[], [], [], [], []]
    for name in spaces:
        true, actual = case.reference[name], found[name]
        mean_chance = 2 * np.hypot(true.mean_error, actual.mean_error) / true.sd
        sd_chance = 2 * np.hypot(true.sd_error, actual.sd_error) / true.sd
        mean_off = _or_infinite(np.abs(actual.mean - true.mean) / true.sd)
        sd_off = _or_infinite(np.abs(actual.sd / true.sd - 1))
        values = (mean_off, sd_off, _beyond(mean_off, mean_chance), _beyond(sd_off, sd_chance))
        for column, value in zip(columns, (*values, np.array(true.names)), strict=True):
            column.append(value)
    mean, sd, mean_beyond, sd_beyond, names = (np.concatenate(column) for column in columns)
    worst = (str(names[np.argmax(mean)]), str(names[np.argmax(sd)]))
    return Errors(*(float(np.max(x)) for x in (mean, sd, mean_beyond, sd_beyond)), *worst)


def as_arrays(draws: Draws) -> dict[str, Array]:
    """The draws as NumPy arrays in double precision."""
    return {name: np.asarray(value, float) for name, value in draws.items()}


def scalar_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """x, x[0], x[0,1] …"""
    return [f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(*shape)] if shape else [name]


def _or_infinite(errors: Array) -> Array:
    """A moment that is not a number is infinitely far off."""
    return np.where(np.isnan(errors), np.inf, errors)


def _beyond(errors: Array, chance: Array) -> Array:
    return np.where(np.isfinite(errors), np.maximum(errors - np.nan_to_num(chance), 0), np.inf)
