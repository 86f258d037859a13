"""Kalman's filter and smoother, in one scan or in segments of the chain that run side by side.

A segment is filtered from an initial state x that is taken as known. What comes out is an `Element`: the distribution
of the state after the segment, as a function of x, and the likelihood of the segment's sites, as a function of x.
Elements of neighbouring segments can be joined, associatively, so a parallel scan gives the predicted initial state of
every segment (Särkkä and García-Fernández, 2021). What a segment says given its initial state does not depend on how
vague that state is, so no digits are lost to a diffuse prior, and no covariance is inverted.

The file lies beside `state_space` because it needs it; `GaussianChain` and `models.kalman` are its two users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...numerics.linalg import matmul, matvec, outer, posterior, root, symmetric
from .state_space import StateSpace

Moments = tuple[Float[Array, "... D"], Float[Array, "... D D"]]
"""The mean and the covariance of a state."""
RootMoments = tuple[Float[Array, " D"], Float[Array, "D D"]]
"""The mean of a state and a root S of its covariance, Σ = SSᵀ."""
Information = tuple[Float[Array, "... D"], Float[Array, "... D D"]]
"""(r, N), what later sites say of a state: it moves a mean m and a covariance C to m + Cr and C − CNC."""
Steps = dict[str, Array]
"""What a scan reads at each step: the fields of `OutputSites`, and the matrices of the state space that change with
time."""


class OutputSites(NamedTuple):
    r"""A site on each output, $∝ \exp\frac{af − ½bf^2}{c}$, with an entry for each step and output.

    A Gaussian site of natural parameters (ν, −½κ) is (ν, κ, 1); an observation y with noise variance R is (y, 1, R),
    also where R = 0; a missing observation is (0, 0, 1).
    """

    linear: Float[Array, "T m"]
    """a."""
    quadratic: Float[Array, "T m"]
    """b."""
    scale: Float[Array, "T m"]
    """c."""


class Element(NamedTuple):
    r"""A segment of the chain as a function of its initial state $x$.

    The state after the segment is $N(Ax + b, C)$, and the segment's sites have the likelihood $∝ \exp(η^⊤x −
    ½x^⊤Jx)$.
    """

    A: Float[Array, "... D D"]
    b: Float[Array, "... D"]
    C: Float[Array, "... D D"]
    eta: Float[Array, "... D"]
    J: Float[Array, "... D D"]


class Innovation(NamedTuple):
    """How one output's site updates the filter of a segment that starts from x = 0.

    With the predicted output N(f, s), u = (a − bf)/(c + bs) and w = b/(c + bs), the state's mean moves by gain·u and
    its covariance by −w·gain·gainᵀ. With another x, f moves by `loading`ᵀx.
    """

    output_mean: Float[Array, "T m"]
    """f."""
    output_variance: Float[Array, "T m"]
    """s."""
    scaled_residual: Float[Array, "T m"]
    """u."""
    weight: Float[Array, "T m"]
    """w."""
    gain: Float[Array, "T m D"]
    """The covariance of state and output, Ch."""
    loading: Float[Array, "T m D"]
    """Aᵀh."""


class FilteredSegments(NamedTuple):
    """A chain cut into B segments of L steps, each filtered from a known initial state."""

    steps: Steps
    """The sites and matrices, (B, L, …)."""
    elements: Element
    """From the segment's start up to and including the sites of each step, (B, L, …)."""
    innovations: Innovation
    """Of each step's outputs, (B, L, …)."""
    segments: Element
    """Each segment as a whole, with its last transition, (B, …)."""
    starts: Moments
    """The predicted initial state of each segment, given the sites of all segments before it."""
    following: Element | None
    """All segments that follow each one, joined; None if it was not asked for."""


class FilteredStates(NamedTuple):
    """Each state's moments given the sites up to its step, and each output's just before its own site."""

    mean: Float[Array, "T D"]
    covariance: Float[Array, "T D D"]
    output_mean: Float[Array, "T m"]
    output_variance: Float[Array, "T m"]


