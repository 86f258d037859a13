"""infer(): a posterior for any log density, without tuning, and a verdict on it.

Several starts are taken to their modes; the modes are told apart; a Gaussian is moved by the rule from each of them to
the optimum at fixed quasi-Monte Carlo points; importance weights of fresh draws judge it; and where that is not good
enough, a mixture is fitted to the weighted draws, and judged in turn. What is left, as with many numbers, is judged by
draws that Hamiltonian Monte Carlo has moved.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..families.gaussian.diagonal import DiagonalGaussian
from ..families.gaussian.full import Gaussian
from ..families.latent.mixture import Mixture
from ..fitting.checkpointing import Writes
from ..fitting.interrupt import TERMINATED, Interrupt
from ..fitting.progress import one_blas_thread
from ..fitting.result import save
from ..numerics.checks import positive_int
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from .advance import prepare, variational_rule
from .constraints import Constrained, Values, path_of, resolve, start_values
from .density import Density, compile_ahead, constrained, generator_of, log_densities
from .diagonal import diagonal_rule, fit_diagonal, start_around
from .gaussian import GaussianFit, Placed, fit_gaussian, place, start_of
from .importance import Importance, Shift, importance, shift_of
from .mixture import Components, components_of, fit_mixture, match_moments, widened
from .modes import Mode, climb, draw_starts, endless_direction, flat_direction, look_elsewhere, tell_apart
from .moves import ACCEPTANCE, KEPT, MovedMoments, moved_draws, precise, reaches_a_mode
from .posterior import Posterior, Record, columns_of, theta_names
from .verdict import KHAT_LIMIT, LEAST_EFFECTIVE, Judgement, comfortable, judge, judge_by_moves, sentence, weakest

DRAWS = 4000
"""How many fresh draws judge an approximation."""

PRODUCTS = 300_000
"""The budget: how many products of a Hessian with a vector a fit may compute, about."""

MOST_CORRELATED, MOST_NUMBERS = 2000, 20_000
"""Above the one a full Gaussian, with its Hessians, is out of reach, and q is diagonal; above the other, too."""

_MOST_DENSE, _LOOKED_AT = 48, 3  # With more numbers, zeros of the Hessian are looked for, at so many points.
_MOST_MODES = 6
_LEAST_STEPS = 8  # Where the budget has no room for so many steps of a full Gaussian, q is diagonal.
_STEPS, _ROUNDS = 200, 20  # of a Gaussian with each number of points, and of refitting a mixture
_MOST_MIXED = 60  # With more numbers than these, weighted draws are too few to refit covariances.
_SAVE_EVERY = 5.0  # seconds between two checkpoints
_MATCHED_MEAN, _MATCHED_WIDTH = 0.01, 0.015  # Shifts below these are not worth a correction.
_PROBE_MARGIN = 1.3  # Where draws farther out show a shift, there is more of it still farther out.
_MOST_DRAWN = 2 * 10**7  # numbers in the draws that judge an approximation
_AGREE = 1.0  # nats within which bounds of a diagonal Gaussian from several starts are the same
_BEHIND = 7.0  # A Gaussian whose bound is so many nats behind the best has less than a thousandth of its weight.


def infer(
    log_density: Callable[..., Any],
    start: PyTree,
    *,
    key: Key,
    constraints: Mapping[str, Any] | None = None,
    args: tuple[PyTree, ...] = (),
    starts: int | None = None,
    tolerance: float = 1e-4,
    products: int = PRODUCTS,
    progress: bool | Callable[[str], None] = False,
    checkpoint: str | Path | None = None,
) -> Posterior:
    r"""A posterior for any log density, without tuning: draws of it, and a verdict on how far to trust them.

    Several starts are taken to their modes by Newton's method; from each mode a Gaussian is moved by the rule over
    fixed quasi-Monte Carlo points, $S ← (1−ρ)S + ρE_q∇^2\barℓ$, $m ← m − ρS^{-1}E_q∇\barℓ$ with $\barℓ = −\log p$,
    until it has converged; importance weights of fresh draws say how good it is. If it is not good enough, a mixture
    of Gaussians is fitted to the weighted draws. With more than 2000 numbers, or where the budget has no room for
    Hessians, q is diagonal, and draws that Hamiltonian Monte Carlo has moved judge and replace it.

    Args:
        log_density: log p(parameters, *args) up to a constant: a JAX function of a pytree. With constraints it is the
            density of the constrained parameters; the Jacobian is added here.
        start: The parameters to start from, or their shapes (`jax.ShapeDtypeStruct`, or tuples); a `Gaussian` over the
            unconstrained parameters, such as `posterior.q`, is taken as found, without a search for modes.
        key: A JAX key, for the starts and the fresh draws.
        constraints: NumPyro's constraints, or their names, by the parameter's path: `{"scale": "positive"}`.
        args: Data, given to `log_density` after the parameters. A second call with other data of the same shapes
            compiles nothing.
        starts: How many starts to take to a mode; by default eight, and fewer with many parameters.
        tolerance: The nats that q may be away from the optimum at its points.
        products: A budget: how many products of a Hessian with a vector to compute, about.
        progress: True shows what is being done; a function is called with a line of text.
        checkpoint: A file that holds the best Gaussian so far; `load` it and pass it as `start` to go on. With it,
            SIGTERM saves and exits with the code 143.

    Ctrl-C ends the search and the steps, and returns the best so far with a verdict that says so.

    Returns:
        The `Posterior`: `trust`, `verdict`, `samples(key, n)`, `summary()`, `q`.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> y = jnp.array([1.2, 0.4, 2.1, 0.9, 1.5])
    >>> def log_density(p):
    ...     return jnp.sum(-0.5 * (y - p["mean"]) ** 2) - 0.5 * p["mean"] ** 2
    >>> posterior = blr.infer(log_density, {"mean": jnp.zeros(())}, key=jax.random.key(0))
    >>> posterior.trust, round(float(posterior.q.mean["mean"]), 4)
    ('trust', 1.0167)
    """
    q = gaussian_of(start)
    values, has_values = start_values(start if q is None else q.mean)
    resolved = resolve(constraints, values)
    wrapped = Constrained(log_density, resolved)
    if q is not None:
        theta, given = values, None
    elif has_values:
        theta = jax.tree.map(jnp.asarray, wrapped.unconstrain(values))
        given = ravelled_or_raise(theta, values)
    else:
        theta = _unconstrained_zeros(wrapped, values)
        given = None
    like = jax.tree.map(jnp.zeros_like, theta)
    density = Density(wrapped, tuple(args), like, Values(wrapped))
    return infer_density(
        density,
        key,
        given=given,
        q=q,
        starts=starts,
        tolerance=tolerance,
        products=products,
        progress=progress,
        checkpoint=checkpoint,
    )


def gaussian_of(start: Any) -> Gaussian | DiagonalGaussian | None:
    """The Gaussian that a fit may go on from: a Gaussian itself, or the heaviest component of a mixture; else None."""
    if isinstance(start, Mixture):
        start = start.component(jnp.argmax(start.weights))
    return start if isinstance(start, Gaussian | DiagonalGaussian) else None


def ravelled_or_raise(theta: PyTree, values: PyTree) -> np.ndarray:
    """The start as a vector; an error where a value is not inside of its constraint."""
    for (path, leaf), value in zip(
        jax.tree_util.tree_flatten_with_path(theta)[0], jax.tree.leaves(values), strict=True
    ):
        if not np.all(np.isfinite(np.asarray(leaf))):
            raise ValueError(f"The start of {path_of(path)!r}, {np.asarray(value)}, is not inside of its constraint.")
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(theta)])


def _unconstrained_zeros(wrapped: Constrained, zeros: PyTree) -> PyTree:
    """Zeros of the unconstrained shapes, from the shapes of the values: a simplex of three has two numbers."""
    bijections = wrapped.bijections()

    def leaf(path: Any, value: Any) -> Any:
        transform = bijections.get(path_of(path))
        return value if transform is None else jnp.zeros(transform.inverse_shape(value.shape), value.dtype)

    return jax.tree_util.tree_map_with_path(leaf, zeros)


def infer_density(
    density: Density,
    key: Key,
    *,
    given: np.ndarray | None = None,
    q: Gaussian | DiagonalGaussian | None = None,
    starts: int | None = None,
    tolerance: float = 1e-4,
    products: int = PRODUCTS,
    progress: bool | Callable[[str], None] = False,
    checkpoint: str | Path | None = None,
    kind: Callable[..., Any] = Posterior,
    advice: Callable[[], str] | None = None,
    explain: Callable[[], str | None] | None = None,
) -> Any:
    """The posterior of a density: what `infer` does once the density is there.

    Args:
        density: the density.
        key: a JAX key.
        given: a start, ravelled.
        q: a Gaussian to start from, without a search for modes.
        starts, tolerance, products, progress, checkpoint: as for `infer`.
        kind: the class of the posterior.
        advice: says what to do where the answer is not good.
        explain: says what is wrong with the density where it is zero at every start, or None.
    """
    if density.size > MOST_NUMBERS:
        raise ValueError(
            f"infer judges an approximation by moving draws of all its numbers, and {density.size} are too many for "
            f"that (at most {MOST_NUMBERS}): use blr.fit with a diagonal family, such as blr.ivon, or NUTS."
        )
    count = _number_of_starts(density.size) if starts is None else positive_int("starts", starts)
    start_rng, look_rng, fit_rng, draw_rng = generator_of(key).spawn(4)
    writes = None if checkpoint is None else Writes(Path(checkpoint))
    if writes is not None:
        writes.check()
    signals = () if checkpoint is None else (signal.SIGTERM,)
    with one_blas_thread(), Interrupt(signals) as interrupt, _Speaker(progress) as speaker:
        watched = _Watched(interrupt, speaker, writes)
        wait = compile_ahead(density) if density.size <= _MOST_DENSE else None
        positions = _positions(density, start_rng, count, given, q, explain, watched)
        if wait is not None:
            prepare(density)
            wait()
        if _MOST_DENSE < density.size <= MOST_CORRELATED and not isinstance(q, DiagonalGaussian):
            density = density.with_sparse_hessian(positions[:_LOOKED_AT])
        diagonal = isinstance(q, DiagonalGaussian) or not _affords_correlations(density, products)
        modes: list[Mode] = []
        if diagonal:
            narrow = [start_around(density, position) for position in positions]
            beginnings = [q] if isinstance(q, DiagonalGaussian) else narrow
            fits, agreed = _fit_diagonals(density, beginnings, tolerance, watched)
            count = len(beginnings)
        else:
            if isinstance(q, Gaussian):
                beginnings, count, agreed = [q], 1, 1
            else:
                modes, count = _find_modes(density, look_rng, positions, watched)
                beginnings = [start_of(density, mode) for mode in modes[:_MOST_MODES]]
                agreed = sum(mode.starts for mode in modes if mode.converged)
            fits = _fit_gaussians(density, beginnings, fit_rng, tolerance, products, watched)
        if interrupt.signal is not None:
            raise SystemExit(TERMINATED)
        answer, tried = _choose_family(density, fits, draw_rng, watched)
        # Where no start has arrived, the density has no highest point that one could reach: it is infinite somewhere,
        # as in the neck of a hierarchy, and draws from elsewhere do not see what mass there is.
        lost = bool(modes) and not any(mode.converged for mode in modes)
        if diagonal and not watched.stop():
            watched.say("looking for a mode")
            lost = not reaches_a_mode(density, answer.components.frame())
        step = None
        if not _settled(answer.judgement) and not lost and len(fits) == 1 and not watched.stop():
            answer, step = _judged_by_moves(density, answer, draw_rng, watched)
    if interrupt.signal is not None:
        raise SystemExit(TERMINATED)
    components, weighted, judgement = answer.components, answer.weighted, answer.judgement
    if lost:
        judgement = judgement._replace(trust="do not trust", source="approximation")
    single = "diagonal Gaussian" if diagonal else "Gaussian"
    verdict = sentence(
        judgement,
        weighted,
        family=single if len(components.weights) == 1 else f"mixture of {len(components.weights)} Gaussians",
        tried=tried,
        agreed=agreed,
        starts=count,
        modes=sum(mode.converged for mode in modes),
        advice=(lambda: _ADVICE) if advice is None else advice,
    )
    if interrupt.requested:
        verdict = f"Interrupted, and this is the best so far. {verdict}"
    best = fits[0]
    record = Record(
        weighted=weighted,
        judgement=judgement,
        verdict=verdict,
        modes=tuple(modes),
        starts=count,
        agreed=agreed,
        samples=best.samples,
        steps=best.steps,
        converged=best.converged,
        point_error=(best.mean_error, best.width_error),
        products=sum(fit.products for fit in fits),
        tried=tuple(tried),
        gaussian_bound=best.bound,
        step=step,
    )
    rule = diagonal_rule(best.samples) if diagonal else variational_rule(best.samples)
    return kind(density, components, record, rule)


def _affords_correlations(density: Density, products: int) -> bool:
    """Whether the budget allows for the Hessians of a full Gaussian's steps; with few numbers it always does."""
    if density.size <= _MOST_DENSE:
        return True
    return density.size <= MOST_CORRELATED and _LEAST_STEPS * _first_points(density) * density.products <= products


