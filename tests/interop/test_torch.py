"""The PyTorch optimizer: the rule's own numbers, PyTorch's conventions, and errors that say what to do."""

import ast
import copy
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bayesrule as blr
from bayesrule.points.base import Points, PointSet

torch = pytest.importorskip("torch")

from bayesrule.interop import shared_parameters  # noqa: E402  (skipped above where PyTorch is missing)
from bayesrule.interop.torch import Optimizer  # noqa: E402  (skipped above where PyTorch is missing)

RECORDED = np.load(Path(__file__).parents[1] / "reference" / "data" / "ivon_opt.npz")
SIZE = 40


def made(dtype=torch.float32, seed=0):
    """Two parameters, as every test uses them, so that few programs are compiled."""
    rng = np.random.default_rng(seed)
    return [torch.nn.Parameter(torch.tensor(rng.normal(size=shape)).to(dtype)) for shape in ((3, 2), (2,))]


def loss(params, x):
    w, b = params
    return torch.mean(torch.tanh(x.to(w.dtype) @ w + b) ** 2) + torch.mean(torch.cos(w))


def batches(count, seed=1):
    return torch.tensor(np.random.default_rng(seed).normal(size=(count, 8, 3)))


def samples_of(rule):
    return getattr(rule.points, "samples", 1)


def train(optimizer, params, data):
    for x in data:
        optimizer.zero_grad()
        for _ in range(samples_of(optimizer.rule)):
            with optimizer.sampled():
                loss(params, x).backward()
        optimizer.step()


def values(params):
    return [p.detach().clone() for p in params]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# The numbers.

RULES = {
    "sgd": (blr.sgd(0.05), {}),
    "sgd with momentum": (blr.sgd(0.05, momentum=0.9), {}),
    "the heavy ball": (blr.sgd(0.05, momentum=0.9, heavy_ball=True), {}),
    "adam": (blr.adam(0.01), {"regularizer": 2.0}),
    "ivon": (blr.ivon(0.05, curvature=1.0, decay=0.99), {"regularizer": 2.0}),
    "ivon of two samples": (blr.ivon(0.05, curvature=1.0, decay=0.99, samples=2), {"regularizer": 2.0}),
    "ivon, measured": (blr.ivon(1e-3), {"regularizer": 2.0, "batch_size": 8}),
    "vadam": (blr.vadam(0.01), {"batch_size": 8}),
    "straight through": (blr.straight_through(0.05), {}),
}


@pytest.mark.parametrize("name", RULES)
def test_same_gradients_give_the_same_numbers_as_the_rule_itself(name):
    rule, settings = RULES[name]
    params = made()
    optimizer = Optimizer(params, rule, size=SIZE, **settings)
    state = rule.init([jnp.array(p.detach().numpy()) for p in params], size=SIZE, **settings)
    update = jax.jit(
        lambda state, gradient, theta: rule.update(
            state, gradient, jax.random.key(0), theta=theta, size=SIZE, **settings
        )[0]
    )
    count = samples_of(rule)
    for x in batches(100):
        optimizer.zero_grad()
        thetas, gradients = [], []
        for _ in range(count):
            with optimizer.sampled():
                loss(params, x).backward()
                thetas.append([p.detach().numpy().copy() for p in params])
                gradients.append([p.grad.numpy().copy() for p in params])
        optimizer.step()
        stacked = [[np.stack(leaves) for leaves in zip(*each, strict=True)] for each in (thetas, gradients)]
        theta, gradient = stacked if count > 1 else (thetas[0], gradients[0])
        state = update(state, gradient, theta)
    for p, expected in zip(params, state.q.params, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-6, atol=1e-6)
    assert int(optimizer.state[params[0]]["step"]) == 100
    if isinstance(state.q, blr.DiagonalGaussian):
        np.testing.assert_allclose(optimizer.state[params[0]]["precision"], state.q.precision[0], rtol=1e-5)
    if isinstance(state.q, blr.SecondMomentGaussian):
        np.testing.assert_allclose(optimizer.posterior.precision[0], state.q.precision[0], rtol=1e-5)


