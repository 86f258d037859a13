"""Kalman's filter and smoother without an inverse: one step after the other, or many stretches side by side."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...numerics.linalg import matmul, matvec, outer, posterior, root, symmetric
from .state_space import StateSpace

State = tuple[Float[Array, "... D"], Float[Array, "... D D"]]
Steps = dict[str, Array]


class Observations(NamedTuple):
    r"""What is known of every output by itself, $∝ \exp\frac{af − ½bf^2}{c}$, an entry for each step and output.

    A Gaussian site of natural parameters (ν, −½κ) is (ν, κ, 1); an observation y with noise R is (y, 1, R), also where
    R = 0; what is missing is (0, 0, 1).
    """

    a: Float[Array, "T m"]
    b: Float[Array, "T m"]
    c: Float[Array, "T m"]


class Element(NamedTuple):
    r"""A stretch of the chain as a function of the state $x$ that it starts from.

    After it the state is $N(Ax + b, C)$, and its sites have the likelihood $∝ \exp(η^⊤x − ½x^⊤Jx)$ (Särkkä and
    García-Fernández, 2021).
    """

    A: Float[Array, "... D D"]
    b: Float[Array, "... D"]
    C: Float[Array, "... D D"]
    eta: Float[Array, "... D"]
    J: Float[Array, "... D D"]


class Innovation(NamedTuple):
    """What a stretch sees of every output, given that it starts from x = 0, and how the output's mean depends on x."""

    output: Float[Array, "T m"]
    spread: Float[Array, "T m"]
    push: Float[Array, "T m"]
    weight: Float[Array, "T m"]
    gain: Float[Array, "T m D"]
    back: Float[Array, "T m D"]


class Chain(NamedTuple):
    """All stretches: every step's Element (up to it, from its stretch's start) and Seen; each stretch whole.

    `start` is the state predicted for each, and `later` what all that follow it are together.
    """

    steps: Steps
    element: Element
    seen: Innovation
    whole: Element
    start: State
    later: Element | None


class Filtered(NamedTuple):
    """Every state's mean and covariance given the sites up to its step; every output's before its own site."""

    mean: Float[Array, "T D"]
    covariance: Float[Array, "T D D"]
    output: Float[Array, "T m"]
    spread: Float[Array, "T m"]


class Smoothed(NamedTuple):
    """Every state's mean and covariance given all sites, and Cov(x_{t+1}, x_t) where it was asked for."""

    mean: Float[Array, "T D"]
    covariance: Float[Array, "T D D"]
    pairs: Float[Array, "T-1 D D"] | None