def _settled(judgement: Judgement) -> bool:
    """Whether moved draws have nothing to add: trusted, and either corrected or far within what that promises."""
    return judgement.trust == "trust" and (judgement.refined or comfortable(judgement))


class _Watched(NamedTuple):
    """What a long inference asks and tells on its way."""

    interrupt: Interrupt
    say: Callable[[str], None]
    writes: Writes | None

    def save(self, q: Gaussian | DiagonalGaussian) -> None:
        """Write the checkpoint, if there is one; one that cannot be written is a warning."""
        if self.writes is not None:
            self.writes.attempt(partial(save, self.writes.path, q))

    def stop(self) -> bool:
        """Whether the user has asked to stop."""
        return self.interrupt.requested


def _positions(
    density: Density,
    rng: np.random.Generator,
    count: int,
    given: np.ndarray | None,
    q: Gaussian | DiagonalGaussian | None,
    explain: Callable[[], str | None] | None,
    watched: _Watched,
) -> Float[np.ndarray, "K P"]:
    """Where to start the search for modes, or draws of the Gaussian to go on from; an error where p is zero at all."""
    if q is not None:
        return components_of(q).draw(rng, _LOOKED_AT)
    watched.say(f"searching for modes from {count} starts")
    positions = draw_starts(density, rng, count, given)
    if not len(positions):
        reason = None if explain is None else explain()
        raise ValueError(
            "The log density is not a finite number at any start"
            + (
                f": {reason}"
                if reason
                else ". Starts are drawn around zero, or around start= where it has values: check the data for NaN, "
                "and give a start at which the density is positive and does not overflow."
            )
        )
    return positions