PEERS = {
    "adam": (blr.adam(0.05), lambda params: torch.optim.Adam(params, lr=0.05)),
    "adamw": (blr.adamw(0.05, weight_decay=0.1), lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)),
    "sgd": (
        blr.sgd(0.05, momentum=0.9, nesterov=True),
        lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_pytorch_s_own_optimizers_under_a_scheduler_and_with_groups(name):
    ours, theirs = made(torch.float64), made(torch.float64)
    rule, peer = PEERS[name]
    groups = lambda params: [{"params": params[:1], "lr": 0.02}, {"params": params[1:]}]
    optimizers = [Optimizer(groups(ours), rule, size=SIZE), peer(groups(theirs))]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=5, gamma=0.5) for o in optimizers]
    for step, x in enumerate(batches(20)):
        for params, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            loss(params, x).backward()
            optimizer.step()
            scheduler.step()
        if step == 2:
            compiled = shared_parameters.move.count()
    assert shared_parameters.move.count() == compiled, "a new rate compiled a new program"
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), rtol=1e-10, atol=1e-12)


class RecordedPoints(Points):
    """The points that ivon-opt drew."""

    deviations: jax.Array
    random: ClassVar[bool] = True

    def at(self, q, key):
        count = self.deviations.shape[0]
        return PointSet([q.mean[0] + self.deviations], jnp.full(count, 1 / count))


IVON = {
    "plain": (50, 0.02, blr.ivon(0.1, averaging=0.9, decay=0.99, curvature=0.7)),
    "cold": (100, 0.1, blr.ivon(0.05, averaging=0.8, decay=0.9, curvature=1.5, temperature=0.25)),
    "two samples": (50, 0.02, blr.ivon(0.1, averaging=0.9, decay=0.95, curvature=0.7, samples=2)),
}


@pytest.mark.parametrize("name", IVON)
def test_ivon_opt_s_trajectory_given_its_noise(name):
    size, weight_decay, rule = IVON[name]
    deviations = jnp.asarray(RECORDED[f"{name}/deviations"])
    scale = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1, 0.7], dtype=torch.float64)
    theta = torch.nn.Parameter(torch.tensor([0.3, -0.4, 1.2, 0.0, -1.0, 2.0], dtype=torch.float64))
    at = lambda step: rule.replace(points=RecordedPoints(deviations[step]), name="ivon")
    optimizer = Optimizer([theta], at(0), size=size, regularizer=size * weight_decay)
    for step in range(100):
        optimizer.rule = at(step)
        for _ in range(deviations.shape[1]):
            with optimizer.sampled():
                optimizer.zero_grad()
                value = torch.sum(scale * torch.cosh(theta - 0.5)) + 0.3 * torch.sin(theta[0] * theta[1])
                (value - 0.2 * theta[4] ** 2).backward()
        optimizer.step()
        np.testing.assert_allclose(theta.detach(), RECORDED[f"{name}/means"][step], rtol=1e-10, atol=1e-10)
    temperature = rule.steps.temperature
    hessian = temperature * optimizer.state[theta]["precision"] / size - weight_decay
    np.testing.assert_allclose(hessian, RECORDED[f"{name}/hessian"], rtol=1e-9)


