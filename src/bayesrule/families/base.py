"""The contract of a family q(θ), and all that follows from an exponential family's log-partition function A(λ).

The rule measures derivatives of the loss and forms a `Step`; `Family.moved` takes it. A family is an immutable pytree,
so `jax.jit`, `vmap`, `scan` and `grad` work on its members. To add one, subclass `ExponentialFamily` (four methods and
a `ranks`; an example is in its docstring) or, for a q that is no exponential family, `Family`.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr
from jaxtyping import Array, Bool, Float

from ..numerics.coordinates import from_lower, to_vector
from ..numerics.legendre import legendre
from ..numerics.own_precision import OwnPrecision
from ..numerics.pytree import PyTree
from ..numerics.random import Key
from ..steps.needs import Need
from ..steps.step import Step

if TYPE_CHECKING:
    import typing_extensions

    from .gaussian.precision import Structure

    # With a default, `State` and `Points` without a parameter are `State[Any]` and `Points[Any]`, and not unknown.
    Q = typing_extensions.TypeVar("Q", bound="Family", default=Any)
    Served = typing_extensions.TypeVar("Served", contravariant=True, default=Any)
else:
    Q = TypeVar("Q", bound="Family")
    Served = TypeVar("Served", contravariant=True)
"""`Q` is a member of some family, in the signature of a function that returns a member of the same one.