def _find_modes(
    density: Density, rng: np.random.Generator, positions: Float[np.ndarray, "K P"], watched: _Watched
) -> tuple[list[Mode], int]:
    """The modes that the starts lead to, and how many starts there were; an error where there are no modes."""
    ends = climb(density, positions, watched.stop)
    if not ends:
        raise ValueError("The derivatives of the log density are not finite numbers at any start.")
    modes = tell_apart(ends)
    others = look_elsewhere(density, rng, modes, positions[0])
    if len(others) and not watched.stop():
        modes = tell_apart([*ends, *climb(density, others, watched.stop)])
    for direction, what in (
        (endless_direction(modes[0]), "the density rises without end along"),
        (flat_direction(density, modes[0]), "the density does not fall, however far one goes along"),
    ):
        if direction is not None:
            name = theta_names(density)[int(np.argmax(np.abs(direction)))]
            raise ValueError(
                f"The posterior is improper: {what} {name}. Give it a proper prior, or take it out of the model if "
                "nothing depends on it."
            )
    return modes, len(positions) + len(others)


_NO_BOUND = (
    "No Gaussian has a finite bound: the density rises without end, so that the posterior is improper, or it is zero "
    "or overflows close to each place where it is high. Give every parameter a proper prior; reparametrise the model "
    "so that its support is the whole space; or give a start (start=) close to where the density is high, if that is "
    "narrow and far from zero."
)


