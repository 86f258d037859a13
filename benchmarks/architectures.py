"""Training networks of many kinds: AdamW and SGD at searched rates, and posteriors at AdamW's rate.

    python benchmarks/architectures.py [--kinds mlp gru] [--data FOLDER] [--methods adamw sgd ivon] [--seeds 5]
        [--validate] [--out table.md]

The kinds are those of `kinds_of_networks.py`; a folder with NAME/NAME.npz adds images and tables, `--list` prints all
names. AdamW has weight decay 0.01, SGD momentum 0.9, and both a cosine schedule. Their rate is the one of `RATES` with
the best validation NLL (of squared error the RMSE), by one training each; every other method has AdamW's rate and
schedule, the same first weights and batches. "vadam" has AdamW's weight decay, too, and nothing is chosen; "vadam,
chosen" is the same training with the width that `blr.choose_width` finds on the validation rows. "ivon" and "vogn" are
`blr.ivon(1e-3)` and `blr.vogn(1e-3)` as they are by default, "ivon, published" has h₀ = 0.5, a decay of 0.99999, δ = 1
and a searched rate of its own.

Scores are those of 32 draws averaged, of the mean for AdamW and SGD: accuracy in per cent, NLL and ECE of classes; bits
of characters; RMSE in the user's units and NLL of numbers, whose noise is learnt or, with squared error, the mean
squared residual on the validation rows. Behind each score of a posterior stands the difference to AdamW's and its
standard error over seeds. `--validate` scores on the validation rows, for a choice of settings: test rows are for the
end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from kinds_of_networks import KINDS, Kind, Rows, kinds_in

import bayesrule as blr
from bayesrule import metrics

DRAWS, CHUNK = 32, 1000
RATES = {
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    "sgd": (1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "ivon, published": (0.03, 0.1, 0.3, 1.0),
}


@cache
def cosine(rate: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(rate, steps)


RULES: dict[str, Callable[[float, int], blr.Rule]] = {
    "adamw": lambda rate, steps: blr.adamw(cosine(rate, steps), weight_decay=0.01),
    "sgd": lambda rate, steps: blr.sgd(cosine(rate, steps), momentum=0.9),
    "vadam": lambda rate, steps: blr.vadam(cosine(rate, steps), weight_decay=0.01),
    "ivon": lambda rate, steps: blr.ivon(1e-3),
    "vogn": lambda rate, steps: blr.vogn(1e-3),
    "ivon, published": lambda rate, steps: blr.ivon(cosine(rate, steps), curvature=0.5, decay=0.99999),
}
"""Each takes a rate and the number of steps."""
DEFAULT = ["adamw", "sgd", "vadam", "vadam, chosen", "ivon"]
CHOSEN = ", chosen"
POINT_ESTIMATES = {"adamw", "sgd"}
WITHOUT_PRIOR = POINT_ESTIMATES | {"vadam"}  # Of the objective: their weight decay is beside it.


# Losses and likelihoods of one example.


def log_likelihood(task: str, noise: Any, outputs: Any, y: Any) -> Any:
    """log p(y | outputs), for characters of each of them."""
    if task in {"classes", "characters"}:
        return jnp.take_along_axis(jax.nn.log_softmax(outputs), y[..., None], axis=-1)[..., 0]
    log_noise = outputs[..., 1] if task == "noise" else jnp.log(noise)
    return -0.5 * ((y - outputs[..., 0]) ** 2 * jnp.exp(-log_noise) + log_noise + jnp.log(2 * jnp.pi))


@cache
def loss_of(task: str) -> Callable[[Any, Any], Any]:
    """The loss of one example, of a text the sum over its characters."""
    if task == "numbers":
        return lambda outputs, y: 0.5 * (y - outputs[0]) ** 2
    return lambda outputs, y: -jnp.sum(log_likelihood(task, 1.0, outputs, y))


# Training, and outputs of draws.


def objective_of(kind: Kind, prior: float) -> blr.Objective:
    return blr.Objective(loss_of(kind.task), output=kind.apply, size=len(kind.train[1]), regularizer=prior)


def train(kind: Kind, name: str, rate: float, seed: int) -> Any:
    """q after the training of one method."""
    start, order = jax.random.split(jax.random.key(seed))
    objective = objective_of(kind, 0.0 if name in WITHOUT_PRIOR else 1.0)
    rule = RULES[name](rate, kind.steps)
    options = {"steps": kind.steps, "batch_size": min(kind.batch, len(kind.train[1]))}
    return blr.fit(rule, objective, kind.init(start), kind.train, key=order, **options).q


def draws_after_training(kind: Kind, name: str, rate: float, seed: int) -> Any:
    q = train(kind, name.removesuffix(CHOSEN), rate, seed)
    if not name.endswith(CHOSEN):
        return draws_of(q, name)
    chosen = blr.choose_width(q, objective_of(kind, 0.0), kind.validation, key=jax.random.key(seed + 100))
    return draws_of(chosen.q, "vadam" if chosen.method == "samples" else "adamw")


@partial(jax.jit, static_argnums=0)
def outputs_of(apply: Callable, draws: Any, x: Any) -> Any:
    return jax.vmap(jax.vmap(apply, (None, 0)), (0, None))(draws, x)


def outputs(kind: Kind, draws: Any, x: np.ndarray) -> np.ndarray:
    """The outputs of every draw for every row, (draws, rows, …)."""
    parts = [outputs_of(kind.apply, draws, x[i : i + CHUNK]) for i in range(0, len(x), CHUNK)]
    return np.concatenate(parts, axis=1)


def draws_of(q: Any, name: str) -> Any:
    """Draws along a first axis; of a method without a posterior its mean alone."""
    if name in POINT_ESTIMATES:
        return jax.tree.map(lambda m: m[None], q.mean)
    return q.sample(jax.random.key(17), (DRAWS,))


# Scores, of which lower ones are better but for the accuracy.


def score(kind: Kind, draws: Any, rows: Rows) -> dict[str, float]:
    (x, y), noise = rows, 1.0
    found = outputs(kind, draws, x)
    if kind.task == "numbers":
        residuals = outputs(kind, draws, kind.validation[0])[..., 0].mean(0) - kind.validation[1]
        noise = float(np.mean(residuals**2))
    likelihoods = log_likelihood(kind.task, noise, jnp.asarray(found), jnp.asarray(y)[None])
    nll = float(np.log(len(found)) - jnp.mean(jax.nn.logsumexp(likelihoods, axis=0)))
    if kind.task == "characters":
        return {"bits": nll / float(np.log(2))}
    if kind.task == "classes":
        p = jax.nn.softmax(jnp.asarray(found)).mean(0)
        return {"accuracy": 100 * float(metrics.accuracy(p, y)), "nll": nll, "ece": float(metrics.ece(p, y))}
    return {"rmse": kind.unit * float(metrics.rmse(found[..., 0].mean(0), y)), "nll": nll + float(np.log(kind.unit))}


def judged(scores: dict[str, float]) -> float:
    """The score that chooses a rate; a training that diverged is the worst."""
    value = next(scores[name] for name in ("bits", "rmse", "nll") if name in scores)
    return value if np.isfinite(value) else np.inf


def search(kind: Kind, name: str) -> float:
    """The rate with the best validation score."""
    tried = {
        rate: judged(score(kind, draws_of(train(kind, name, rate, 0), name), kind.validation)) for rate in RATES[name]
    }
    return min(tried, key=lambda rate: tried[rate])


def row(kind_name: str, kind: Kind, methods: Iterable[str], seeds: int, *, validate: bool) -> list[str]:
    """A line of the table for each method."""
    rows, rates, lines, reference = kind.validation if validate else kind.test, {}, [], {}
    for name in methods:
        began = time.process_time()
        rates[name] = search(kind, name) if name in RATES else rates["adamw"]
        found = [score(kind, draws_after_training(kind, name, rates[name], s), rows) for s in range(seeds)]
        values = {key: np.array([one[key] for one in found]) for key in found[0]}
        reference = reference or values
        cells = []
        for key, value in values.items():
            difference, root = value - reference[key], np.sqrt(seeds)
            against = f" ({difference.mean():+.3g} ± {difference.std(ddof=1) / root:.2g})" if name != "adamw" else ""
            cells.append(f"{key} {value.mean():.4g}{against}")
        lines.append(f"| {kind_name} | {name} {rates[name]:g} | {'; '.join(cells)} |")
        print(lines[-1], f"  ({time.process_time() - began:.0f} s of CPU)", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", help="which kinds; all of the embedded data by default")
    parser.add_argument("--data", type=Path, help="folder with further sets, NAME/NAME.npz")
    parser.add_argument("--methods", nargs="+", choices=[*RULES, f"vadam{CHOSEN}"], default=DEFAULT)
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--validate", action="store_true", help="score on the validation rows")
    parser.add_argument("--list", action="store_true", help="print the names of all kinds")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    kinds = KINDS | (kinds_in(arguments.data) if arguments.data else {})
    if arguments.list:
        print(*kinds, sep="\n")
        return
    methods = ["adamw", *(name for name in arguments.methods if name != "adamw")]
    lines = ["| kind | method, rate | scores (difference to AdamW) |", "|---|---|---|"]
    for name in arguments.kinds or KINDS:
        lines += row(name, kinds[name](), methods, arguments.seeds, validate=arguments.validate)
        if arguments.out:
            arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