def test_draws_have_the_posterior_s_mean_and_variance_and_leave_training_alone():
    params, others = made(), made()
    rule = blr.ivon(0.05, curvature=1.0)
    optimizer, other = (Optimizer(p, rule, size=SIZE, regularizer=2.0) for p in (params, others))
    train(optimizer, params, batches(3))
    train(other, others, batches(3))
    mean, count = params[0].detach().clone(), 400
    draws = []
    for _ in range(count):
        with optimizer.draw():
            draws.append(params[0].detach().clone())
    assert torch.equal(params[0], mean)
    draws, deviation = torch.stack(draws), optimizer.state[params[0]]["precision"] ** -0.5
    assert torch.all((draws.mean(0) - mean).abs() < 5 * deviation / count**0.5)
    assert torch.all((draws.var(0) / deviation**2 - 1).abs() < 5 * (2 / count) ** 0.5)
    with optimizer.draw(seed=7):
        named = params[0].detach().clone()
    with optimizer.draw(seed=7):
        assert torch.equal(params[0], named)
    assert isinstance(optimizer.posterior, blr.DiagonalGaussian)
    np.testing.assert_array_equal(optimizer.posterior.mean[0], mean)
    train(optimizer, params, batches(3, seed=2))
    train(other, others, batches(3, seed=2))
    assert same(params, others)


# Going on.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("samples", [1, 2])
def test_a_resumed_run_is_the_uncut_one_bit_for_bit(dtype, samples):
    rule = blr.ivon(0.05, curvature=1.0, decay=0.99, samples=samples)
    make = lambda params: Optimizer(params, rule, size=SIZE, regularizer=2.0)
    scheduled = lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    whole, data = made(dtype), batches(6)
    optimizer = make(whole)
    scheduler = scheduled(optimizer)
    for x in data:
        train(optimizer, whole, x[None])
        scheduler.step()
    cut = made(dtype)
    first = make(cut)
    scheduler = scheduled(first)
    for x in data[:3]:
        train(first, cut, x[None])
        first.state_dict()  # to look at the state must not change anything
        scheduler.step()
    file = io.BytesIO()
    torch.save([values(cut), first.state_dict(), scheduler.state_dict()], file)
    file.seek(0)
    saved, state, schedule = torch.load(file, weights_only=True)
    resumed = [torch.nn.Parameter(p) for p in saved]
    second = make(resumed)
    scheduler = scheduled(second)
    second.load_state_dict(state)
    scheduler.load_state_dict(schedule)
    for x in data[3:]:
        train(second, resumed, x[None])
        scheduler.step()
    assert same(whole, resumed)
    for p, q in zip(whole, resumed, strict=True):
        assert same(optimizer.state[p].values(), second.state[q].values())
        assert optimizer.state[p]["precision"].dtype == torch.promote_types(dtype, torch.float32)


KILLED = """
import os, signal, sys
sys.path[:0] = [{tests!r}]
from test_torch import *
params = made()
optimizer = Optimizer(params, blr.ivon(0.05, curvature=1.0), size=SIZE, regularizer=2.0)
for step, x in enumerate(batches(6)):
    optimizer.zero_grad()
    with optimizer.sampled():
        loss(params, x).backward()
        if step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    torch.save([step, values(params), optimizer.state_dict()], {file!r})
"""


@pytest.mark.extended
@pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")
def test_a_process_killed_in_a_step_goes_on_from_its_last_file(tmp_path):
    file = tmp_path / "checkpoint.pt"
    code = KILLED.format(tests=str(Path(__file__).parent), file=str(file))
    settings = os.environ | {"JAX_ENABLE_X64": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    rule = blr.ivon(0.05, curvature=1.0)
    whole = made()
    train(Optimizer(whole, rule, size=SIZE, regularizer=2.0), whole, batches(6))
    step, saved, state = torch.load(file, weights_only=True)
    resumed = [torch.nn.Parameter(p) for p in saved]
    optimizer = Optimizer(resumed, rule, size=SIZE, regularizer=2.0)
    optimizer.load_state_dict(state)
    train(optimizer, resumed, batches(6)[step + 1 :])
    assert step == 3
    assert same(whole, resumed)


def test_the_state_is_what_was_written_to_it_and_copies_go_on_alike():
    params = made()
    optimizer = Optimizer(params, blr.adam(0.01), size=SIZE)
    train(optimizer, params, batches(2))
    twins, twin = copy.deepcopy((params, optimizer))
    train(optimizer, params, batches(2, seed=2))
    train(twin, twins, batches(2, seed=2))
    assert same(params, twins)
    for p in params:
        optimizer.state[p]["average"].zero_()
    before = values(params)
    train(optimizer, params, batches(1, seed=3))
    train(twin, twins, batches(1, seed=3))
    assert not same(params, twins)
    assert not same(params, before)
    others = made()
    other = Optimizer(others, blr.sgd(0.1, momentum=0.9), size=SIZE)
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="made by another rule"):
        train(other, others, batches(1))