def _fit_gaussians(
    density: Density,
    beginnings: list[Gaussian],
    rng: np.random.Generator,
    tolerance: float,
    products: int,
    watched: _Watched,
) -> list[GaussianFit]:
    """The distinct Gaussians that have weight, the best first."""
    fits: list[GaussianFit] = []
    best, saved = -np.inf, time.monotonic()

    for number, (beginning, own) in enumerate(zip(beginnings, rng.spawn(len(beginnings)), strict=True)):

        def follow(at: Placed, bound: float, steps: int, number: int = number) -> bool:
            nonlocal best, saved
            watched.say(f"Gaussian at mode {number + 1} of {len(beginnings)}: step {steps}, bound {bound:.6g}")
            if watched.writes is not None and bound > best and time.monotonic() - saved > _SAVE_EVERY:
                watched.save(at.gaussian(density))
                best, saved = bound, time.monotonic()
            return watched.stop()

        fits.append(
            fit_gaussian(
                density,
                beginning,
                own,
                samples=_first_points(density),
                tolerance=tolerance,
                steps=_STEPS,
                products=products // len(beginnings),
                follow=follow,
            )
        )
        if watched.stop():
            break
    fits = _distinct(fits)
    if not fits:
        raise ValueError(_NO_BOUND)
    watched.save(fits[0].q)
    return fits