def _steps(system: StateSpace, sites: Observations, length: int) -> Steps:
    """What the scans read, in stretches of one length: the last one is filled up with steps that see nothing."""
    count = sites.a.shape[0]
    xs: Steps = dict(sites._asdict())
    for name, rank in (("transition", 2), ("noise", 2), ("offset", 1)):
        if getattr(system, name).ndim > rank:
            xs[name] = system.each(name, count)
    if system.emission.ndim == 3:
        xs["emission"] = system.emission
    whole = -(-count // length)
    fill = lambda x: jnp.broadcast_to(x[-1:], (whole * length - count, *x.shape[1:]))
    blank = {"a": jnp.zeros_like, "b": jnp.zeros_like, "c": jnp.ones_like}
    padded = {n: jnp.concatenate([x, blank.get(n, lambda x: x)(fill(x))]) for n, x in xs.items()}
    return {n: x.reshape((whole, length, *x.shape[1:])) for n, x in padded.items()}


def _at(system: StateSpace, step: Steps, name: str) -> Array:
    array: Any = step[name] if name in step else getattr(system, name)
    return array[None] if name == "emission" and array.ndim == 1 else array


def _updated(carry: Element, x: tuple[Array, Array, Array, Array]) -> tuple[Element, Innovation]:
    """A stretch and one output's site more: u = (a − bf)/(c + bs) and w = b/(c + bs) are all that it takes."""
    (mean, cov), (h, a, b, c) = (carry.b, carry.C), x
    gain = matvec(cov, h)
    output, spread = jnp.sum(h * mean), jnp.sum(h * gain)
    scale = c + b * spread
    # An exact observation of what is known already says nothing.
    sure = scale == 0
    safe = jnp.where(sure, 1.0, scale)
    push, weight = jnp.where(sure, 0.0, a - b * output) / safe, jnp.where(sure, 0.0, b) / safe
    back = matvec(carry.A.mT, h)
    after = Element(
        carry.A - weight * outer(gain, back),
        mean + gain * push,
        cov - weight * outer(gain, gain),
        carry.eta + back * push,
        carry.J + weight * outer(back, back),
    )
    return after, Innovation(output, spread, push, weight, gain, back)


def _each_output(once: Any, carry: Any, xs: tuple, reverse: bool = False) -> tuple[Any, Any]:
    """One output of a step after the other: written out if they are few."""
    count = jax.tree.leaves(xs)[0].shape[0]
    if count > 4:
        return jax.lax.scan(once, carry, xs, reverse=reverse)
    found = []
    for j in reversed(range(count)) if reverse else range(count):
        carry, out = once(carry, jax.tree.map(lambda x, j=j: x[j], xs))
        found.append(out)
    found = found[::-1] if reverse else found
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *found)


def filter_segment(system: StateSpace, xs: Steps) -> tuple[Element, Element, Innovation]:
    """The filter from a state that is known: what it has after all steps, and after every one's sites."""

    def step(carry: Element, x: Steps) -> tuple[Element, tuple[Element, Innovation]]:
        here, seen = _each_output(_updated, carry, (_at(system, x, "emission"), x["a"], x["b"], x["c"]))
        F = _at(system, x, "transition")
        mean = matvec(F, here.b) + _at(system, x, "offset")
        cov = symmetric(matmul(matmul(F, here.C), F.mT) + _at(system, x, "noise"))
        return Element(matmul(F, here.A), mean, cov, here.eta, here.J), (here, seen)

    last, (every, seen) = jax.lax.scan(step, nothing(system), xs)
    return last, every, seen


def nothing(system: StateSpace) -> Element:
    """A stretch of no steps."""
    eye, zeros = jnp.eye(system.size, dtype=system.mean.dtype), jnp.zeros_like(system.mean)
    none = jnp.zeros_like(system.covariance)
    return Element(eye, zeros, none, zeros, none)


def joined(first: Element, second: Element) -> Element:
    """Two stretches, one after the other: associative."""
    middle, _ = posterior(first.C, second.J)  # of the state between them, given what follows
    surprise = second.eta - matvec(second.J, first.b)
    eye = jnp.eye(first.A.shape[-1], dtype=first.A.dtype)
    through = matmul(eye - matmul(middle, second.J), first.A)
    return Element(
        matmul(second.A, through),
        matvec(second.A, first.b + matvec(middle, surprise)) + second.b,
        symmetric(matmul(matmul(second.A, middle), second.A.mT) + second.C),
        first.eta + matvec(through.mT, surprise),
        first.J + symmetric(matmul(first.A.mT, matmul(second.J, through))),
    )


def _scanned(parts: list[Element], none: Element) -> list[Element]:
    """Every stretch joined with those before it; of a second list, which is in reverse, with those after it in time.

    An associative scan by doubling: log B turns of one loop, which is compiled once for both.
    """
    count = parts[0].b.shape[0]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *parts)

    def once(k: Array, stacked: Element) -> Element:
        shift = 2**k
        early = jnp.arange(count) < shift

        def shifted(x: Array, blank: Array) -> Array:
            return jnp.where(early.reshape((-1,) + (1,) * blank.ndim), blank, jnp.roll(x, shift, axis=1))

        moved = jax.tree.map(shifted, stacked, none)
        first = jax.tree.map(lambda m, x: jnp.concatenate([m[:1], x[1:]]), moved, stacked)
        second = jax.tree.map(lambda m, x: jnp.concatenate([x[:1], m[1:]]), moved, stacked)
        return joined(first, second)

    found = jax.lax.fori_loop(0, (count - 1).bit_length(), once, stacked)
    return [jax.tree.map(lambda x, i=i: x[i], found) for i in range(len(parts))]