# PyTorch's conventions.


def test_a_rule_s_own_schedule_is_shown_and_not_overruled():
    params, others = made(), made()
    rule = blr.adam(lambda count: 0.1 / (count + 1))
    optimizer, other = Optimizer(params, rule, size=SIZE), Optimizer(others, blr.adam(0.1), size=SIZE)
    shown = [optimizer.param_groups[0]["lr"]]
    for x in batches(3):
        train(optimizer, params, x[None])
        other.param_groups[0]["lr"] = shown[-1]
        train(other, others, x[None])
        shown.append(optimizer.param_groups[0]["lr"])
    np.testing.assert_allclose(shown, [0.1, 0.05, 0.1 / 3, 0.025], rtol=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(params, others, strict=True))
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(ValueError, match="has a schedule of its own"):
        train(optimizer, params, batches(1))


def test_grad_scaler_unscales_and_leaves_out_steps_that_overflow():
    params, others = made(), made()
    optimizers = [Optimizer(p, blr.ivon(0.05, curvature=1.0), size=SIZE) for p in (params, others)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x in batches(3):
        with optimizers[0].sampled():
            scaler.scale(loss(params, x)).backward()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
    train(optimizers[1], others, batches(3))
    assert same(params, others)
    before = values(params)
    with optimizers[0].sampled():
        (scaler.scale(loss(params, batches(1)[0])) * torch.inf).backward()
    scaler.step(optimizers[0])
    scaler.update()
    assert same(params, before)
    assert scaler.get_scale() == 512.0


def test_gradients_of_micro_batches_add_up_in_one_context_or_in_several():
    x = batches(1)[0]
    results = []
    for way in ("whole", "inside", "contexts", "samples in turn"):
        params = made(torch.float64)
        samples = 2 if way == "samples in turn" else 1
        rule = blr.ivon(0.05, curvature=1.0, samples=samples)
        optimizer = Optimizer(params, rule, size=SIZE)
        parts = [x] if way == "whole" else [x[:4], x[4:]]
        share = lambda part, params=params: loss(params, part) * len(part) / len(x)
        if way == "inside":
            with optimizer.sampled():
                for part in parts:
                    share(part).backward()
        else:
            for part in parts:
                for _ in range(samples):
                    with optimizer.sampled():
                        share(part).backward()
        optimizer.step()
        results.append(values(params))
    for other in results[1:3]:
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(results[0], other, strict=True))
    whole = made(torch.float64)
    train(Optimizer(whole, blr.ivon(0.05, curvature=1.0, samples=2), size=SIZE), whole, x[None])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(whole, results[3], strict=True))


def test_parameters_without_gradients_stay_and_later_ones_begin_anew():
    ours, theirs = made(torch.float64), made(torch.float64)
    optimizers = Optimizer(ours, blr.adam(0.05), size=SIZE), torch.optim.Adam(theirs, lr=0.05)
    for step, x in enumerate(batches(9)):
        for params, optimizer in zip((ours, theirs), optimizers, strict=True):
            params[0].requires_grad_(step >= 3)  # frozen at first, as in fine-tuning
            optimizer.zero_grad()
            loss(params, x).backward()
            optimizer.step()
        if step == 2:
            assert optimizers[0].state[ours[0]] == {}
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), rtol=1e-10)
    before, known = ours[1].detach().clone(), copy.deepcopy(dict(optimizers[0].state[ours[1]]))
    optimizers[0].zero_grad()
    torch.sum(ours[0] ** 2).backward()
    optimizers[0].step()
    assert torch.equal(ours[1], before)
    assert torch.equal(optimizers[0].state[ours[1]]["precision"], known["precision"])
    ours[1].requires_grad_(False)
    sampler = Optimizer(ours, blr.ivon(0.1, curvature=1.0), size=SIZE)
    with sampler.sampled():
        assert torch.equal(ours[1], before), "a frozen parameter was drawn"