def _fit_diagonals(
    density: Density, beginnings: list[DiagonalGaussian], tolerance: float, watched: _Watched
) -> tuple[list[GaussianFit], int]:
    """The best of the diagonal Gaussians that the starts lead to, and how many of them agree with it."""
    fits: list[GaussianFit] = []
    saved = time.monotonic()

    for number, beginning in enumerate(beginnings):

        def follow(at: DiagonalGaussian, bound: float, steps: int, number: int = number) -> bool:
            nonlocal saved
            watched.say(
                f"diagonal Gaussian from start {number + 1} of {len(beginnings)}: step {steps}, bound {bound:.6g}"
            )
            if watched.writes is not None and time.monotonic() - saved > _SAVE_EVERY:
                watched.save(at)
                saved = time.monotonic()
            return watched.stop()

        found, interrupted = fit_diagonal(density, beginning, tolerance=tolerance, follow=follow)
        fits.append(found)
        watched.interrupt.requested |= interrupted  # `fit` has taken Ctrl-C for itself.
        if watched.stop():
            break
    usable = [fit for fit in fits if np.isfinite(fit.bound)]
    if not usable:
        raise ValueError(_NO_BOUND)
    best = max(usable, key=lambda fit: fit.bound)
    watched.save(best.q)
    return [best], sum(fit.converged and fit.bound > best.bound - _AGREE for fit in usable)


def _choose_family(
    density: Density, fits: list[GaussianFit], rng: np.random.Generator, watched: _Watched
) -> tuple[_Answer, list[str]]:
    """The approximation that fresh draws judge best, and the families that were tried: a Gaussian, then a mixture."""
    watched.say("judging the Gaussian by importance weights")
    names = _names(density)
    answer = _judged(density, components_of(fits[0].q), rng, names)
    if answer.judgement.trust == "trust":
        answer = _with_matched_moments(density, answer, rng, names)
    unlikely = answer.components.is_diagonal or (density.size > _MOST_MIXED and len(fits) == 1)
    if (len(fits) == 1 and comfortable(answer.judgement)) or unlikely or watched.stop():
        return answer, ["Gaussian"]
    watched.say("fitting a mixture of Gaussians")
    bounds = np.array([fit.bound for fit in fits])
    starts = [place(fit.q) for fit in fits]
    draws = int(min(DRAWS + 400 * density.size, 5 * DRAWS))  # A covariance of more numbers takes more of them.
    rounds = _ROUNDS if density.size <= _MOST_MIXED else 1
    mixed = fit_mixture(density, starts, bounds, rng, draws=draws, rounds=rounds, stop=watched.stop)
    other = _judged(density, mixed, rng, names)
    better = len(fits) > 1 or _rank(other) > _rank(answer)
    return other if better else answer, ["Gaussian", "Mixture"]