def chain(system: StateSpace, sites: Observations, parallel: bool | None = None, ahead: bool = True) -> Chain:
    r"""The chain in stretches, each filtered from a known start, and the state predicted for every start.

    `parallel` has ½√T of them side by side, joined by an associative scan; by default, from 64 steps on. What a stretch
    knows given its start does not depend on how vague the start is, so nothing is lost to a diffuse prior. A filter
    does without what lies `ahead`.
    """
    count = sites.a.shape[0]
    parallel = count >= 64 if parallel is None else parallel
    length = min(count, max(1, round(2 * count**0.5))) if parallel else count
    steps = _steps(system, sites, length)
    whole, every, seen = jax.vmap(lambda x: filter_segment(system, x))(steps)
    none = nothing(system)
    prior = Element(none.J, system.mean, system.covariance, none.eta, none.J)
    before = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y[:-1]]), prior, whole)
    after = jax.tree.map(lambda x, y: jnp.concatenate([x[1:], y[None]])[::-1], whole, none)
    if length < count:
        before, *others = _scanned([before, after] if ahead else [before], none)
        after = others[0] if ahead else after
    later = jax.tree.map(lambda x: x[::-1], after) if ahead else None
    return Chain(steps, every, seen, whole, (before.b, before.C), later)


def _given(start: State, eta: Array, J: Array) -> tuple[Array, Array, Array, Array]:
    """A start's mean and covariance given what a likelihood says of it, log ∫ of that, and log|I + PJ|."""
    mean, cov = start
    spread, log_det = posterior(cov, J)
    surprise = eta - matvec(J, mean)
    after = mean + matvec(spread, surprise)
    # ηᵀm − ½mᵀJm + ½(η − Jm)ᵀK(η − Jm)
    value = 0.5 * jnp.sum((eta + surprise) * mean + surprise * (after - mean), axis=-1)
    return after, spread, value - 0.5 * log_det, log_det


def log_normalizer(found: Chain) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Σ log ∫ of the stretches' likelihoods over their starts, and log|I + Kκ| of all sites (c = 1) together."""
    *_, value, log_det = _given(found.start, found.whole.eta, found.whole.J)
    return jnp.sum(value), jnp.sum(log_det) + jnp.sum(jnp.log(_scales(found)))


def _scales(found: Chain) -> Array:
    """c + bs of every site; NaN where the sites leave no distribution."""
    scales = found.steps["c"] + found.steps["b"] * found.seen.spread
    return jnp.where(scales > 0, scales, jnp.nan)


def log_partition(found: Chain) -> Float[Array, ""]:
    """log E_p exp Σ(νf − ½κf²), of sites (ν, κ, 1)."""
    nu, kappa, f, s = found.steps["a"], found.steps["b"], found.seen.output, found.seen.spread
    scales = _scales(found)
    terms = (nu**2 * s + 2 * nu * f - kappa * f**2) / scales - jnp.log(scales)
    return 0.5 * jnp.sum(terms) + log_normalizer(found)[0]