class Smoothed(NamedTuple):
    """Each state's moments given all sites, and in `pairs` Cov(x_{t+1}, x_t), if it was asked for."""

    mean: Float[Array, "T D"]
    covariance: Float[Array, "T D D"]
    pairs: Float[Array, "T-1 D D"] | None


def filter_segments(
    system: StateSpace, sites: OutputSites, parallel: bool | None = None, with_following: bool = True
) -> FilteredSegments:
    """Filter all segments of a chain and predict their initial states.

    With segments of L steps, all T/L of them are filtered at once in L sequential steps, and then joined in log₂(T/L)
    more, each over all segments. L ≈ 2√T keeps both small; a chain of fewer than 64 steps has little to gain from it.

    Args:
        system: the prior of the states.
        sites: the sites, which act on one output at a time.
        parallel: whether to cut the chain into about ½√T segments that run side by side; by default from 64 steps on.
        with_following: whether to join the segments from the end as well, which smoothing needs and filtering does not.
    """
    count = sites.linear.shape[0]
    parallel = count >= 64 if parallel is None else parallel
    length = min(count, max(1, round(2 * count**0.5))) if parallel else count
    steps = _cut_into_segments(system, sites, length)
    segments, elements, innovations = jax.vmap(lambda x: filter_segment(system, x))(steps)
    empty = empty_segment(system)
    # The prior is a segment whose final state does not depend on x (A = 0) and that has no sites (η = 0, J = 0).
    prior = Element(empty.J, system.mean, system.covariance, empty.eta, empty.J)
    before = jax.tree.map(lambda x, y: jnp.concatenate([x[None], y[:-1]]), prior, segments)
    after = jax.tree.map(lambda x, y: jnp.concatenate([x[1:], y[None]])[::-1], segments, empty)
    if length < count:
        before, *others = _scan_segments([before, after] if with_following else [before], empty)
        after = others[0] if with_following else after
    following = jax.tree.map(lambda x: x[::-1], after) if with_following else None
    return FilteredSegments(steps, elements, innovations, segments, (before.b, before.C), following)


def _cut_into_segments(system: StateSpace, sites: OutputSites, length: int) -> Steps:
    """What the scans read, (B, length, …); the last segment is padded with steps that have no sites."""
    count = sites.linear.shape[0]
    xs: Steps = dict(sites._asdict())
    for name, rank in (("transition", 2), ("noise", 2), ("offset", 1)):
        if getattr(system, name).ndim > rank:
            xs[name] = system.each(name, count)
    if system.emission.ndim == 3:
        xs["emission"] = system.emission
    segments = -(-count // length)
    last_repeated = lambda x: jnp.broadcast_to(x[-1:], (segments * length - count, *x.shape[1:]))
    no_site = {"linear": jnp.zeros_like, "quadratic": jnp.zeros_like, "scale": jnp.ones_like}
    padded = {n: jnp.concatenate([x, no_site.get(n, lambda x: x)(last_repeated(x))]) for n, x in xs.items()}
    return {n: x.reshape((segments, length, *x.shape[1:])) for n, x in padded.items()}


def _matrix_at(system: StateSpace, step: Steps, name: str) -> Array:
    """A matrix of the state space at this step, whether or not it changes with time."""
    array: Any = step[name] if name in step else getattr(system, name)
    return array[None] if name == "emission" and array.ndim == 1 else array


# One segment.


def filter_segment(system: StateSpace, xs: Steps) -> tuple[Element, Element, Innovation]:
    """Run the filter over one segment from a known initial state.

    Returns:
        The element of the whole segment, and the element and the innovation after each step's sites.
    """

    def step(carry: Element, x: Steps) -> tuple[Element, tuple[Element, Innovation]]:
        sites = (_matrix_at(system, x, "emission"), x["linear"], x["quadratic"], x["scale"])
        updated, innovation = _scan_over_outputs(_update, carry, sites)
        F = _matrix_at(system, x, "transition")
        mean = matvec(F, updated.b) + _matrix_at(system, x, "offset")
        cov = symmetric(matmul(matmul(F, updated.C), F.mT) + _matrix_at(system, x, "noise"))
        return Element(matmul(F, updated.A), mean, cov, updated.eta, updated.J), (updated, innovation)

    segment, (elements, innovations) = jax.lax.scan(step, empty_segment(system), xs)
    return segment, elements, innovations


def _update(carry: Element, x: tuple[Array, Array, Array, Array]) -> tuple[Element, Innovation]:
    """Condition on the site of one output."""
    (mean, cov), (h, a, b, c) = (carry.b, carry.C), x
    gain = matvec(cov, h)
    output_mean, output_variance = jnp.sum(h * mean), jnp.sum(h * gain)
    scale = c + b * output_variance
    # An exact observation (c = 0) of an output that is known already (s = 0) adds nothing.
    certain = scale == 0
    divisor = jnp.where(certain, 1.0, scale)
    residual = jnp.where(certain, 0.0, a - b * output_mean) / divisor
    weight = jnp.where(certain, 0.0, b) / divisor
    loading = matvec(carry.A.mT, h)
    updated = Element(
        carry.A - weight * outer(gain, loading),
        mean + gain * residual,
        cov - weight * outer(gain, gain),
        carry.eta + loading * residual,
        carry.J + weight * outer(loading, loading),
    )
    return updated, Innovation(output_mean, output_variance, residual, weight, gain, loading)


def _scan_over_outputs(
    once: Callable[..., Any], carry: Any, xs: tuple[Any, ...], reverse: bool = False
) -> tuple[Any, Any]:
    """Scan over the outputs of one step; the loop is unrolled if there are at most four."""
    count = jax.tree.leaves(xs)[0].shape[0]
    if count > 4:
        return jax.lax.scan(once, carry, xs, reverse=reverse)
    results = []
    for j in reversed(range(count)) if reverse else range(count):
        carry, out = once(carry, jax.tree.map(lambda x, j=j: x[j], xs))
        results.append(out)
    results = results[::-1] if reverse else results
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *results)