`Served` is the kind of q that a piece of a rule is written for: `Quadrature` is `Points[GaussianFamily |
ConditionalFamily]`. A rule holds its pieces without this parameter: whether they go together is checked when it is
built (`needs`). A piece of your own may leave it out too: `class Mine(Points)`.
"""


class HasMean(Protocol):
    """A q with a mean in the shape of θ: most families, but not those of categories."""

    @property
    def mean(self) -> PyTree:
        """E_q θ."""
        ...


class _Measured(HasMean, Protocol):
    """What averaging measurements over points asks of q; the methods are those of `Family`."""

    def to_step_terms(self, gradient: PyTree, curvature: Any, theta: PyTree, factors: PyTree) -> tuple[PyTree, Any]:
        """See `Family.to_step_terms`."""
        ...

    def latent_correction(self, theta: PyTree) -> tuple[Array, PyTree, Any] | None:
        """See `Family.latent_correction`."""
        ...


class _ClassHasStructure(_Measured, Protocol):
    """All members have one structure: a `GaussianFamily`, a `ConditionalFamily`."""

    structure: ClassVar[Structure]


class _MemberHasStructure(_Measured, Protocol):
    """The structure depends on what the member is made of: a `SpikeSlab`, a `Product`."""

    @property
    def structure(self) -> Structure: ...


HasStructure: TypeAlias = _ClassHasStructure | _MemberHasStructure
"""A q whose step takes a curvature, measured in the form of its `structure`."""


class Family(eqx.Module, metaclass=OwnPrecision):
    """A distribution q(θ) that the rule can move.

    θ is any pytree. Fields are arrays, pytrees of arrays, or static; a member never changes, a step makes a new one. A
    subclass must give `sample`, `log_prob`, `entropy`, `inside`, `moved` and, for `fit` to follow the bound,
    `decrement`. The other methods have defaults that suit families without a latent variable.

    A member whose arrays are NumPy's in float64, as estimators hand them out, computes in float64 and returns NumPy
    arrays, also where JAX's 64-bit mode is off.

    >>> import bayesrule as blr, jax, jax.numpy as jnp
    >>> q = blr.DiagonalGaussian(jnp.zeros(2), jnp.ones(2))
    >>> isinstance(q, blr.Family), q.sample(jax.random.key(0), (3,)).shape, q.log_prob(jnp.zeros((4, 2))).shape
    (True, (3, 2), (4,))
    """

    label: ClassVar[str] = "Family"
    """The family's name in Table 1."""
    meaning: ClassVar[str] = "q(θ) = h(θ) exp[⟨λ, T(θ)⟩ − A(λ)]  (section 1.2)"
    """The density and λ, as a formula for the printed derivation."""
    update: ClassVar[str] = "λ ← (1 − ρτ)λ − ρ ∇_μ E_q[ℓ̄ + τ log h]  (eq:bayes_learn_rule)"
    """The rule in the family's own coordinates, as a formula for the printed derivation."""
    precision_formula: ClassVar[str] = ""
    """How its precision is formed from Adam's v, for the printed derivation; empty where it is what the steps say."""
    counts_examples: ClassVar[bool] = False
    """Whether `moved` asks how many examples a step's batch has (`Step.examples`)."""
    needs: ClassVar[tuple[Need, ...]] = ()
    """What it needs of the other pieces of a rule."""
    elementwise: ClassVar[bool] = False
    """Whether each entry of θ has its own parameters, so that a step treats the entries separately."""
    keeps_half_precision: ClassVar[bool] = False
    """Whether a mean in bfloat16 or float16 is kept so, with everything else in float32; else it is kept in float32."""
    separate_rates: ClassVar[bool] = False
    """Whether a step may have two rates, one for the mean and one for the precision."""
    symmetric: ClassVar[bool] = False
    """Whether q(mean + d) = q(mean − d), which antithetic samples need."""
    is_mixture: ClassVar[bool] = False
    """Whether q is a mixture, whose components each take a step of their own."""

    @classmethod
    def update_with(cls, part: type[Family]) -> str:
        """The printed update, for a family that is made of members of another one (`part`); by default its own."""
        return cls.update

    @classmethod
    def around(cls, params: PyTree, precision: Any, **choices: Any) -> Self:
        """Make the member that an algorithm starts from, given bare parameters.

        Called by `Start.start`, hence by `rule.init(params)`, if the user passes parameters and not a member. Families
        that have no natural member around a θ leave the default, which raises an error.

        Args:
            params: θ, a pytree of floating arrays, which becomes the mean (or λ, where θ is discrete).
            precision: the initial precision S₀, a number or a pytree like `params`.
            choices: further arguments of this family's constructor, from `Start`.
        """
        raise ValueError(
            f"Bare parameters do not determine which {cls.__name__} to start from: pass a member of the family."
        )

    @property
    def params(self) -> PyTree:
        """The bare parameters that `around` makes a member from: the mean, or λ where θ is discrete.

        They are what another program's optimizer calls the parameters, and keeps; `with_params` puts them back.
        """
        raise ValueError(f"A {type(self).__name__} is not made around bare parameters, so that it cannot give them.")

    def with_params(self, params: PyTree) -> Self:
        """The member with other bare parameters; with None, one without them, for those who keep them elsewhere."""
        return eqx.tree_at(lambda q: q.params, self, params, is_leaf=lambda x: x is None)

    def begun(self, objective: Any, temperature: Any) -> Self:
        """The member that a training starts from, with what is known of the training; by default the member itself.

        Called by `Start.start` for a start from bare parameters.

        Args:
            objective: the objective, or None.
            temperature: τ of the first step.
        """
        return self

    # The distribution.

    @abstractmethod
    def sample(self, key: Key, shape: tuple[int, ...] = ()) -> PyTree:
        """Draw values of θ.

        Called by Monte Carlo points, and by users. It must be differentiable in the parameters where the family says
        `reparameterized`.

        Args:
            key: consumed; must not be used again.
            shape: leading axes of independent draws.

        Returns:
            θ, each leaf with the axes `shape`, then the family's batch axes, then the leaf's own.
        """

    @abstractmethod
    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        """log q(θ), with all constants.

        Args:
            theta: any leading axes, then the batch axes, then the event's.

        Returns:
            One value for each leading and batch index.
        """

    @abstractmethod
    def entropy(self) -> Float[Array, "..."]:
        """H(q) = −E_q log q(θ), with all constants, one value for each batch element; part of every bound."""

    @abstractmethod
    def inside(self) -> Bool[Array, "..."]:
        """Whether the parameters lie in the open set Ω where q is a distribution, for each batch element.

        Called by guards on a member that `moved` made, which may have NaN in it; those are outside.
        """

    def proper(self) -> Bool[Array, "..."]:
        """Whether the precision alone is positive definite; the same as `inside` for families without one.

        Called by the `Retraction` guard, to report whether the plain step would have left Ω.
        """
        return self.inside()

    # Latent variables: q(θ) = ∫ q(θ | z) q(z) dz, where the rule moves the joint q(θ, z).

    def joint_entropy(self) -> Float[Array, "..."]:
        """H(q(θ, z)) = H(q(z)) + E_z H(q(θ | z)); the entropy where there is no latent variable z.

        Called for the bound, where it has a closed form and the entropy of θ alone has none: with the loss ℓ̄ − τ log
        q(z | θ) it gives the same bound.
        """
        return self.entropy()

    def factors(self) -> Any:
        """Factors of the parameters that a measurement at q and the next step from it both need; None without any.

        Called where a guard has measured the loss at q, inside a trace. `fit` hands them to the next step, which gives
        them back by `recall_factors`.
        """
        return None

    def recall_factors(self, factors: Any) -> None:
        """Take what `factors` of the same q has returned as known, in the current trace. The default does nothing."""

    def latent_correction(self, theta: PyTree) -> tuple[Array, PyTree, Any] | None:
        """The part of log q(θ) that `moved` does not take into account, and its derivatives in θ.

        log q(θ) = log q(θ | z) + log q(z) − log q(z | θ). The first term gives the decay in `moved`, and the second
        does not depend on θ. So a step on ℓ̄ + τ log q(θ) is a step on the loss ℓ̄ − τ log q(z | θ).

        Called at every point θ, before the average over points.

        Args:
            theta: one point.

        Returns:
            The value of −log q(z | θ), averaged over z, its gradient and its curvature, both in the step's terms; None
            where there is no latent variable.
        """
        return None

    @property
    def component_prototype(self) -> Family:
        """The family whose step it is: this one, or the first component of a mixture, which stands for all of them."""
        return self

    # The rule.

    @property
    def gaussian(self) -> Family:
        """The Gaussian that regularizers are differentiated for: one with the mean and covariance of q, the slab of a
        spike-and-slab, or q itself."""
        return self

    def to_step_terms(self, gradient: PyTree, curvature: Any, theta: PyTree, factors: PyTree) -> tuple[PyTree, Any]:
        """Convert the derivatives of the loss at one point into the terms of this family's step.

        Called at every point θ, before the average over points. For a Gaussian nothing is to be done: E_q∇ℓ̄ and
        E_q∇²ℓ̄ are the step's terms. A Student-t weights the curvature by E[w | θ], a skew-Gaussian adds E[u | θ]∇ℓ̄, a
        relaxed Bernoulli multiplies the gradient by ∂θ/∂μ.

        Args:
            gradient: ∇ℓ̄(θ), in the shape of θ.
            curvature: the curvature at θ in the family's structure, or None.
            theta: the point.
            factors: what the points know of θ's dependence on q: ∂θ/∂μ of a relaxed sample, the mask weights of
                dropout; None for other points.

        Returns:
            The gradient and the curvature, whose averages over the points the `Step` holds.
        """
        if factors is None:
            return gradient, curvature
        return jax.tree.map(jnp.multiply, gradient, factors), curvature

    def from_gaussian_terms(self, gradient: PyTree, curvature: Any) -> tuple[PyTree, Any]:
        """Convert a regularizer's derivatives, taken for `gaussian`, into the terms of this family's step.

        Called once a step: the regularizer is never sampled, so it does not pass through `to_step_terms`.

        Args:
            gradient: E∇R under `gaussian`, in the shape of θ; None if there is no regularizer.
            curvature: E∇²R in the family's structure, or None.
        """
        return gradient, curvature

    @abstractmethod
    def moved(self, step: Step) -> Self:
        """The member after one step of the rule; the only place where a family's parameters change.

        Called by the guards, perhaps several times in one step with shortened steps. It must not check whether the
        result lies in Ω: that is for `inside` and the guard.

        Args:
            step: the measured derivatives, the rates ρ and the temperature τ, and perhaps momentum. The docstring of
                `Step` has the update that is asked for.

        Returns:
            A member of the same structure, shapes and dtypes.
        """

    def decrement(self, step: Step) -> Float[Array, ""]:
        """The nats that the bound can still gain, to second order: ½⟨d, F d⟩ for the natural gradient d of the step.

        Called with the bound, before each step of a fit on all data or with a tolerance, which stops below it.

        Args:
            step: as `moved` takes it.
        """
        raise ValueError(
            f"A fit that follows the bound asks how much there is still to gain, and {type(self).__name__} does not "
            "say: define decrement(step), ½⟨d, F d⟩ for the natural gradient d of the step."
        )

    def distance(self, other: Any) -> Float[Array, ""]:
        """½⟨Δ, FΔ⟩ for the displacement Δ of λ from this member to another one nearby, in nats.

        Called after a step with momentum where `fit` has a tolerance, since its length does not follow from the
        decrement.

        Args:
            other: a member of the same family.
        """
        raise ValueError(
            f"A fit with momentum and a tolerance asks how far a step went, and {type(self).__name__} does not say: "
            "define distance(other), ½⟨Δ, FΔ⟩ for the displacement Δ of λ."
        )

    def precision_matrices(self) -> tuple[Float[Array, "... P P"], ...]:
        """The precisions, as dense matrices, that the step solves with; none by default.

        Called once at the end of a fit with a tolerance: their condition numbers say what rounding has cost.
        """
        return ()

    def cancellations(self) -> tuple[Float[Array, "..."], ...]:
        """How many times larger than its result are the numbers that a variance is the difference of; none by default.

        Called with `precision_matrices`: a variance that is the difference of numbers r times as large has the relative
        error r·eps.
        """
        return ()

    def gradient_like(self) -> PyTree:
        """A pytree with the shapes and dtypes of a step's gradient; called to start its running average at 0."""
        raise ValueError(
            f"The rule averages gradients, and {type(self).__name__} does not say what shape they have: define "
            "gradient_like()."
        )

    def trace(self, curvature: Any) -> Float[Array, ""]:
        """tr(S⁻¹H), summed over the batch; called for the second-order term ½ tr(HS⁻¹) of the delta method's bound.

        Args:
            curvature: H in the family's structure.
        """
        raise ValueError(
            f"The bound of the delta method has the term ½ tr(HS⁻¹), and a {type(self).__name__} has no precision S: "
            "use MonteCarlo() points."
        )

    def added(self, first: Any, second: Any) -> Any:
        """The sum of two curvatures, in the family's structure; None where its step takes no curvature.

        Called to add a regularizer's curvature, and the latent correction's, to the measured one.
        """
        return None

    def with_scaled_precision(self, factor: Any) -> Self:
        """The same q with its precision multiplied by a number.

        Called when the temperature follows a schedule: the posterior at temperature τ has the precision of the one at 1
        divided by τ, so q is rescaled before the step.
        """
        raise ValueError(
            f"A {type(self).__name__} has no precision to rescale when the temperature changes: give temperature= as "
            "one number, not as a schedule."
        )