def test_groups_have_priors_of_their_own_and_may_come_later():
    params = made()
    groups = [{"params": params[:1], "regularizer": 100.0}]
    optimizer = Optimizer(groups, blr.ivon(0.01, curvature=1.0), size=SIZE, regularizer=1.0)
    with optimizer.sampled():
        loss(params, batches(1)[0]).backward()
    optimizer.step()
    optimizer.add_param_group({"params": params[1:]})
    with optimizer.sampled():
        loss(params, batches(1)[0]).backward()
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [2, 1]
    first, second = optimizer.posterior
    assert float(first.precision[0].min()) > 135
    assert float(second.precision[0].max()) < 50
    twins = [torch.nn.Parameter(p) for p in values(params)]
    twin = Optimizer([{"params": [p]} for p in twins], optimizer.rule, size=SIZE)
    twin.load_state_dict(optimizer.state_dict())
    train(optimizer, params, batches(2))
    train(twin, twins, batches(2))
    assert same(params, twins)


def test_another_posterior_as_the_prior():
    params, others = made(), made()
    prior = blr.DiagonalGaussian([jnp.zeros((3, 2), jnp.float32), jnp.zeros(2, jnp.float32)], 2.0)
    rule = blr.ivon(0.05, curvature=1.0)
    train(Optimizer(params, rule, size=SIZE, prior=prior), params, batches(3))
    train(Optimizer(others, rule, size=SIZE, regularizer=2.0), others, batches(3))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(params, others, strict=True))


def test_memory_formats_and_storages_stay():
    weights = torch.tensor(np.random.default_rng(0).normal(size=(4, 3, 2, 2))).float()
    plain = torch.nn.Parameter(weights.clone())
    last = torch.nn.Parameter(weights.clone().to(memory_format=torch.channels_last))
    part = torch.nn.Parameter(torch.zeros(97)[1:].reshape(4, 3, 2, 4)[..., ::2])  # neither contiguous nor aligned
    part.data.copy_(weights)
    for p in (plain, last, part):
        where, strides = p.data_ptr(), p.stride()
        optimizer = Optimizer([p], blr.ivon(0.1, curvature=1.0), size=SIZE)
        for _ in range(3):
            optimizer.zero_grad()
            with optimizer.sampled():
                torch.sum(torch.cos(p)).backward()
            optimizer.step()
        assert (p.data_ptr(), p.stride()) == (where, strides)
        assert torch.equal(p, plain)