# Joining segments.


def empty_segment(system: StateSpace) -> Element:
    """The element of no steps: the state stays x, and nothing is observed."""
    eye, zeros = jnp.eye(system.size, dtype=system.mean.dtype), jnp.zeros_like(system.mean)
    zero_matrix = jnp.zeros_like(system.covariance)
    return Element(eye, zeros, zero_matrix, zeros, zero_matrix)


def join(first: Element, second: Element) -> Element:
    """The element of two segments, the second after the first; an associative operation."""
    between_cov, _ = posterior(first.C, second.J)  # of the state between them, given the second segment's sites
    residual = second.eta - matvec(second.J, first.b)
    eye = jnp.eye(first.A.shape[-1], dtype=first.A.dtype)
    through = matmul(eye - matmul(between_cov, second.J), first.A)
    return Element(
        matmul(second.A, through),
        matvec(second.A, first.b + matvec(between_cov, residual)) + second.b,
        symmetric(matmul(matmul(second.A, between_cov), second.A.mT) + second.C),
        first.eta + matvec(through.mT, residual),
        first.J + symmetric(matmul(first.A.mT, matmul(second.J, through))),
    )


def _scan_segments(directions: list[Element], empty: Element) -> list[Element]:
    """Join each segment with all before it.

    An associative scan by doubling, log₂ B turns of one loop. A second list of segments, in reverse order, is joined
    with those after it in time by the same loop, so that both directions are compiled once.
    """
    count = directions[0].b.shape[0]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *directions)

    def double(k: Array, stacked: Element) -> Element:
        shift = 2**k
        before_first = jnp.arange(count) < shift

        def shifted(x: Array, blank: Array) -> Array:
            return jnp.where(before_first.reshape((-1,) + (1,) * blank.ndim), blank, jnp.roll(x, shift, axis=1))

        neighbours = jax.tree.map(shifted, stacked, empty)
        # Forwards the neighbour comes first in time; in the reversed list it comes second.
        first = jax.tree.map(lambda m, x: jnp.concatenate([m[:1], x[1:]]), neighbours, stacked)
        second = jax.tree.map(lambda m, x: jnp.concatenate([x[:1], m[1:]]), neighbours, stacked)
        return join(first, second)

    joined = jax.lax.fori_loop(0, (count - 1).bit_length(), double, stacked)
    return [jax.tree.map(lambda x, i=i: x[i], joined) for i in range(len(directions))]