def filtered(found: Chain, count: int) -> Filtered:
    r"""Every state given the sites up to its step: the stretch's start is learnt on the way.

    The start's covariance is carried as a root, $Σ = SS^⊤$, and an output $a^⊤x$ of weight w takes $S$ to
    $S(I − γφφ^⊤)$ with $φ = S^⊤a$ (Potter, 1963): a vague start loses no digits.
    """
    mean, cov, known, spread = jax.vmap(_learnt)(*found.start, found.seen)
    here = found.element
    after = here.b + matvec(here.A, mean), here.C + matmul(matmul(here.A, cov), here.A.mT)
    outputs = found.seen.output + known, found.seen.spread + spread
    return Filtered(*_flat((*after, *outputs), count))


@jax.custom_jvp
def _learnt(mean: Array, cov: Array, seen: Innovation) -> tuple[Array, Array, Array, Array]:
    """A stretch's start given its outputs up to every step, and what it predicts of each output."""

    def once(carry: State, x: tuple) -> tuple[State, tuple[Array, Array]]:
        (mean, S), (push, weight, back) = carry, x
        phi = matvec(S.mT, back)
        known, spread = jnp.sum(back * mean), jnp.sum(phi * phi)
        scale = 1 + weight * spread
        gain = matvec(S, phi)
        after = S - (weight / (scale + jnp.sqrt(scale))) * outer(gain, phi)
        return (mean + gain * ((push - weight * known) / scale), after), (known, spread)

    mean, S, *outputs = _followed(once, (mean, root(cov).mT), seen)
    return mean, matmul(S, S.mT), outputs[0], outputs[1]


def _learnt_plainly(mean: Array, cov: Array, seen: Innovation) -> tuple[Array, Array, Array, Array]:
    """The same with the covariance itself, which has a derivative where it is singular and its root has none."""

    def once(carry: State, x: tuple) -> tuple[State, tuple[Array, Array]]:
        (mean, cov), (push, weight, back) = carry, x
        gain = matvec(cov, back)
        known, spread = jnp.sum(back * mean), jnp.sum(back * gain)
        scale = 1 + weight * spread
        after = mean + gain * ((push - weight * known) / scale), cov - (weight / scale) * outer(gain, gain)
        return after, (known, spread)

    return _followed(once, (mean, cov), seen)


def _followed(once: Any, start: State, seen: Innovation) -> tuple[Array, Array, Array, Array]:
    """Output after output, step after step: the start as it becomes known, and what was predicted."""

    def step(carry: State, x: Innovation) -> tuple[State, tuple]:
        carry, outputs = _each_output(once, carry, (x.push, x.weight, x.back))
        return carry, (*carry, *outputs)

    return jax.lax.scan(step, start, seen)[1]


@_learnt.defjvp
def _learnt_jvp(primals: tuple, tangents: tuple) -> tuple:
    return _learnt(*primals), jax.jvp(_learnt_plainly, primals, tangents)[1]


def log_likelihood(found: Chain, outputs: Filtered) -> Float[Array, ""]:
    """log p(y), of observations (y, 1, R) and missing ones (0, 0, 1): each given those before it."""
    a, b, c = (_flat(found.steps[name], len(outputs.output)) for name in "abc")
    scale, miss = c + b * outputs.spread, b * (a - outputs.output) ** 2
    sure = scale == 0  # what is known already, seen exactly: certain, or impossible
    safe = scale + sure
    logs = jnp.where(b > 0, jnp.log(2 * jnp.pi * safe), 0.0)
    impossible = jnp.where(sure & (miss > 0), jnp.inf, 0.0)
    return -0.5 * (jnp.sum((miss / safe + logs) * ~sure) + jnp.sum(impossible))


def predicted(system: StateSpace, mean: Float[Array, "T D"], cov: Float[Array, "T D D"]) -> State:
    """The states one transition later, (T, …); the last is of no use where transitions change with time."""
    F, Q, o = (system.each(name, mean.shape[0]) for name in ("transition", "noise", "offset"))
    return matvec(F, mean) + o, symmetric(matmul(matmul(F, cov), F.mT) + Q)


