"""A rule as a PyTorch optimizer: the update is the library's own compiled one, on PyTorch's parameters.

    optimizer = Optimizer(model.parameters(), blr.ivon(0.1), size=N)
    for x, y in loader:
        optimizer.zero_grad()
        with optimizer.sampled():
            loss(model(x), y).backward()
        optimizer.step()

The parameters are q's mean and stay PyTorch's. What else the rule carries along is kept as JAX's arrays, so that a step
can overwrite them, and becomes a dict of tensors for each parameter when somebody asks for `optimizer.state`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

try:
    import torch
except ImportError as error:
    raise ImportError('bayesrule.interop.torch needs PyTorch: pip install "bayesrule[torch]".') from error

from ..objectives.external import External
from ..rule.rule import Rule
from ..rule.state import State
from ..steps.schedule import Scheduled
from .shared_parameters import (
    Settings,
    differentiates_at_params,
    draw,
    entries,
    move,
    own_rate,
    posterior,
    sample,
    shape_of_start,
    start,
    with_entries,
)
from .torch_memory import check_device, shape_of, to_jax, to_own_jax, to_own_torch, write

__all__ = ["Optimizer"]


class Cohort:
    """The parameters of a group that began together, and so have one state and one step count."""

    def __init__(self, group: int, number: int, params: list[torch.Tensor]):
        self.group, self.number, self.params = group, number, params
        self.state: State | None = None  # None while the optimizer's dicts of tensors hold it
        self.scratch: list[Any] = [None] * len(params)  # memory for draws and new parameters, and θ itself when drawn
        self.scratch_is_theta = False
        self.samples: list[Any] | None = None  # θ, where a step takes several
        self.gradients: list[list[torch.Tensor | None]] = []  # of the samples, where a step takes several
        self.saved: list[torch.Tensor] | None = None  # memory for the mean while the parameters hold θ

    def collect(self, turn: int) -> None:
        """Move the gradients aside, to what this sample has already."""
        for place, p in enumerate(self.params):
            gradient, p.grad = p.grad, None
            if gradient is not None:
                before = self.gradients[turn][place]
                self.gradients[turn][place] = gradient if before is None else before + gradient

    def gradient(self) -> list[torch.Tensor | None]:
        """The gradients of this step, with a leading axis for the samples where there are several."""
        if not self.gradients:
            return [p.grad for p in self.params]
        by_sample = zip(self.params, zip(*self.gradients, strict=True), strict=True)
        stack = lambda p, parts: torch.stack([torch.zeros_like(p) if g is None else g for g in parts])
        return [None if all(g is None for g in parts) else stack(p, parts) for p, parts in by_sample]

    def forget_draws(self) -> None:
        self.scratch_is_theta, self.samples, self.gradients = False, None, []


class Optimizer(torch.optim.Optimizer):
    r"""A rule as a `torch.optim.Optimizer`.

    Args:
        params: Parameters, or groups of them, as for every PyTorch optimizer. A group may have its own `lr`, `size`,
            `regularizer` and `batch_size`.
        rule: An algorithm whose step is formed from gradients of a batch's mean loss: `blr.sgd`, `rmsprop`, `adam`,
            `ivon`, `dropout`, `straight_through`, `bayesbinn`, and your own of this kind.
        size: N, the number of training examples: the losses are means over examples.
        regularizer: δ, the precision of the prior N(0, 1/δ) on every entry: N times what PyTorch calls weight decay.
        prior: A Gaussian as the prior instead, over the list of the parameters (another optimizer's `posterior`). It is
            not in `state_dict`.
        batch_size: M, over how many examples a gradient is averaged, with accumulation all of them. `ivon` with its
            defaults then starts from what the first batches measure, and takes rates in Adam's units.
        seed: Names the noise, a whole number below 2³². Processes that average their gradients need the same one.

    `group["lr"]` is the rate of the mean, for schedulers to change; nothing is compiled again. If the rule has a
    schedule of its own, `group["lr"]` shows the next rate, and to change it is an error.

    >>> import bayesrule as blr, torch
    >>> from bayesrule.interop.torch import Optimizer
    >>> weights = torch.nn.Parameter(torch.zeros(3))
    >>> optimizer = Optimizer([weights], blr.ivon(0.1, curvature=1.0), size=100, regularizer=1.0)
    >>> with optimizer.sampled():
    ...     torch.mean((weights - 1) ** 2).backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[weights])
    ['average', 'cohort', 'precision', 'step']
    """

    def __init__(
        self,
        params: Any,
        rule: Rule,
        *,
        size: float,
        regularizer: float | None = None,
        prior: Any = None,
        batch_size: float | None = None,
        seed: int = 0,
    ):
        if not isinstance(rule, Rule):
            raise ValueError(f"The second argument is a rule such as blr.ivon(0.1), got {rule!r}.")
        if rule.steps.rates.groups:
            raise ValueError(
                "This rule has rates for parts of the parameters by their paths, which PyTorch's lists of parameters "
                'do not have: give the rates as groups, [{"params": …, "lr": …}, …].'
            )
        if not (isinstance(seed, int) and 0 <= seed < 2**32):
            raise ValueError(f"seed= is a whole number from 0 to 2³² − 1, got {seed!r}.")
        self.rule = rule
        self.finite: bool = True
        self._prior, self._seed = prior, seed
        self._own_schedule = isinstance(rule.steps.rates.mean, Scheduled)
        self._one_rate = rule.steps.rates.single
        self._samples = 1
        self._at_params: bool | None = None
        self._cohorts: list[Cohort] = []
        self._shown_rates: dict[int, float] = {}
        self._inside = ""
        self._contexts = self._predictions = 0
        defaults = {"lr": own_rate(rule), "size": size, "regularizer": regularizer, "batch_size": batch_size}
        super().__init__(params, {**defaults, "seed": seed})

    # Groups.

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which begin at their first step; see `torch.optim.Optimizer`."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if self._prior is not None and len(self.param_groups) > 1:
                raise ValueError("prior= is a Gaussian over the parameters of one group: give an optimizer to each.")
            self._check(group)
        except Exception:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        """Raise what is wrong with a group, or with this rule for it."""
        params = group["params"]
        if not params:
            raise ValueError("The list of parameters is empty.")
        for p in params:
            if p.is_complex():
                raise ValueError("Parameters must be real: split complex ones by torch.view_as_real.")
            if not p.is_floating_point():
                raise ValueError(f"Parameters must be floating-point numbers, and one is of {p.dtype}.")
            if p.layout is not torch.strided:
                raise ValueError(f"Parameters must be dense, and one has the layout {p.layout}.")
            if hasattr(p, "device_mesh"):
                raise ValueError(
                    "These parameters are sharded over processes (DTensor, FSDP), and the rule needs them whole: use "
                    "DistributedDataParallel."
                )
            check_device(p.device)
        if len({p.device for p in params}) > 1:
            raise ValueError("The parameters of a group are on several devices: give each device a group.")
        External(group["size"], group["regularizer"], self._prior, group["batch_size"])
        with self._precision_of(params):
            like, settings = [shape_of(p) for p in params], self._settings(group, 0)
            state = shape_of_start(self.rule, like, settings)
            theta = draw.eval_shape(self.rule, state, like, settings, None)[0]
        self._at_params = differentiates_at_params(self.rule, state)
        self._samples = 1 if len(theta.shape) == params[0].ndim else theta.shape[0]

    def _settings(self, group: dict[str, Any], stream: int) -> Settings:
        """The numbers of a step: all as arguments of the compiled program, so that none of them compiles again."""
        number = lambda x: None if x is None or x == 0 else float(x)
        seed = group.get("seed", self._seed)
        return Settings(
            float(group["lr"]),
            float(group["size"]),
            number(group["regularizer"]),
            self._prior,
            number(group["batch_size"]),
            np.uint32(seed),
            np.uint32(stream),
        )

    def _settings_of(self, cohort: Cohort) -> Settings:
        return self._settings(self.param_groups[cohort.group], cohort.number)

    @staticmethod
    def _precision_of(params: Iterable[torch.Tensor]) -> Any:
        """JAX's double precision where a parameter has it, else as it is set."""
        wanted = any(p.dtype == torch.float64 for p in params) or bool(jax.config.read("jax_enable_x64"))
        return jax.enable_x64(wanted)

    # What is kept for each parameter.

    def _begin(self, is_new: Callable[[torch.Tensor], bool]) -> None:
        """Start the state of parameters that have none yet and are to have one."""
        self._restore_cohorts()
        begun = {p for cohort in self._cohorts for p in cohort.params}
        for place, group in enumerate(self.param_groups):
            params = [p for p in group["params"] if p not in begun and is_new(p)]
            if params:
                number = 1 + max((cohort.number for cohort in self._cohorts), default=-1)
                cohort = Cohort(place, number, params)
                with self._precision_of(params):
                    arrays = [to_jax(p) for p in params]
                    cohort.state = jax.block_until_ready(start(self.rule, arrays, self._settings(group, number)))
                self._cohorts.append(cohort)

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """For each parameter a dict of tensors: `precision`, `average` and what else the rule keeps, and the `step`.

        The step works on arrays of JAX's. Whoever asks for the state gets copies as tensors, and from then on these are
        the state: what is written to them counts, and the next step reads them.
        """
        for cohort in self._cohorts:
            if cohort.state is not None:
                with self._precision_of(cohort.params):
                    for name, value in entries(cohort.state, len(cohort.params)).items():
                        values = value if isinstance(value, list) else [value] * len(cohort.params)
                        for p, array in zip(cohort.params, values, strict=True):
                            self._tensors[p][name] = to_own_torch(array)
                    for p in cohort.params:
                        self._tensors[p]["cohort"] = torch.tensor(cohort.number)
                cohort.state = None
        return self._tensors

    @state.setter
    def state(self, tensors: defaultdict[torch.Tensor, Any]) -> None:
        self._tensors, self._cohorts = tensors, []

    def _restore_cohorts(self) -> None:
        """After another state was loaded: which parameters began together."""
        if self._cohorts or not self._tensors:
            return
        members: dict[tuple[int, int], list[torch.Tensor]] = {}
        for place, group in enumerate(self.param_groups):
            for p in group["params"]:
                if self._tensors.get(p):
                    members.setdefault((int(self._tensors[p].get("cohort", 0)), place), []).append(p)
        self._cohorts = [Cohort(place, number, params) for (number, place), params in sorted(members.items())]

    def _state_of(self, cohort: Cohort) -> State:
        """The cohort's state as JAX's arrays, read from the tensors if these are the state."""
        state = cohort.state
        if state is None:
            count = len(cohort.params)
            like = shape_of_start(self.rule, [shape_of(p) for p in cohort.params], self._settings_of(cohort))
            values: dict[str, Any] = {}
            for name, shape in entries(like, count).items():
                tensors = [self._tensors[p].get(name) for p in cohort.params]
                shapes = shape if isinstance(shape, list) else [shape] * count
                if any(t is None or tuple(t.shape) != s.shape for t, s in zip(tensors, shapes, strict=True)):
                    raise ValueError(
                        f"There is no {name!r} for {self.rule.name} in the state of these parameters: it was made by "
                        "another rule, or with another choice of regularizer= or batch_size=."
                    )
                shared = not isinstance(shape, list)
                values[name] = to_own_jax(tensors[0]) if shared else [to_own_jax(t) for t in tensors]
            state = cohort.state = jax.block_until_ready(with_entries(like, count, values))
            for p in cohort.params:
                self._tensors.pop(p, None)
        return state

    def __getstate__(self) -> dict[str, Any]:
        own = ("rule", "_prior", "_seed", "_own_schedule", "_one_rate", "_samples", "_at_params", "_predictions")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        # `state` is a property here, with a setter.
        self.state = state.pop("state")  # pyright: ignore[reportIncompatibleVariableOverride]
        self._shown_rates, self._inside, self._contexts, self.finite = {}, "", 0, True
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned, bit for bit; see `torch.optim.Optimizer`."""
        seen: dict[str, Any] = {}
        handle = self.register_load_state_dict_pre_hook(lambda _, given: seen.update(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # PyTorch has cast all numbers to the parameters' dtype, which for half precision would lose digits.
        numbers = [n for group in seen["param_groups"] for n in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in zip(numbers, params, strict=True):
            for name, value in seen["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor):
                    self._tensors[p][name] = value.detach().to(p.device, copy=True)

    # Draws.

    @contextmanager
    def sampled(self) -> Generator[None]:
        """Inside, the parameters are θ, where the rule wants the loss differentiated: a draw of q, or the mean itself.

        Gradients of micro-batches add up in `.grad`, inside one context or over several: until `step` all contexts have
        the same θ. With `samples=S` the contexts take S draws in turn, whose gradients are kept apart, because the
        curvature is formed from each of them: every context leaves `.grad` empty, and `step` takes S contexts or a
        multiple of S. Clip such gradients inside.
        """
        self._enter("sampled()")
        try:
            if self._draws_nothing():
                yield
                return
            self._begin(lambda p: p.requires_grad)
            turn, several = self._contexts % self._samples, self._samples > 1
            for cohort in self._cohorts:
                if turn == 0:
                    self._draw(cohort)
            theta = lambda cohort: [t[turn] for t in cohort.samples] if several else cohort.scratch
            drawn = jax.block_until_ready({id(cohort): theta(cohort) for cohort in self._cohorts})
            with self._holding(drawn, lambda p: p.requires_grad):
                yield
            if several:
                for cohort in self._cohorts:
                    cohort.collect(turn)
            self._contexts += 1
        finally:
            self._inside = ""

    @contextmanager
    def draw(self, seed: int | None = None) -> Generator[None]:
        """Inside, the parameters are a draw of the posterior, for predictions.

        Args:
            seed: Names the draw; by default every call has a new one, in an order that training does not change.
        """
        self._enter("draw()")
        try:
            self._begin(lambda p: p.requires_grad)
            index = self._predictions if seed is None else seed
            self._predictions += seed is None
            drawn = {}
            for cohort in self._cohorts:
                with self._precision_of(cohort.params):
                    state, params = self._state_of(cohort), [to_jax(p) for p in cohort.params]
                    scratch = (
                        None if cohort.scratch_is_theta or any(a is None for a in cohort.scratch) else cohort.scratch
                    )
                    theta = sample(state, params, self._settings_of(cohort), np.uint32(index), scratch)
                    drawn[id(cohort)] = jax.block_until_ready(theta)
                if not cohort.scratch_is_theta:
                    cohort.scratch = theta
            with self._holding(drawn, lambda p: True):
                yield
        finally:
            self._inside = ""

    @property
    def posterior(self) -> Any:
        """q, whose mean is the list of the parameters: a copy, as arrays of JAX's.

        One for all parameters; where there are several groups, or parameters began later than others, a tuple of them
        in the order in which they began.
        """
        self._outside("posterior")
        self._begin(lambda p: p.requires_grad)
        members = []
        for cohort in self._cohorts:
            with self._precision_of(cohort.params):
                q = posterior(self._state_of(cohort), [to_jax(p) for p in cohort.params])
                members.append(jax.tree.map(lambda x: jax.numpy.array(x, copy=True), jax.block_until_ready(q)))
        return members[0] if len(members) == 1 else tuple(members)

    def _draws_nothing(self) -> bool:
        return bool(self._at_params)

    def _draw(self, cohort: Cohort) -> None:
        """Make the θ of this step: always the same one, until a step or the user moves the parameters."""
        with self._precision_of(cohort.params):
            state, params = self._state_of(cohort), [to_jax(p) for p in cohort.params]
            ready = self._samples == 1 and all(a is not None for a in cohort.scratch)
            theta = draw(self.rule, state, params, self._settings_of(cohort), cohort.scratch if ready else None)
            jax.block_until_ready(theta)
        if self._samples == 1:
            cohort.scratch, cohort.scratch_is_theta = theta, True
        else:
            cohort.samples = theta
            cohort.gradients = cohort.gradients or [[None] * len(cohort.params) for _ in range(self._samples)]

    @contextmanager
    def _holding(self, theta: dict[int, list[Any]], wanted: Callable[[torch.Tensor], bool]) -> Generator[None]:
        """The parameters hold θ inside, and the mean again afterwards, whatever happens."""
        with torch.no_grad():
            changed = []
            for cohort in self._cohorts:
                if cohort.saved is None:
                    cohort.saved = [torch.empty_like(p) for p in cohort.params]
                parts = zip(cohort.params, cohort.saved, theta[id(cohort)], strict=True)
                changed += [part for part in parts if wanted(part[0])]
            for p, saved, value in changed:
                saved.copy_(p)
                write([p], [value])
        try:
            yield
        finally:
            with torch.no_grad():
                for p, saved, _ in changed:
                    p.copy_(saved)

    def _enter(self, name: str) -> None:
        self._outside(name)
        self._inside = name

    def _outside(self, name: str) -> None:
        if self._inside:
            raise RuntimeError(
                f"{name} inside of `with optimizer.{self._inside}`, where the parameters are a draw and not the mean: "
                "leave that context first."
            )

    # The step.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; outside of `sampled()` also those of earlier samples of this step."""
        super().zero_grad(set_to_none)
        if not self._inside:
            self._contexts = 0
            for cohort in self._cohorts:
                for gradients in cohort.gradients:
                    gradients[:] = [None] * len(gradients)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update by the gradients of the parameters; those without one stay as they are.

        If a gradient is not finite, its group takes no step, and `optimizer.finite` is False until the next one.

        Args:
            closure: Clears the gradients, evaluates the loss, differentiates it and returns it. It is called inside of
                `sampled()`, once for each sample.

        Returns:
            The closure's loss, averaged over samples.
        """
        self._outside("step()")
        loss = None
        if closure is not None:
            losses = []
            for _ in range(self._samples):
                with torch.enable_grad(), self.sampled():
                    losses.append(closure())
            loss = losses[0] if len(losses) == 1 else sum(losses) / len(losses)
        if self._draws_nothing():
            self._begin(lambda p: p.grad is not None)
        else:
            self._check_contexts()
        finite = [self._move(cohort) for cohort in self._cohorts]
        self.finite = all(finite)
        self._contexts = 0
        for cohort in self._cohorts:
            cohort.forget_draws()
        return loss

    def _check_contexts(self) -> None:
        """Raise where the gradients cannot have been taken at the θ that the rule wants."""
        if self._contexts % self._samples:
            raise RuntimeError(
                f"{self.rule.name} takes {self._samples} samples in a step, and `with optimizer.sampled()` was entered "
                f"{self._contexts} times: enter it once for each sample."
            )
        if self._contexts == 0 and any(p.grad is not None for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                f"{self.rule.name} differentiates the loss at draws of q, and these gradients were taken elsewhere: "
                "evaluate and differentiate the loss inside of `with optimizer.sampled():`, or give step() a closure "
                "that does both."
            )

    def _move(self, cohort: Cohort) -> bool:
        """Take a step with the parameters that have gradients; whether these were finite."""
        gradient = cohort.gradient()
        is_moved = [g is not None for g in gradient]
        if not any(is_moved):
            return True
        if any(g is not None and g.layout is not torch.strided for g in gradient):
            raise ValueError(
                "A gradient is sparse, and the rule moves every entry in every step: use Embedding(…, sparse=False)."
            )
        group = self.param_groups[cohort.group]
        self._check_rate(cohort.group, group)
        with self._precision_of(cohort.params):
            state, params = self._state_of(cohort), [to_jax(p) for p in cohort.params]
            moved = move(
                self.rule,
                state,
                params,
                [None if g is None else to_jax(g) for g in gradient],
                cohort.samples,
                self._settings_of(cohort),
                [self._memory(cohort, place) if there else None for place, there in enumerate(is_moved)],
                self._one_rate,
                cohort.scratch_is_theta,
            )
            jax.block_until_ready(moved)
        cohort.state = moved.state
        for place, new in enumerate(moved.params):
            if new is not None:
                write([cohort.params[place]], [new])
                cohort.scratch[place] = new
        if self._own_schedule:
            group["lr"] = self._shown_rates[cohort.group] = float(moved.next_rate)
        return bool(moved.finite)

    @staticmethod
    def _memory(cohort: Cohort, place: int) -> Any:
        """Memory for a new parameter: that of θ, of the parameter before, or new."""
        array = cohort.scratch[place]
        return to_own_jax(cohort.params[place]) if array is None else array

    def _check_rate(self, place: int, group: dict[str, Any]) -> None:
        if self._own_schedule and group["lr"] != self._shown_rates.get(place, group["lr"]):
            raise ValueError(
                f"{self.rule.name} has a schedule of its own, and group['lr'] was set to {group['lr']} by something "
                "else: give the rule a number as its rate to use PyTorch's schedulers, or leave group['lr'] alone."
            )