def _condition_start(start: Moments, eta: Array, J: Array) -> tuple[Array, Array, Array, Array]:
    """Condition an initial state N(m, P) on a likelihood exp(ηᵀx − ½xᵀJx).

    Returns:
        The posterior mean and covariance, log ∫ N(x | m, P) exp(ηᵀx − ½xᵀJx) dx, and log|I + PJ|.
    """
    mean, cov = start
    posterior_cov, log_det = posterior(cov, J)
    residual = eta - matvec(J, mean)
    posterior_mean = mean + matvec(posterior_cov, residual)
    # The integral is ηᵀm − ½mᵀJm + ½(η − Jm)ᵀK(η − Jm) − ½log|I + PJ|, with K the posterior covariance.
    value = 0.5 * jnp.sum((eta + residual) * mean + residual * (posterior_mean - mean), axis=-1)
    return posterior_mean, posterior_cov, value - 0.5 * log_det, log_det


# Normalisers.


def log_normalizer(chain: FilteredSegments) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Integrate the segments' likelihoods over their initial states.

    Returns:
        The sum of the integrals' logarithms; and log|I + Kκ| of all sites if c = 1, where K is the prior covariance of
        all outputs and κ the diagonal matrix of b.
    """
    *_, value, log_det = _condition_start(chain.starts, chain.segments.eta, chain.segments.J)
    return jnp.sum(value), jnp.sum(log_det) + jnp.sum(jnp.log(_scales(chain)))


def _scales(chain: FilteredSegments) -> Array:
    """c + bs of every site; NaN where it is not positive, which means that prior and sites are no distribution."""
    scales = chain.steps["scale"] + chain.steps["quadratic"] * chain.innovations.output_variance
    return jnp.where(scales > 0, scales, jnp.nan)


def log_partition(chain: FilteredSegments) -> Float[Array, ""]:
    """log E_p exp Σ(νf − ½κf²), of sites (ν, κ, 1)."""
    nu, kappa = chain.steps["linear"], chain.steps["quadratic"]
    f, s = chain.innovations.output_mean, chain.innovations.output_variance
    scales = _scales(chain)
    terms = (nu**2 * s + 2 * nu * f - kappa * f**2) / scales - jnp.log(scales)
    return 0.5 * jnp.sum(terms) + log_normalizer(chain)[0]


def log_likelihood(chain: FilteredSegments, filtered: FilteredStates) -> Float[Array, ""]:
    """log p(y) of observations (y, 1, R) and missing ones (0, 0, 1), the sum of each one's predictive density."""
    count = len(filtered.output_mean)
    a, b, c = (_concatenate_segments(chain.steps[name], count) for name in OutputSites._fields)
    scale, squared_error = c + b * filtered.output_variance, b * (a - filtered.output_mean) ** 2
    # An exact observation of a known output has density 1 if it agrees, and is impossible if it does not.
    certain = scale == 0
    divisor = scale + certain
    logs = jnp.where(b > 0, jnp.log(2 * jnp.pi * divisor), 0.0)
    impossible = jnp.where(certain & (squared_error > 0), jnp.inf, 0.0)
    return -0.5 * (jnp.sum((squared_error / divisor + logs) * ~certain) + jnp.sum(impossible))


# The filter.


def filter_states(chain: FilteredSegments, count: int) -> FilteredStates:
    """Each state given the sites up to its step: the elements, averaged over the segments' filtered initial states."""
    mean, cov, start_mean, start_variance = jax.vmap(_filter_start)(*chain.starts, chain.innovations)
    element = chain.elements
    states = element.b + matvec(element.A, mean), element.C + matmul(matmul(element.A, cov), element.A.mT)
    innovations = chain.innovations
    outputs = innovations.output_mean + start_mean, innovations.output_variance + start_variance
    return FilteredStates(*_concatenate_segments((*states, *outputs), count))


