"""Amari's natural gradient of maximum likelihood is the rule: θ ← θ − ρ F(θ)⁻¹ ∇[−log p(data | θ)].

The family is a Gaussian over θ, the delta method evaluates the loss at its mean, the Fisher information of p(y | θ)
replaces the Hessian, and the precision's rate is 1, so that it is S = N F(m) after every step. In this example p is a
normal distribution with θ = (mean, log sd), whose Fisher information is diag(1/sd², 2).
"""

import jax
import jax.numpy as jnp

import bayesrule as blr

RATE = 0.5


def negative_log_likelihood(theta, y):
    """−log N(y | θ₀, e^{2θ₁}), without its constant."""
    return theta[1] + 0.5 * (y - theta[0]) ** 2 * jnp.exp(-2 * theta[1])


def fisher(theta):
    """The Fisher information of one observation."""
    return jnp.diag(jnp.array([jnp.exp(-2 * theta[1]), 2.0]))


def amari(rate):
    """The rule whose mean takes Amari's steps."""
    curvature = blr.GeneralizedGaussNewton(fisher=fisher)
    steps = blr.Steps(blr.Rates(mean=rate, precision=1.0))
    return blr.Rule(blr.Gaussian, blr.Delta(), curvature, steps, name="amari", section="2.1")


def objective(y):
    """Examples are pairs of an unused input and y; the model's output is θ itself."""
    return blr.Objective(negative_log_likelihood, output=lambda theta, x: theta, size=len(y))


def main():
    y = 3.0 + 2.0 * jax.random.normal(jax.random.key(0), (200,))
    data = (jnp.zeros(len(y)), y)
    rule, loss = amari(RATE), objective(y)
    print(rule, end="\n\n")
    step = jax.jit(lambda state: rule.step(loss, state, data)[0])
    state = rule.init(jnp.array([0.0, 1.5]))
    total = jax.grad(lambda theta: jnp.sum(jax.vmap(lambda each: negative_log_likelihood(theta, each))(y)))
    print("step      mean    log sd   |difference from θ − ρF⁻¹∇|")
    for count in range(12):
        theta = state.q.mean
        by_hand = theta - RATE * jnp.linalg.solve(len(y) * fisher(theta), total(theta))
        state = step(state)
        difference = jnp.max(jnp.abs(state.q.mean - by_hand))
        print(f"{count + 1:4d}  {state.q.mean[0]:8.5f}  {state.q.mean[1]:8.5f}   {difference:.1e}")
    print(f"MLE   {jnp.mean(y):8.5f}  {jnp.log(jnp.std(y)):8.5f}   (closed form)")


if __name__ == "__main__":
    main()
