"""What `infer` returns: an approximate posterior, draws of it in the users' own variables, and the verdict on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ..fitting.checkpoint import read, write
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..numerics.trees import unravel
from ..rule.rule import Rule
from .constraints import path_of
from .density import Density, constrained, generator_of, log_densities
from .importance import Importance, importance
from .mixture import Components
from .modes import Mode
from .moves import CHAINS, moved_draws
from .verdict import Judgement, Trust

_POOL = 10  # How many draws of q there are for each importance-resampled one, at least.
_MOST_IN_POOL = 200_000


class Record(NamedTuple):
    """What an inference has measured, beside the approximation itself.

    Attributes:
        weighted: the importance weights of fresh draws, with the bound and the evidence.
        judgement: what they say of the approximation.
        verdict: the same in words.
        modes: the modes that were found, the largest evidence first.
        starts: how many starts were taken to a mode.
        agreed: how many of them ended at one of these modes.
        samples: how many quasi-Monte Carlo points the Gaussian has.
        steps: how many steps it took.
        converged: whether these have converged.
        point_error: by how much a mean, in standard deviations, and a standard deviation, as a fraction, are off
            because of the points.
        products: how many products of Hessians and vectors were computed, about.
        tried: the families that were tried, in order.
        gaussian_bound: the evidence lower bound of the best Gaussian, at its points.
        step: the length of a leap-frog step where moved draws have judged the approximation, else None.
    """

    weighted: Importance
    judgement: Judgement
    verdict: str
    modes: tuple[Mode, ...]
    starts: int
    agreed: int
    samples: int
    steps: int
    converged: bool
    point_error: tuple[float, float]
    products: int
    tried: tuple[str, ...]
    gaussian_bound: float
    step: float | None = None


class Posterior:
    """An approximate posterior of any density, and how far to trust it.

    Attributes:
        q: the approximation over the unconstrained θ: a `Gaussian`, a `Mixture` of them, or with many numbers a
            `DiagonalGaussian`.
        density: the density that was inferred, on the unconstrained space.
        record: what was measured on the way, a `Record`.
        rule: the rule that the Gaussian was moved by; print it to read its derivation.

    `trust` is "trust" (every mean within 0.1 standard deviations, every standard deviation within 10 %), "means only"
    or "do not trust"; `verdict` is the sentence that says why and what to do.
    """

    def __init__(self, density: Density, components: Components, record: Record, rule: Rule):
        self.density, self.record, self.rule = density, record, rule
        self._components = components
        self.q = components.as_family(density)

    # The verdict.

    @property
    def trust(self) -> Trust:
        """Whether to rely on it: "trust", "means only" or "do not trust"."""
        return self.record.judgement.trust

    @property
    def verdict(self) -> str:
        """The verdict in plain words, with what to do where it is not good."""
        return self.record.verdict

    @property
    def khat(self) -> float:
        """Pareto's k̂ of the importance weights; below 0.7 they can be relied on."""
        return self.record.weighted.khat

    @property
    def bound(self) -> float:
        """The evidence lower bound of q, at fresh draws."""
        return self.record.weighted.bound

    @property
    def bound_error(self) -> float:
        """The standard error of the bound."""
        return self.record.weighted.bound_error

    @property
    def log_evidence(self) -> float:
        """The logarithm of the evidence, by importance sampling."""
        return self.record.weighted.evidence

    @property
    def log_evidence_error(self) -> float:
        """Its standard error."""
        return self.record.weighted.evidence_error

    @property
    def gaussian_bound(self) -> float:
        """The evidence lower bound of the best Gaussian, whatever family q is now, at its points."""
        return self.record.gaussian_bound

    @property
    def family(self) -> str:
        """The name of the family of q."""
        return type(self.q).__name__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.family} over {self.density.size} numbers; {self.trust})"

    def __str__(self) -> str:
        lines = [
            repr(self),
            f"  {self.verdict}",
            f"  bound         {self.bound:.4f} ± {self.bound_error:.4f}",
            f"  log evidence  {self.log_evidence:.4f} ± {self.log_evidence_error:.4f}",
        ]
        return "\n".join(lines)

    # Draws.

    def unconstrained(self, key: Key, count: int, *, refined: bool | None = None) -> np.ndarray:
        """Draws of θ, ravelled, (count, P); see `samples`."""
        rng = generator_of(key)
        refined = self.record.judgement.refined if refined is None else refined
        if not refined:
            return self._components.draw(rng, count)
        if self.record.step is not None:
            return self._moved(rng, count, self.record.step)
        pool = int(np.clip(_POOL * count, 10_000, max(_MOST_IN_POOL, 2 * count)))
        points = self._components.draw(rng, pool)
        log_q = self._components.log_prob(points)
        weights = np.exp(importance(log_densities(self.density, points) - log_q).log_weights)
        # Systematic resampling: a draw of weight w comes ⌊nw⌋ or ⌈nw⌉ times.
        places = (rng.uniform() + np.arange(count)) / count
        chosen = np.minimum(np.searchsorted(np.cumsum(weights), places), pool - 1)
        return points[rng.permutation(chosen)]

    def _moved(self, rng: np.random.Generator, count: int, step: float) -> np.ndarray:
        """Draws of q that Hamiltonian Monte Carlo has moved, as many."""
        chains = min(CHAINS, count)
        moved = moved_draws(self.density, self._components.frame(), rng, chains=chains, step=step)
        points = [one.points for one in itertools.islice(moved, -(-count // chains))]
        return rng.permutation(np.concatenate(points))[:count]

    def samples(self, key: Key, count: int = 1000, *, refined: bool | None = None) -> PyTree:
        """Draws of the parameters in their own, constrained space.

        Args:
            key: A JAX key.
            count: How many draws.
            refined: Whether to correct what is wrong with q: by importance weights, which takes a k̂ below 0.7, or,
                where these have not settled the verdict, by moves of Hamiltonian Monte Carlo. By default where the
                verdict says that these are the draws to trust.

        Returns:
            The parameters with a leading axis of draws.
        """
        return self.constrained(self.unconstrained(key, count, refined=refined))

    def constrained(self, points: np.ndarray) -> PyTree:
        """The parameters in their own space at ravelled unconstrained points, with their leading axis."""
        return constrained(self.density, points)

    def log_density(self, theta: PyTree) -> Array:
        """log q(θ) of an unconstrained θ, normalised."""
        return self.q.log_prob(theta)

    def log_densities(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """log p and log q at ravelled unconstrained points, (B, P)."""
        return log_densities(self.density, points), self._components.log_prob(points)

    @property
    def mean(self) -> PyTree:
        """The mean of q, in the unconstrained space."""
        return self.density.tree(self._components.moments()[0])

    def covariance(self) -> np.ndarray:
        """The covariance of q over the ravelled unconstrained θ, (P, P); its variances, (P,), where q is diagonal."""
        return self._components.moments()[1]

    def summary(self, key: Key | None = None, count: int = 4000) -> Summary:
        """A table of every number's mean, standard deviation and quantiles, from draws as `samples` gives them."""
        draws = self.samples(jax.random.key(0) if key is None else key, count)
        return Summary.of(draws, self.verdict)

    # For NUTS.

    def nuts_start(self, key: Key, chains: int = 1) -> dict[str, Any]:
        """Where NUTS may start, and its mass matrix: so that this inference is its warm-up.

        Returns:
            "init_params", draws of the unconstrained θ with a leading axis of chains (none for one chain), and
            "inverse_mass_matrix", the covariance over the ravelled θ, or its diagonal (see `covariance`).
            `blackjax.nuts` takes both as they are; `bayesrule.interop.numpyro` has `nuts`, which makes NumPyro's kernel
            of them.
        """
        points = jnp.asarray(self.unconstrained(key, chains), self.density.dtype)
        params = jax.vmap(lambda x: unravel(x, self.density.like))(points)
        params = jax.tree.map(lambda x: x[0], params) if chains == 1 else params
        return {"init_params": params, "inverse_mass_matrix": jnp.asarray(self.covariance(), self.density.dtype)}

    # Files.

    def save(self, path: str | Path) -> None:
        """Save the approximation and its verdict, without the density: `load_posterior` puts both together again."""
        parts, record = self._components, self.record
        weighted = record.weighted._asdict()
        state = {
            "weights": parts.weights,
            "means": parts.means,
            "covariances": parts.covariances,
            "weighted": {name: np.asarray(value) for name, value in weighted.items()},
            "judgement": {name: str(value) for name, value in record.judgement._asdict().items()},
            "verdict": record.verdict,
            "modes": [
                {
                    "position": m.position,
                    "precision": m.precision,
                    "numbers": np.array([m.evidence, m.starts, m.converged]),
                }
                for m in record.modes
            ],
            "numbers": np.array(
                [
                    record.starts,
                    record.agreed,
                    record.samples,
                    record.steps,
                    record.converged,
                    *record.point_error,
                    record.products,
                    record.gaussian_bound,
                    np.nan if record.step is None else record.step,
                ]
            ),
            "tried": list(record.tried),
        }
        write(path, state)


def load_posterior(path: str | Path, density: Density, kind: Callable[..., Any] = Posterior) -> Any:
    """A saved posterior of this density."""
    from .advance import variational_rule
    from .diagonal import diagonal_rule

    state = read(path)
    if not isinstance(state, dict) or "judgement" not in state:
        raise ValueError(f"{path} does not hold a posterior that `Posterior.save` has written.")
    means = np.asarray(state["means"])
    if means.shape[1] != density.size:
        raise ValueError(
            f"{path} holds a posterior over {means.shape[1]} numbers, and this model has {density.size}: load it with "
            "the model and the data that it was fitted with."
        )
    weighted = state["weighted"]
    numbers = {name: float(weighted[name]) for name in Importance._fields if name != "log_weights"}
    given = state["judgement"]
    judgement = Judgement(
        given["trust"],
        given["source"],
        float(given["mean_shift"]),
        float(given["width_shift"]),
        given["mean_of"],
        given["width_of"],
        given["by_moves"] == "True",
    )
    modes = tuple(
        Mode(
            np.asarray(m["position"]),
            np.asarray(m["precision"]),
            float(m["numbers"][0]),
            int(m["numbers"][1]),
            bool(m["numbers"][2]),
        )
        for m in state["modes"]
    )
    n = np.asarray(state["numbers"])
    record = Record(
        Importance(np.asarray(weighted["log_weights"]), **numbers),
        judgement,
        state["verdict"],
        modes,
        int(n[0]),
        int(n[1]),
        int(n[2]),
        int(n[3]),
        bool(n[4]),
        (float(n[5]), float(n[6])),
        int(n[7]),
        tuple(state["tried"]),
        float(n[8]),
        None if np.isnan(n[9]) else float(n[9]),
    )
    components = Components(np.asarray(state["weights"]), means, np.asarray(state["covariances"]))
    rule = diagonal_rule(record.samples) if components.is_diagonal else variational_rule(record.samples)
    return kind(density, components, record, rule)


class Summary(NamedTuple):
    """A table of means, standard deviations and quantiles: `print` it, or read its columns.

    Attributes:
        names: of the numbers, such as "beta[0]".
        mean: of each.
        std: of each.
        low: the 5 % quantile of each.
        high: the 95 % quantile.
        verdict: whether to rely on them.
    """

    names: tuple[str, ...]
    mean: np.ndarray
    std: np.ndarray
    low: np.ndarray
    high: np.ndarray
    verdict: str

    @staticmethod
    def of(draws: PyTree, verdict: str) -> Summary:
        """The table of draws with a leading axis."""
        numbers, names = columns_of(draws)
        low, high = np.quantile(numbers, [0.05, 0.95], axis=0)
        return Summary(tuple(names), np.mean(numbers, axis=0), np.std(numbers, axis=0), low, high, verdict)

    def __str__(self) -> str:
        width = max([len(name) for name in self.names] + [4])
        lines = [f"{'':{width}}  {'mean':>10}{'sd':>10}{'5 %':>10}{'95 %':>10}"]
        rows = zip(self.names, self.mean, self.std, self.low, self.high, strict=True)
        lines += [f"{name:{width}}  {m:10.4g}{s:10.4g}{low:10.4g}{high:10.4g}" for name, m, s, low, high in rows]
        return "\n".join([*lines, "", self.verdict])

    __repr__ = __str__


def columns_of(draws: PyTree) -> tuple[np.ndarray, list[str]]:
    """All numbers of draws with a leading axis as columns, and their names."""
    columns, names = [], []
    for path, leaf in jax.tree_util.tree_flatten_with_path(draws)[0]:
        values = np.asarray(leaf)
        if not np.issubdtype(values.dtype, np.floating) and not np.issubdtype(values.dtype, np.integer):
            continue
        name, shape = path_of(path) or "x", values.shape[1:]
        columns.append(values.reshape(len(values), -1).astype(np.float64))
        names += [f"{name}[{','.join(map(str, index))}]" for index in np.ndindex(*shape)] if shape else [name]
    return np.concatenate(columns, axis=1), names


def theta_names(density: Density) -> list[str]:
    """The names of the unconstrained numbers."""
    one = jax.tree.map(lambda leaf: np.asarray(leaf)[None], density.like)
    return [f"{name} (unconstrained)" for name in columns_of(one)[1]]