@jax.custom_jvp
def _filter_start(mean: Array, cov: Array, innovations: Innovation) -> tuple[Array, Array, Array, Array]:
    r"""Filter a segment's initial state, given the segment's outputs up to each step.

    The covariance is carried as a root, $Σ = SS^⊤$; an output $a^⊤x$ of weight w takes $S$ to $S(I − γφφ^⊤)$ with $φ =
    S^⊤a$, $γ = w/(s + √s)$ and $s = 1 + wφ^⊤φ$ (Potter, 1963), so that a vague initial state loses no digits.

    Returns:
        The initial state's mean and covariance after each step, and the mean and the variance of $a^⊤x$, which it adds
        to each output's prediction.
    """

    def once(carry: RootMoments, x: tuple[Any, ...]) -> tuple[RootMoments, tuple[Array, Array]]:
        (mean, S), (residual, weight, loading) = carry, x
        phi = matvec(S.mT, loading)
        output_mean, output_variance = jnp.sum(loading * mean), jnp.sum(phi * phi)
        scale = 1 + weight * output_variance
        gain = matvec(S, phi)
        updated_root = S - (weight / (scale + jnp.sqrt(scale))) * outer(gain, phi)
        updated_mean = mean + gain * ((residual - weight * output_mean) / scale)
        return (updated_mean, updated_root), (output_mean, output_variance)

    mean, S, *outputs = _scan_over_steps(once, (mean, root(cov).mT), innovations)
    return mean, matmul(S, S.mT), outputs[0], outputs[1]


def _filter_start_by_covariance(mean: Array, cov: Array, innovations: Innovation) -> tuple[Array, Array, Array, Array]:
    """`_filter_start` with the covariance itself, which is differentiable where it is singular; its root is not."""

    def once(carry: Moments, x: tuple[Any, ...]) -> tuple[Moments, tuple[Array, Array]]:
        (mean, cov), (residual, weight, loading) = carry, x
        gain = matvec(cov, loading)
        output_mean, output_variance = jnp.sum(loading * mean), jnp.sum(loading * gain)
        scale = 1 + weight * output_variance
        updated_mean = mean + gain * ((residual - weight * output_mean) / scale)
        return (updated_mean, cov - (weight / scale) * outer(gain, gain)), (output_mean, output_variance)

    return _scan_over_steps(once, (mean, cov), innovations)


def _scan_over_steps(
    once: Callable[..., Any], start: Moments | RootMoments, innovations: Innovation
) -> tuple[Array, Array, Array, Array]:
    """Scan over all outputs of all steps; return the carry after each step and what `once` gave for its outputs."""

    def step(carry: tuple[Array, Array], x: Innovation) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
        carry, outputs = _scan_over_outputs(once, carry, (x.scaled_residual, x.weight, x.loading))
        return carry, (*carry, *outputs)

    return jax.lax.scan(step, start, innovations)[1]


@_filter_start.defjvp
def _filter_start_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, ...]:
    return _filter_start(*primals), jax.jvp(_filter_start_by_covariance, primals, tangents)[1]


def predict_states(system: StateSpace, mean: Float[Array, "T D"], cov: Float[Array, "T D D"]) -> Moments:
    """The moments of the states one transition later, (T, …).

    Where transitions change with time there is none after the last step, and the last entry has no meaning.
    """
    F, Q, o = (system.each(name, mean.shape[0]) for name in ("transition", "noise", "offset"))
    return matvec(F, mean) + o, symmetric(matmul(matmul(F, cov), F.mT) + Q)


# The smoother.