def _judged_by_moves(
    density: Density, answer: _Answer, rng: np.random.Generator, watched: _Watched
) -> tuple[_Answer, float | None]:
    """An approximation that its weights do not vouch for, judged by moved draws, and the length of their steps.

    Where these have not settled, the answer is what it was, and there is no length.
    """
    own = _numbers(density, answer.points)
    moments, patient = MovedMoments(np.mean(own, axis=0), np.std(own, axis=0)), True
    for moved in moved_draws(density, answer.components.frame(), rng):
        watched.say(f"moving draws by Hamiltonian Monte Carlo: {moments.count} moves")
        if moved.acceptance < ACCEPTANCE or watched.stop():
            break
        moments.add(_numbers(density, moved.points))
        if moments.count in KEPT:
            shift, settled = moments.shift()
            if settled and precise(shift):
                return answer._replace(judgement=judge_by_moves(shift, _names(density))), moved.step
            if moments.count == KEPT[-1] or not (settled or patient):
                break
            if not settled:  # Chains that began far out may need longer: what was counted so far is left out.
                moments, patient = MovedMoments(moments.mean, moments.std), False
    return answer, None


_ADVICE = (
    "Reparametrise (for a hierarchy, the other centring), take more starts, or sample with NUTS from "
    "posterior.nuts_start(key)."
)


class _Draws(NamedTuple):
    """Draws of some r, with all their numbers, log p and log r."""

    points: np.ndarray
    numbers: np.ndarray
    log_p: np.ndarray
    log_r: np.ndarray


class _Answer(NamedTuple):
    """An approximation with the draws that have judged it: its own, and those that are partly wider, if asked for."""

    components: Components
    points: np.ndarray
    weighted: Importance
    judgement: Judgement
    around: _Draws | None


def _judged(
    density: Density,
    components: Components,
    rng: np.random.Generator,
    names: list[str],
    around: _Draws | None = None,
) -> _Answer:
    """An approximation, judged by fresh draws of it, and by draws that are partly wider.

    Args:
        density: the density.
        components: the approximation.
        rng: the source of draws.
        names: the names of all numbers.
        around: the wider draws, where an approximation much like this one has been judged by them.
    """
    points = components.draw(rng, _draws_for(density))
    weighted = importance(log_densities(density, points) - components.log_prob(points))
    judgement = judge(weighted, _shift(density, points, weighted), names, mixture=len(components.weights) > 1)
    if judgement.trust != "do not trust" and (judgement.within_limits or not judgement.refined):
        around = _draws_around(density, components, rng) if around is None else around
        judgement = weakest(judgement, _probe(components, weighted.khat, around, names))
    return _Answer(components, points, weighted, judgement, around)


def _draws_around(density: Density, components: Components, rng: np.random.Generator) -> _Draws:
    """Draws that also see what lies beside an approximation."""
    wide = widened(components)
    points = wide.draw(rng, _draws_for(density))
    return _Draws(points, _numbers(density, points), log_densities(density, points), wide.log_prob(points))


def _probe(components: Components, khat: float, around: _Draws, names: list[str]) -> Judgement | None:
    """What draws say of q that also see what lies beside it; None where these are too few to say anything.

    q's own draws do not see what is far from all of them, such as the ends of a curved ridge. Wider ones do, and their
    weights have a lighter tail; where it is heavier, there is more to be seen still farther out.
    """
    weighted = importance(around.log_p - around.log_r)
    if weighted.effective < LEAST_EFFECTIVE:
        return None
    own = importance(components.log_prob(around.points) - around.log_r)
    shift = shift_of(around.numbers, weighted.log_weights, own.log_weights)
    judgement = judge(weighted, shift, names, mixture=False, margin=_PROBE_MARGIN)
    if weighted.khat > max(KHAT_LIMIT, khat + 0.2):
        return judgement._replace(trust="means only")
    return judgement if weighted.khat < KHAT_LIMIT else None