class ExponentialFamily(Family):
    r"""A minimal exponential family, $q(θ) = h(θ) \exp[⟨λ, T(θ)⟩ − A(λ)]$.

    A new family gives `statistics` T, `log_partition` A, `log_base` log h (if not 0) and `sample`;
    everything else follows by differentiation and may be overridden for speed or stability.
    A family that stores λ needs nothing more: one field is λ, several are a tuple. One that stores
    other parameters also gives `natural` and `from_natural`.

    λ and μ are pytrees of one shape. `ranks` has a number for each leaf of λ, in order: how many of its last axes
    belong to one distribution (0 a scalar, 1 a vector, 2 a *symmetric* matrix). The axes before them are a batch of
    independent distributions, the same for all leaves::

        Gaussian.ranks = (1, 2), and λ = (Sm, −½S) of five Gaussians over R³:

            Sm    (5, 3)         −½S   (5, 3, 3)
                   │  └ rank 1          │  └──┴ rank 2, symmetric
                   └─── batch ──────────┘

    `log_partition`, `log_prob`, `entropy`, `kl` then have the shape (5,). Without `ranks` there is no batch: all axes
    of all leaves belong to one distribution.

    >>> import jax.numpy as jnp, jax
    >>> class Exponential(ExponentialFamily):
    ...     parameter: jax.Array                                    # λ = −rate
    ...     ranks = (0,)
    ...     def statistics(self, theta): return theta
    ...     def log_partition(self, natural): return -jnp.log(-natural)
    ...     def sample(self, key, shape=()):
    ...         return jax.random.exponential(key, shape + self.parameter.shape) / -self.parameter
    >>> q = Exponential(jnp.array(-4.0))
    >>> float(q.expectation()), round(float(q.entropy()), 4)
    (0.25, -0.3863)
    """

    label: ClassVar[str] = "Exponential family"
    ranks: ClassVar[tuple[int, ...] | None] = None
    """How many of the last axes of each leaf of λ belong to one distribution (see above)."""
    unbatchable: ClassVar[bool] = False
    """Whether the arrays cannot have batch axes, so that a model can have neither plates nor a member for each row."""
    prior_is_base_measure: ClassVar[bool] = False
    """Whether a prior is the base measure h, so that densities and the entropy are relative to it."""
    reparameterized: ClassVar[bool] = False
    """Whether `sample` is differentiable in the parameters (explicitly or implicitly)."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = [name for base in cls.__mro__[: cls.__mro__.index(ExponentialFamily)] for name in vars(base)]
        # The default would fill the fields with λ, and every step would lead to another member than it should.
        if "natural" in own and not {"from_natural", "with_natural"} & set(own):
            raise TypeError(
                f"{cls.__name__} has natural(), so that its fields are not λ, and no from_natural(natural), which "
                "makes a member from λ: give both, or store λ itself and leave out both."
            )

    # What an author gives.

    @abstractmethod
    def statistics(self, theta: PyTree) -> PyTree:
        """T(θ), the sufficient statistics.

        Args:
            theta: any leading axes, then the batch axes, then the event's.

        Returns:
            A pytree like λ, each leaf with θ's leading axes in front.
        """

    @abstractmethod
    def log_partition(self, natural: PyTree) -> Float[Array, "..."]:
        """A(λ) = log ∫ h(θ) exp⟨λ, T(θ)⟩ dθ, one value for each batch element.

        Everything else is derived from it: μ = ∇A, the Fisher information ∇²A, density, KL and entropy. So it must be
        differentiable twice, and give NaN or ∞ outside Ω, if `inside` is not overridden.

        Args:
            natural: λ, not necessarily this member's.
        """

    def log_base(self, theta: PyTree) -> Float[Array, "..."] | float:
        """log h(θ), the log of the base measure; 0 by default.

        A family whose h depends on θ also gives `expected_log_base`.
        """
        return 0.0

    # λ.

    def natural(self) -> PyTree:
        """λ; by default the field that is not static, or a tuple of them."""
        values = tuple(getattr(self, f.name) for f in dataclasses.fields(self) if not f.metadata.get("static"))
        return values[0] if len(values) == 1 else values

    @classmethod
    def from_natural(cls, natural: PyTree) -> Self:
        """The member with this λ, which need not lie in Ω; families that λ alone does not define raise an error."""
        names = [f.name for f in dataclasses.fields(cls) if not f.metadata.get("static")]
        return cls(**dict(zip(names, (natural,) if len(names) == 1 else natural, strict=True)))

    def with_natural(self, natural: PyTree) -> Self:
        """The member with this λ that shares everything else with this one (h, the shapes of θ)."""
        return self.from_natural(natural)

    def with_base_of(self, other: Any) -> Self:
        """The member with this λ and `other`'s base measure h (for example after a kernel's hyper-parameters changed).

        Called by empirical Bayes, to continue a fit from the λ that was found with earlier hyper-parameters. Families
        with a fixed h return themselves.
        """
        return self

    def inside(self, natural: PyTree | None = None) -> Bool[Array, "..."]:
        """Whether λ ∈ Ω, by default whether A(λ) is finite.

        Args:
            natural: λ; by default this member's own.
        """
        return jnp.isfinite(self.log_partition(self.natural() if natural is None else natural))

    # μ = ∇A(λ) and the Fisher information ∇²A(λ).

    def expectation(self) -> PyTree:
        """μ = E_q T(θ) = ∇A(λ)."""
        return self._gradient(self.natural())

    def with_expectation(self, expectation: PyTree) -> Self:
        """The member with this μ: λ = ∇A*(μ), by a convex solve that starts from this member's λ."""
        return self.with_natural(legendre(self, expectation))

    def shifted_in_mu(self, shift: PyTree) -> Self:
        """The member whose μ differs from this one's by `shift`, to first order in it: λ + F(λ)⁻¹δ.

        Called by factors of a model at δ = 0: differentiating an expected log factor in δ there gives its message,
        which is the gradient in μ.
        """
        return self.with_natural(
            jax.tree.map(jnp.add, self.natural(), self.to_natural_gradient(self._symmetric(shift)))
        )

    def mode(self) -> PyTree:
        """θ_* = argmax ⟨λ, T(θ)⟩, the value of an M-step, where λ is a sum of messages (∇A*_{yz} in the paper).

        Called where a block of a model is read at its mode: by `em` and `Peak`.
        """
        raise ValueError(
            f"{type(self).__name__} has no mode(), a closed form for the θ that maximizes ⟨λ, T(θ)⟩: give the "
            "parameter a conjugate or a Gaussian block, or, in a family of your own, override mode()."
        )

    def fisher(self) -> Float[Array, "... M M"]:
        """F(λ) = ∇²A(λ), in minimal coordinates (see `coordinates`)."""
        return self._fisher(self.coordinates(self.natural()))

    def to_natural_gradient(self, covector: PyTree) -> PyTree:
        """F(λ)⁻¹c: from a gradient with respect to λ to one with respect to μ (`eq:natgrad_def`)."""
        solution = jnp.linalg.solve(self.fisher(), self.coordinates(covector)[..., None])[..., 0]
        return self.uncoordinates(solution)

    def fisher_product(self, vector: PyTree) -> PyTree:
        """F(λ)v: the derivative of μ along v."""
        return self._symmetric(jax.jvp(self._gradient, (self.natural(),), (vector,))[1])

    def natural_gradient(self, expected: Callable[[Self], Any]) -> PyTree:
        """F(λ)⁻¹ ∇_λ of any scalar function of q, such as q ↦ E_q f: the gradient in μ."""
        gradient = jax.grad(lambda natural: jnp.sum(expected(self.with_natural(natural))))(self.natural())
        return self.to_natural_gradient(self._symmetric(gradient))

    def enumerated_gradient(self, values: Float[Array, " S"], theta: PyTree) -> PyTree:
        """∇_μ E_q f = F(λ)⁻¹ Cov_q(T, f) from the values of f at each θ of a small discrete support.

        Called by `Score` with `Enumeration` points.

        Args:
            values: f at each θ.
            theta: the support, along a leading axis.
        """
        weights = jnp.exp(self.log_prob(theta))
        advantage = weights * (values - jnp.sum(weights * values))
        covariance = jax.tree.map(lambda t: jnp.tensordot(advantage, t, axes=1), self.statistics(theta))
        return self.to_natural_gradient(covariance)

    # Density, entropy, divergence.

    def log_prob(self, theta: PyTree) -> Float[Array, "..."]:
        natural = self.natural()
        return self.log_base(theta) + self.inner(natural, self.statistics(theta)) - self.log_partition(natural)

    def entropy(self) -> Float[Array, "..."]:
        """H(q) = A(λ) − ⟨λ, μ⟩ − E_q log h."""
        natural = self.natural()
        return self.log_partition(natural) - self.inner(natural, self.expectation()) - self.expected_log_base()

    def kl(self, other: Any) -> Float[Array, "..."]:
        """KL(q ‖ other), the Bregman divergence of A from λ_q to λ_other."""
        if type(other) is not type(self):
            raise ValueError(
                f"kl needs two members of one family, got {type(self).__name__} and {type(other).__name__}."
            )
        mine, theirs = self.natural(), other.natural()
        difference = jax.tree.map(jnp.subtract, theirs, mine)
        bregman = self.log_partition(theirs) - self.log_partition(mine)
        return bregman - self.inner(difference, self.expectation())

    def cross_entropy(self, other: Any) -> Float[Array, "..."]:
        """−E_q log other(θ), for another member of the family."""
        return self.kl(other) + self.entropy()

    def expected_log_base(self) -> Float[Array, "..."] | float:
        """E_q log h(θ), which the entropy needs: log h itself where it is constant, else overridden."""
        if not self.constant_base():
            raise ValueError(
                f"{type(self).__name__} has no closed form for E_q log h(θ), so its entropy is not available: "
                "override expected_log_base."
            )
        return self.log_base(self._theta_like())

    def constant_base(self) -> bool:
        """Whether log h does not depend on θ, found by tracing `log_base`: the decay of λ is then λ itself."""
        closed = jax.make_jaxpr(self.log_base)(self._theta_like())
        _, used_inputs = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
        return not any(used_inputs)

    # The rule.

    def natural_step(self, step: Step) -> PyTree:
        """∇_μ E_q ℓ̄, a pytree like λ, from the derivatives that the step holds.

        Called by `direction`, and to average natural gradients over steps or sum them over factors. The inverse is
        `derivatives`. Most families take ∇_μ E_q ℓ̄ itself as the step's gradient; Gaussians take (g, H) and return (g
        − Hm, ½H).
        """
        return step.gradient

    def derivatives(self, natural_gradient: PyTree) -> tuple[PyTree, Any]:
        """The gradient and the curvature for a `Step` of this family, from ∇_μ E_q ℓ̄.

        Called where the natural gradient itself is known: from messages, sites, or the score function.

        Args:
            natural_gradient: ∇_μ E_q ℓ̄, a pytree like λ.

        Returns:
            `(step.gradient, step.curvature)`, the curvature None where `moved` takes none.
        """
        return natural_gradient, None

    def gradient_like(self) -> PyTree:
        """A pytree with the shapes and dtypes of a step's gradient; called to start its running average at 0."""
        return self.derivatives(self.natural())[0]

    def direction(self, step: Step) -> PyTree:
        """∇_μ[E_q ℓ̄ − τ H(q)] = ∇_μ E_q ℓ̄ + τ(λ + ∇_μ E_q log h)  (`app:natgrad_entropy`).

        Called by `moved` and `decrement`; the new λ is λ − ρ times it.
        """
        decay = self.natural()
        if not self.constant_base():
            base = self.natural_gradient(lambda q: q.expected_log_base())
            decay = jax.tree.map(jnp.add, decay, base)
        return jax.tree.map(lambda g, d: g + jnp.asarray(step.temperature, g.dtype) * d, self.natural_step(step), decay)

    def moved(self, step: Step) -> Self:
        """The rule in λ (`eq:bayes_learn_rule`), or in μ where the step is reversed."""
        parameters = self.expectation() if step.reverse else self.natural()
        direction = self.direction(step)
        if step.reverse:
            direction = self.fisher_product(direction)
        new = jax.tree.map(lambda x, d: x - jnp.asarray(step.rate, x.dtype) * d, parameters, direction)
        if step.momentum is not None:
            previous = step.previous.expectation() if step.reverse else step.previous.natural()
            momentum = lambda n, x, p: n + jnp.asarray(step.momentum, n.dtype) * (x - p)
            new = jax.tree.map(momentum, new, parameters, previous)
        return self.with_expectation(new) if step.reverse else self.with_natural(new)

    def decrement(self, step: Step) -> Float[Array, ""]:
        """½⟨d, F d⟩ for the natural gradient d = `direction(step)`, in nats.

        Called after each step where `fit` has a tolerance. To second order it is the gain in the bound that is still to
        come, where F is the bound's curvature.
        """
        direction = self.direction(step)
        return 0.5 * jnp.sum(self.inner(direction, self.fisher_product(direction)))

    def distance(self, other: Any) -> Float[Array, ""]:
        """½⟨λ' − λ, μ' − μ⟩, half the sum of the divergences in both directions."""
        natural = jax.tree.map(jnp.subtract, other.natural(), self.natural())
        expectation = jax.tree.map(jnp.subtract, other.expectation(), self.expectation())
        return jnp.abs(0.5 * jnp.sum(self.inner(natural, expectation)))

    # Coordinates in which accelerated steps extrapolate (`steps.acceleration`).

    def chart(self) -> PyTree:
        """Coordinates of this member in which the rule's steps can be extrapolated; λ by default.

        A family overrides it, and the three methods below with it, where other coordinates keep more digits or stay
        inside Ω more easily.
        """
        return self.natural()

    def at_chart(self, coordinates: PyTree) -> Self:
        """The member with these coordinates, the inverse of `chart`; it need not lie in Ω."""
        return self.with_natural(coordinates)

    def chart_velocity(self, step: Step) -> PyTree:
        """Minus the natural gradient of the step, in the coordinates of `chart`: where the rule goes, for ρ = 1."""
        return jax.tree.map(jnp.negative, self.direction(step))

    def chart_metric(self, vector: PyTree) -> PyTree:
        """The Fisher information in the coordinates of `chart`, times a displacement of them."""
        return self.fisher_product(vector)

    # Minimal coordinates: λ as one vector, with symmetric matrices on an orthonormal basis.

    def _leaf_ranks(self, leaves: list[Array]) -> tuple[int, ...]:
        if self.ranks is None:
            return tuple(leaf.ndim for leaf in leaves)
        if len(self.ranks) != len(leaves):
            raise ValueError(
                f"{type(self).__name__}.ranks = {self.ranks} has {len(self.ranks)} numbers, and λ has {len(leaves)} "
                "leaves: give one for each leaf, how many of its last axes belong to one distribution."
            )
        return self.ranks

    def _own_ranks(self) -> tuple[int, ...]:
        return self._leaf_ranks(jax.tree.leaves(self.natural()))

    def inner(self, natural: PyTree, statistics: PyTree) -> Float[Array, "..."]:
        """⟨λ, T⟩, over any leading axes."""
        pairs = zip(jax.tree.leaves(natural), jax.tree.leaves(statistics), self._own_ranks(), strict=True)
        return jnp.asarray(sum((jnp.sum(a * b, axis=tuple(range(-rank, 0))) for a, b, rank in pairs), start=0.0))

    def coordinates(self, natural: PyTree) -> Float[Array, "... M"]:
        """λ (or μ) as one minimal vector; the map is an isometry, so ⟨λ, μ⟩ is the dot product."""
        leaves = jax.tree.leaves(natural)
        return jnp.concatenate(
            [
                to_vector(leaf, rank, self.ranks is not None)
                for leaf, rank in zip(leaves, self._own_ranks(), strict=True)
            ],
            axis=-1,
        )

    def uncoordinates(self, vector: Float[Array, "... M"]) -> PyTree:
        """The inverse of `coordinates`."""
        leaves, treedef = jax.tree.flatten(jax.eval_shape(self.natural))
        parts, start = [], 0
        for leaf, rank in zip(leaves, self._own_ranks(), strict=True):
            shape = leaf.shape[leaf.ndim - rank :]
            symmetric = rank == 2 and self.ranks is not None
            size = shape[0] * (shape[0] + 1) // 2 if symmetric else math.prod(shape)
            part = vector[..., start : start + size]
            parts.append(from_lower(part, shape[0]) if symmetric else part.reshape(vector.shape[:-1] + shape))
            start += size
        return jax.tree.unflatten(treedef, parts)

    # Derivatives of A.

    def _theta_like(self) -> PyTree:
        """Some θ of the right structure, shapes and dtypes."""
        drawn = jax.eval_shape(lambda key: self.sample(key), jax.random.key(0))
        return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), drawn)

    def _symmetric(self, tree: PyTree) -> PyTree:
        """The tree with its symmetric leaves symmetrized: a gradient in a symmetric matrix comes out unsymmetric."""
        if self.ranks is None or 2 not in self.ranks:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        ranks = self._own_ranks()
        halves = [
            0.5 * (leaf + jnp.swapaxes(leaf, -1, -2)) if rank == 2 else leaf
            for leaf, rank in zip(leaves, ranks, strict=True)
        ]
        return jax.tree.unflatten(treedef, halves)

    def _gradient(self, natural: PyTree) -> PyTree:
        """∇A(λ), at any λ."""
        return self._symmetric(jax.grad(lambda x: jnp.sum(self.log_partition(x)))(natural))

    def _fisher(self, vector: Float[Array, "... M"]) -> Float[Array, "... M M"]:
        """∇²A in minimal coordinates, at any λ given in them."""

        def gradient(x: Array) -> Array:
            return self.coordinates(self._gradient(self.uncoordinates(x)))

        # Each direction is applied to all batch elements at once and gives one column of every element's Fisher.
        basis = jnp.eye(vector.shape[-1], dtype=vector.dtype)
        columns = jax.vmap(lambda e: jax.jvp(gradient, (vector,), (jnp.broadcast_to(e, vector.shape),))[1])
        return jnp.moveaxis(columns(basis), 0, -1)