def smoothed(system: StateSpace, found: Chain, count: int, pairs: bool = False) -> Smoothed:
    r"""Every state given all sites: backwards through each stretch, given its start, and then over its start.

    With $\tilde r_t$, $\tilde N_t$ what the future says of the filtered state (Durbin and Koopman, 2012),
    $m_t + C_t\tilde r_t + B_tx$ and $C_t − C_t\tilde N_tC_t$ given the start x, with $B_t = (I − C_t\tilde N_t)A_t$.
    """
    whole, later, eye = found.whole, found.later, jnp.eye(system.size, dtype=system.mean.dtype)
    assert later is not None, "a chain that was made for a filter"
    # (r, N) of the state that a stretch ends with, given its start x = 0
    spread, _ = posterior(whole.C, later.J)
    ahead = later.eta - matvec(later.J, whole.b)
    N = symmetric(matmul(later.J, eye - matmul(spread, later.J)))
    r = ahead - matvec(later.J, matvec(spread, ahead))
    back = jax.vmap(lambda x, e, s, r, N: _backward(system, x, e, s, (r, N), pairs))
    mean, cov, latent_correction, crossed = back(found.steps, found.element, found.seen, r, N)
    # the start of each stretch given everything
    eta = whole.eta + matvec(whole.A.mT, r)
    J = symmetric(whole.J + matmul(matmul(whole.A.mT, N), whole.A))
    start, doubt, *_ = _given(found.start, eta, J)
    mean = mean + matvec(latent_correction, start[:, None])
    wide = matmul(latent_correction, doubt[:, None])
    cov = symmetric(cov + matmul(wide, latent_correction.mT))
    mean, cov = _flat((mean, cov), count)
    if not pairs:
        return Smoothed(mean, cov, None)
    crossed = crossed[0] + matmul(matmul(crossed[1], doubt[:, None]), latent_correction.mT)
    return Smoothed(mean, cov, _flat(crossed, count)[: count - 1])


def _backward(system: StateSpace, xs: Steps, here: Element, seen: Innovation, end: State, pairs: bool) -> tuple:
    """One stretch backwards: mean and covariance given its start x = 0, how the mean depends on x, and pairs."""
    eye = jnp.eye(system.size, dtype=system.mean.dtype)

    def once(carry: State, x: tuple) -> tuple[State, None]:
        (r, N), (h, push, weight, gain) = carry, x
        # r ← hu + (I − w h gᵀ)r,  N ← w hhᵀ + (I − w h gᵀ)N(I − w g hᵀ)
        pull = matvec(N, gain)
        r = r + h * (push - weight * jnp.sum(gain * r))
        through = weight * (1 + weight * jnp.sum(gain * pull))
        crossed = weight * outer(h, pull)
        return (r, N - crossed - crossed.mT + through * outer(h, h)), None

    def step(carry: State, x: tuple) -> tuple[State, tuple]:
        (r, N), (xs, here, seen) = carry, x
        F = _at(system, xs, "transition")
        back, info = matvec(F.mT, r), matmul(F.mT, matmul(N, F))
        kept = eye - matmul(here.C, info)
        latent_correction = matmul(kept, here.A)
        out = here.b + matvec(here.C, back), matmul(kept, here.C), latent_correction, None
        if pairs:
            # Cov(x_{t+1}, x_t) given the start, and how x_{t+1} depends on it
            ahead = matmul(matmul(F, here.C), F.mT) + _at(system, xs, "noise")
            rest = eye - matmul(ahead, N)
            out = (*out[:3], (matmul(rest, matmul(F, here.C)), matmul(rest, matmul(F, here.A))))
        parts = (_at(system, xs, "emission"), seen.push, seen.weight, seen.gain)
        carry, _ = _each_output(once, (back, info), parts, reverse=True)
        return carry, out

    return jax.lax.scan(step, end, (xs, here, seen), reverse=True)[1]


def _flat(tree: Any, count: int) -> Any:
    """The stretches in a row."""
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:]))[:count], tree)