def smooth_states(system: StateSpace, chain: FilteredSegments, count: int, with_pairs: bool = False) -> Smoothed:
    r"""Each state given all sites: backwards through each segment given its initial state, then averaged over that.

    With $\tilde r_t$, $\tilde N_t$ the information of the future about the filtered state (Durbin and Koopman, 2012),
    the state is $N(b_t + C_t\tilde r_t + B_tx, C_t − C_t\tilde N_tC_t)$ given the initial state x, with $B_t = (I −
    C_t\tilde N_t)A_t$.
    """
    segments, following, eye = chain.segments, chain.following, jnp.eye(system.size, dtype=system.mean.dtype)
    assert following is not None, "smoothing needs filter_segments(…, with_following=True)"
    # (r, N) of the state after each segment, given the initial state x = 0.
    end_cov, _ = posterior(segments.C, following.J)
    residual = following.eta - matvec(following.J, segments.b)
    N = symmetric(matmul(following.J, eye - matmul(end_cov, following.J)))
    r = residual - matvec(following.J, matvec(end_cov, residual))
    smooth = jax.vmap(lambda x, e, i, r, N: _smooth_segment(system, x, e, i, (r, N), with_pairs))
    mean, cov, start_weights, pair_terms = smooth(chain.steps, chain.elements, chain.innovations, r, N)
    # The initial state of each segment given all sites.
    eta = segments.eta + matvec(segments.A.mT, r)
    J = symmetric(segments.J + matmul(matmul(segments.A.mT, N), segments.A))
    start_mean, start_cov, *_ = _condition_start(chain.starts, eta, J)
    mean = mean + matvec(start_weights, start_mean[:, None])
    cross = matmul(start_weights, start_cov[:, None])
    cov = symmetric(cov + matmul(cross, start_weights.mT))
    mean, cov = _concatenate_segments((mean, cov), count)
    if not with_pairs:
        return Smoothed(mean, cov, None)
    pair_cov = pair_terms[0] + matmul(matmul(pair_terms[1], start_cov[:, None]), start_weights.mT)
    return Smoothed(mean, cov, _concatenate_segments(pair_cov, count)[: count - 1])


def _smooth_segment(
    system: StateSpace, xs: Steps, elements: Element, innovations: Innovation, end: Information, with_pairs: bool
) -> tuple[Any, ...]:
    """Run one segment backwards.

    Returns:
        The means and covariances of the states given the initial state x = 0, the matrices B_t by which the means
        depend on x, and, if `with_pairs`, Cov(x_{t+1}, x_t) given x with the matrices by which x_{t+1} depends on x.
    """
    eye = jnp.eye(system.size, dtype=system.mean.dtype)

    def once(carry: Information, x: tuple[Any, ...]) -> tuple[Information, None]:
        (r, N), (h, residual, weight, gain) = carry, x
        # r ← hu + (I − w h gᵀ)r,  N ← w hhᵀ + (I − w h gᵀ)N(I − w g hᵀ)
        N_gain = matvec(N, gain)
        r = r + h * (residual - weight * jnp.sum(gain * r))
        factor = weight * (1 + weight * jnp.sum(gain * N_gain))
        cross = weight * outer(h, N_gain)
        return (r, N - cross - cross.mT + factor * outer(h, h)), None

    def step(carry: Information, x: tuple[Any, ...]) -> tuple[Information, tuple[Any, ...]]:
        (r, N), (xs, element, innovation) = carry, x
        F = _matrix_at(system, xs, "transition")
        r_before, N_before = matvec(F.mT, r), matmul(F.mT, matmul(N, F))
        projection = eye - matmul(element.C, N_before)
        start_weight = matmul(projection, element.A)
        out = element.b + matvec(element.C, r_before), matmul(projection, element.C), start_weight, None
        if with_pairs:
            predicted_cov = matmul(matmul(F, element.C), F.mT) + _matrix_at(system, xs, "noise")
            after = eye - matmul(predicted_cov, N)
            out = (*out[:3], (matmul(after, matmul(F, element.C)), matmul(after, matmul(F, element.A))))
        sites = _matrix_at(system, xs, "emission"), innovation.scaled_residual, innovation.weight, innovation.gain
        carry, _ = _scan_over_outputs(once, (r_before, N_before), sites, reverse=True)
        return carry, out

    return jax.lax.scan(step, end, (xs, elements, innovations), reverse=True)[1]


def _concatenate_segments(tree: Any, count: int) -> Any:
    """(B, L, …) to (T, …), without the padding at the end."""
    return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:]))[:count], tree)