def test_large_tensors_are_shared_and_not_copied():
    p = torch.nn.Parameter(torch.linspace(-1, 1, 2**15))
    from bayesrule.interop.torch_memory import to_jax

    assert to_jax(p).unsafe_buffer_pointer() == p.data_ptr()
    twin = torch.nn.Parameter(p.detach().clone())
    optimizers = Optimizer([p], blr.adam(0.1), size=SIZE), torch.optim.Adam([twin], lr=0.1)
    for _ in range(3):
        for q, optimizer in zip((p, twin), optimizers, strict=True):
            optimizer.zero_grad()
            torch.sum(q**3).backward()
            optimizer.step()
    np.testing.assert_allclose(p.detach(), twin.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("samples", [1, 2])
def test_a_closure_is_evaluated_at_the_draws(samples):
    params, others = made(), made()
    rule = blr.ivon(0.05, curvature=1.0, samples=samples)
    optimizer, other = Optimizer(params, rule, size=SIZE), Optimizer(others, rule, size=SIZE)
    data, seen = batches(3), []
    for x in data:

        def closure(x=x):
            optimizer.zero_grad()
            value = loss(params, x)
            value.backward()
            seen.append(value.detach())
            return value.detach()

        returned = optimizer.step(closure)
        assert torch.equal(returned, sum(seen[-samples:]) / samples)
    train(other, others, data)
    assert len(seen) == 3 * samples
    assert same(params, others)


@pytest.mark.extended
def test_a_compiled_model_and_batch_norm():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    for module, trained in ((model, compiled), (twin, twin)):
        optimizer = Optimizer(module.parameters(), blr.ivon(0.05, curvature=1.0), size=SIZE)
        for x in batches(2).float():
            optimizer.zero_grad()
            with optimizer.sampled():
                torch.mean(trained(x) ** 2).backward()
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), rtol=1e-5, atol=1e-6)
    # The statistics have seen draws; PyTorch's own function takes them again at the mean.
    data = batches(4).float()
    torch.optim.swa_utils.update_bn(list(data), twin)
    hidden = twin[0](data.reshape(-1, 3)).detach()
    np.testing.assert_allclose(twin[1].running_mean, hidden.mean(0), rtol=1e-5, atol=1e-6)


DISTRIBUTED = """
import os, sys
sys.path[:0] = [{tests!r}]
from test_torch import *
rank = int(sys.argv[1])
torch.distributed.init_process_group("gloo", init_method="file://" + {file!r}, rank=rank, world_size=2)
torch.manual_seed(rank)
model = torch.nn.Linear(3, 2)
replica = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
start = [p.detach().clone() for p in model.parameters()]
optimizer = Optimizer(replica.parameters(), blr.ivon(0.05, curvature=1.0), size=SIZE)
for x in batches(3).float():
    optimizer.zero_grad()
    with optimizer.sampled():
        torch.mean(torch.cos(replica(x[4 * rank : 4 * rank + 4]))).backward()
    optimizer.step()
torch.save([start, [p.detach() for p in model.parameters()]], {file!r} + str(rank))
torch.distributed.destroy_process_group()
"""