def _with_matched_moments(density: Density, answer: _Answer, rng: np.random.Generator, names: list[str]) -> _Answer:
    """A trusted Gaussian with the moments that its weights show, where these are better.

    The variational optimum is a little too narrow. Where the weights can be believed, they say by how much.
    """
    judgement = answer.judgement
    if judgement.mean_shift < _MATCHED_MEAN and judgement.width_shift < _MATCHED_WIDTH:
        return answer
    matched = match_moments(answer.components, answer.points, answer.weighted.log_weights)
    if matched is None:
        return answer
    other = _judged(density, matched, rng, names, answer.around)
    better = other.weighted.effective >= answer.weighted.effective and other.judgement.trust == "trust"
    return other if better else answer


def _rank(answer: _Answer) -> tuple[int, bool, float]:
    """What makes one answer better than another: trust, then draws close to the density's own, then even weights."""
    judgement = answer.judgement
    order = {"trust": 2, "means only": 1, "do not trust": 0}[judgement.trust]
    return order, judgement.refined or comfortable(judgement), answer.weighted.effective


def _draws_for(density: Density) -> int:
    """How many fresh draws judge an approximation: with very many numbers fewer, for the sake of memory."""
    return int(min(DRAWS, _MOST_DRAWN // density.size))


def _number_of_starts(size: int) -> int:
    return 8 if size <= 64 else 4 if size <= 300 else 3 if size <= MOST_CORRELATED else 2


def _first_points(density: Density) -> int:
    return 64 if density.products <= 64 else 32 if density.products <= 200 else 16


def _distinct(fits: list[GaussianFit]) -> list[GaussianFit]:
    """The Gaussians that have weight beside the best, each once, the best first."""
    ordered = sorted((fit for fit in fits if np.isfinite(fit.bound)), key=lambda fit: -fit.bound)
    kept: list[GaussianFit] = []
    for fit in ordered:
        if fit.bound < ordered[0].bound - _BEHIND:
            continue
        same = False
        for other in kept:
            one, two = place(fit.q), place(other.q)
            distance = np.linalg.solve(two.root.T, one.mean - two.mean)
            same |= float(distance @ distance) < 0.1 * len(distance) ** 0.5 and abs(fit.bound - other.bound) < 0.1
        if not same:
            kept.append(fit)
    return kept


def _names(density: Density) -> list[str]:
    # By a program that is needed anyway: to ask for shapes alone traces the model again.
    return theta_names(density) + columns_of(constrained(density, np.zeros((1, density.size))))[1]


def _shift(density: Density, points: np.ndarray, weighted: Importance, own: np.ndarray | None = None) -> Shift:
    """The shifts of all numbers, unconstrained and constrained."""
    return shift_of(_numbers(density, points), weighted.log_weights, own)


def _numbers(density: Density, points: Float[np.ndarray, "M P"]) -> Float[np.ndarray, "M D"]:
    """All numbers, unconstrained and constrained."""
    values = columns_of(constrained(density, points))[0]
    return np.concatenate([points, np.where(np.isfinite(values), values, 0.0)], axis=1)


class _Speaker:
    """Says what is being done: to nobody, to a function, or on the terminal, where the last line is replaced."""

    def __init__(self, progress: bool | Callable[[str], None]):
        self.function = progress if callable(progress) else None
        self.status: Any = None
        if progress is True:
            from rich.console import Console

            self.status = Console(stderr=True).status("starting")

    def __enter__(self) -> _Speaker:
        if self.status is not None:
            self.status.start()
        return self

    def __call__(self, text: str) -> None:
        if self.function is not None:
            self.function(text)
        if self.status is not None:
            self.status.update(text)

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()