@pytest.mark.extended
@pytest.mark.skipif(not torch.distributed.is_available(), reason="built without torch.distributed")
def test_processes_that_average_their_gradients_stay_together(tmp_path):
    file = str(tmp_path / "group")
    code = DISTRIBUTED.format(tests=str(Path(__file__).parent), file=file)
    settings = os.environ | {"JAX_ENABLE_X64": "1", "OMP_NUM_THREADS": "1"}
    options = {"env": settings, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", code, str(rank)], **options) for rank in range(2)]
    for process in running:
        error = process.communicate(timeout=300)[1]
        assert process.returncode == 0, error
    (start, first), (_, second) = (torch.load(file + str(rank), weights_only=True) for rank in range(2))
    assert same(first, second)
    model = torch.nn.Linear(3, 2)
    for p, value in zip(model.parameters(), start, strict=True):
        p.data.copy_(value)
    optimizer = Optimizer(model.parameters(), blr.ivon(0.05, curvature=1.0), size=SIZE)
    for x in batches(3).float():
        optimizer.zero_grad()
        with optimizer.sampled():
            torch.mean(torch.cos(model(x))).backward()
        optimizer.step()
    for p, value in zip(model.parameters(), first, strict=True):
        np.testing.assert_allclose(p.detach(), value, rtol=1e-5, atol=1e-6)


# What goes wrong.


def test_the_mean_comes_back_after_an_error_and_steps_that_are_not_finite_are_left_out():
    params = made()
    optimizer = Optimizer(params, blr.ivon(0.05, curvature=1.0), size=SIZE)
    train(optimizer, params, batches(1))
    before = values(params)

    def interrupted():
        with optimizer.sampled():
            assert not torch.equal(params[0], before[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert same(params, before)
    precision = optimizer.state[params[0]]["precision"].clone()
    optimizer.zero_grad()
    with optimizer.sampled():
        loss(params, batches(1)[0]).backward()
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    assert not optimizer.finite
    assert same(params, before)
    assert torch.equal(optimizer.state[params[0]]["precision"], precision)
    train(optimizer, params, batches(1))
    assert optimizer.finite
    assert not same(params, before)


def test_steps_from_gradients_that_were_taken_elsewhere_are_refused():
    params = made()
    optimizer = Optimizer(params, blr.ivon(0.1, curvature=1.0, samples=2), size=SIZE)
    optimizer.step()  # without gradients nothing happens, as in PyTorch
    loss(params, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="at draws of q"):
        optimizer.step()
    optimizer.zero_grad()
    with optimizer.sampled():
        loss(params, batches(1)[0]).backward()
    with pytest.raises(RuntimeError, match="takes 2 samples in a step"):
        optimizer.step()
    for inside in (optimizer.step, lambda: optimizer.draw().__enter__(), lambda: optimizer.posterior):
        with optimizer.sampled(), pytest.raises(RuntimeError, match="leave that context first"):
            inside()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(AssertionError, match="No inf checks"):  # gradients of samples are not in .grad
        scaler.scale(torch.zeros(())), scaler.step(optimizer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: ([], blr.adam(0.1), SIZE), "empty parameter list"),
        (lambda: ([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], blr.adam(0.1), SIZE), "must be real"),
        (lambda: ([torch.zeros(2, dtype=torch.int64)], blr.adam(0.1), SIZE), "floating-point"),
        (lambda: ([torch.zeros(2, device="meta", requires_grad=True)], blr.adam(0.1), SIZE), "are on meta"),
        (lambda: (made(), blr.adam(0.1), 0), "size= is a positive number"),
        (lambda: (made(), blr.adam(0.1), -3), "size= is a positive number"),
        (lambda: (made(), blr.adam, SIZE), "is a rule such as"),
        (lambda: (made(), blr.vogn(0.1, curvature=1.0), SIZE), "ivon"),
        (lambda: (made(), blr.newton(), SIZE), "ivon"),
        (lambda: (made(), blr.adam({"": 0.1, "0": 0.2}), SIZE), "give the rates as groups"),
    ],
)
def test_what_is_known_at_the_start_is_refused_there(arguments, message):
    params, rule, size = arguments()
    with pytest.raises(ValueError, match=message):
        Optimizer(params, rule, size=size)


def test_other_refusals():
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = Optimizer(embedding.parameters(), blr.adam(0.1), size=SIZE)
    torch.sum(embedding(torch.tensor([1, 3]))).backward()
    with pytest.raises(ValueError, match="A gradient is sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match="seed= is a whole number"):
        Optimizer(made(), blr.adam(0.1), size=SIZE, seed=-1)
    with pytest.raises(ValueError, match="not negative"):
        Optimizer(made(), blr.adam(0.1), size=SIZE, regularizer=-1.0)
    optimizer = Optimizer(made(), blr.adam(0.1), size=SIZE)
    with pytest.raises(ValueError, match="positive number"):
        optimizer.add_param_group({"params": made(), "size": 0})
    assert len(optimizer.param_groups) == 1


def test_without_pytorch_the_extra_is_named_and_nothing_else_needs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "bayesrule.interop.torch")
    with pytest.raises(ImportError, match=r"bayesrule\[torch\]"):
        import bayesrule.interop.torch  # noqa: F401  (the import itself is tested)
    root = Path(blr.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            # The saved position of a loader of PyTorch's may hold tensors, and is read by who has PyTorch.
            if any(name.split(".")[0] == "torch" for name in names) and path.name != "saved_state.py":
                assert path.parent.name == "interop"
                assert path.stem.startswith("torch")
