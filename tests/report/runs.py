"""Runs to make pages of: small, seeded, and as real as scikit-learn makes them in a moment."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.decomposition import FactorAnalysis
from sklearn.linear_model import BayesianRidge, LogisticRegression, PoissonRegressor
from sklearn.mixture import GaussianMixture

from bayesrule.runs.run import Run

NINETY = 1.6448536269514722
NEWTON = """newton (Khan and Rue, section 1.3.2)
  family     Gaussian                     q(θ) = N(m, S⁻¹), λ = (Sm, −½S)  (eq:full_gauss_params)
  points     Delta()                      E_q f(θ) ≈ f(m), the delta method (app:delta)
  curvature  Hessian()                    the Hessian ∇²ℓ̄ (Bonnet and Price, app:bp)
  steps      ρ = 1
  guard      Backtracking(monotone=True)  ρ is halved until λ ∈ Ω and the loss does not worsen
  update     S ← (1 − ρτ)S + ρ E_q∇²ℓ̄,  m ← m − ρ S⁻¹ E_q∇ℓ̄  (eq:von_1)"""
VOGN = """vogn (Khan and Rue, section 4.4)
  family     DiagonalGaussian  q(θ) = N(m, diag(s)⁻¹), λ = (s∘m, −½s)  (tab:EFsummary)
  points     MonteCarlo(1)     E_q f(θ) ≈ the mean of f over draws from q
  curvature  GaussNewton()     ∇²ℓ̄ ≈ N/M Σᵢ ∇ℓᵢ∇ℓᵢᵀ (eq:OGN_approx)
  steps      ρ = 0.1 (mean), 0.001 (precision), gradient averaged over the data, β = 0.9 (eq:adam_momentum)
  guard      Boundary()        the plain step; S may be 0 where no gradient was ever seen
  update     s ← (1 − ρτ)s + ρ E_q diag(∇²ℓ̄),  m ← m − ρ ĝ over (v + δ/N), relative to v = 1"""
VERSIONS = {"python": "3.12.3", "bayesrule": "0.1.0", "jax": "0.9.0", "numpy": "2.3.5", "scipy": "1.17.0"}


def binary() -> Run:
    """Breast cancer, logistic regression: coefficients, influence, a bound that rises in three fits."""
    data = load_breast_cancer()
    x, y, train, test = _split(data.data, data.target)
    model = LogisticRegression(C=0.5).fit(x[train], y[train])
    p = model.predict_proba(x[test])
    w = model.coef_[0]
    std = _laplace_std(x[train], model.predict_proba(x[train])[:, 1], 2.0)
    names = [str(name) for name in data.feature_names]
    run = _run("breast_cancer", "diagnosis", "binary", "LogisticRegression", names, x, train, test)
    run.classes = ["malignant", "benign"]
    run.summary["target"] |= {"levels": run.classes, "top": [["benign", 357], ["malignant", 212]]}
    run.metrics = _class_metrics(p, y[test], y[train])
    run.test = {"row": test, "y": y[test], "probabilities": p}
    run.weights = {"name": names, "mean": w, "std": std}
    trust = model.predict_proba(x[train])[np.arange(len(train)), y[train]]
    run.influence = {"row": train, "influence": (1 - trust) ** 2 * 0.5, "log_density": np.log(trust) * 1.1}
    steps = np.arange(36)
    bound = -40 - 400 * np.exp(-(steps % 12) / 1.5) + 4 * (steps // 12)
    run.trace = {"objective": -bound, "bound": bound}
    run.fits = [0, 12, 24]
    run.facts = {"bound": -32.1, "prior_precision": 0.83, "steps": 36, "reason": "converged"}
    return run


def classes() -> Run:
    """Iris, with a probability for each of three."""
    data = load_iris()
    x, y, train, test = _split(data.data, data.target, 0.4)
    model = LogisticRegression(C=0.3).fit(x[train], y[train])
    p = model.predict_proba(x[test])
    run = _run("iris", "species", "classes", "LogisticRegression", list(data.feature_names), x, train, test)
    run.classes = [str(name) for name in data.target_names]
    run.metrics = _class_metrics(p, y[test], y[train])
    run.test = {"row": test, "y": y[test], "probabilities": p}
    names = [f"{name} → {label}" for name in data.feature_names for label in run.classes]
    run.weights = {"name": names, "mean": model.coef_.T.ravel(), "std": np.full(12, 0.35)}
    return run


def many_classes(size: int = 60) -> Run:
    """More classes than a table can hold."""
    rng = np.random.default_rng(0)
    y = rng.integers(size, size=400)
    logits = rng.normal(size=(400, size)) + 4.5 * np.eye(size)[y]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    run = _run("letters.csv", "letter", "classes", "MLPClassifier", ["a", "b"], rng.normal(size=(1200, 2)),
               np.arange(800), np.arange(800, 1200))  # fmt: skip
    run.classes = [f"letter {index}" for index in range(size)]
    run.metrics = _class_metrics(p, y, y)
    run.test = {"row": np.arange(800, 1200), "y": y, "probabilities": p}
    return run


def regression(rows: int | None = None) -> Run:
    """Diabetes, ridge regression; with `rows`, so many held-out rows made up."""
    data = load_diabetes()
    x, y, train, test = _split(data.data, data.target, 0.4)
    model = BayesianRidge().fit(x[train], y[train])
    run = _run("diabetes", "progression", "regression", "RidgeRegression", list(data.feature_names), x, train, test)
    mean, std = model.predict(x[test], return_std=True)
    row, truth = test, y[test]
    if rows is not None:
        rng = np.random.default_rng(1)
        mean, std, row = rng.normal(150, 50, rows), np.full(rows, 55.0), np.arange(rows)
        truth = mean + std * rng.standard_normal(rows)
        run.summary["test_rows"] = rows
    run.metrics = _numeric_metrics(truth, mean, std, y[train])
    run.test = {
        "row": row,
        "y": truth,
        "mean": mean,
        "std": std,
        "low": mean - NINETY * std,
        "high": mean + NINETY * std,
    }
    run.weights = {"name": list(data.feature_names), "mean": model.coef_, "std": np.sqrt(np.diag(model.sigma_))}
    run.facts = {"log_evidence": -1432.9, "prior_precision": 0.0012, "noise": 3012.0}
    run.influence = {"row": train, "influence": np.abs(y[train] - model.predict(x[train])) / 400,
                     "log_density": -4 - np.abs(y[train] - model.predict(x[train])) / 60}  # fmt: skip
    return run


def network() -> Run:
    """The same by a network: layers instead of coefficients, and batches instead of a bound."""
    run, rng = regression(), np.random.default_rng(2)
    run.config |= {"model": "mlp", "recipe": "vogn", "estimator": "MLPRegressor"}
    run.derivation, run.influence = VOGN, {}
    mean, std = rng.normal(0, 0.3, 3000), np.exp(rng.normal(-2, 0.6, 3000))
    layer = ["0.w"] * 500 + ["1.w"] * 2450 + ["2.w"] * 50
    run.weights = {"layer": layer, "mean": mean, "std": std}
    steps = np.arange(4000)
    run.trace = {
        "objective": 1800 + 9000 * np.exp(-steps / 60) + 120 * rng.standard_normal(4000),
        "heldout_step": np.arange(200, 4001, 200),
        "heldout_nll": 5.4 + 0.8 * np.exp(-np.arange(20) / 3) + 0.01 * rng.standard_normal(20),
    }
    run.fits = [0]
    run.facts = {"steps": 4000, "reason": "steps"}
    return run


def counts() -> Run:
    """Bicycles hired in an hour, Poisson regression."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(600, 4))
    y = rng.poisson(np.exp(1.5 + x @ np.array([0.6, -0.4, 0.2, 0.0])))
    _, _, train, test = _split(x, y, 0.5)
    names = ["temperature", "rain", "weekend", "moon"]
    model = PoissonRegressor(alpha=1e-3).fit(x[train], y[train])
    mean = model.predict(x[test])
    std = np.sqrt(mean + (0.05 * mean) ** 2)
    run = _run("bicycles.csv", "hired", "counts", "PoissonRegression", names, x, train, test)
    run.metrics = _numeric_metrics(y[test], mean, std, y[train])
    low, high = np.floor(np.maximum(mean - NINETY * std, 0)), np.ceil(mean + NINETY * std)
    run.test = {"row": test, "y": y[test], "mean": mean, "std": std, "low": low, "high": high}
    run.metrics["model"]["coverage90"] = float(np.mean((y[test] >= low) & (y[test] <= high)))
    run.weights = {"name": names, "mean": model.coef_, "std": np.full(4, 0.03)}
    return run


def sequence(past: int = 120) -> Run:
    """A monthly series with a trend and a season, and its last two years held out."""
    rng = np.random.default_rng(4)
    time = np.arange(past + 24)
    signal = 110 + 1.1 * time + 18 * np.sin(2 * np.pi * time / 12)
    y = signal + 5 * rng.standard_normal(len(time))
    run = _run("passengers.csv", "passengers", "sequence", "LinearGaussianStateSpace", [], y[:, None],
               time[:past], time[past:])  # fmt: skip
    std = np.sqrt(25 + 2.2 * np.arange(1, 25) ** 1.4)
    mean = signal[past:] + 0.2 * np.cumsum(rng.standard_normal(24))
    run.test = {"row": time[past:], "time": time[past:], "y": y[past:], "mean": mean, "std": std,
                "low": mean - NINETY * std, "high": mean + NINETY * std}  # fmt: skip
    run.history = {"time": time[:past], "y": y[:past].copy(), "mean": signal[:past], "std": np.full(past, 5.4)}
    run.history["y"][past // 2 : past // 2 + 4] = np.nan
    run.metrics = _numeric_metrics(y[past:], mean, std, y[:past])
    run.derivation = "conjugate, on a GaussianChain: Kalman's smoother in one step"
    run.weights, run.summary["columns"] = {}, []
    return run


def groups() -> Run:
    """The flowers of iris in three groups, compared with their species."""
    data = load_iris()
    x, y, train, test = _split(data.data, data.target)
    mixture = GaussianMixture(3, random_state=0).fit(x[train])
    p = mixture.predict_proba(x)
    names = list(data.feature_names)
    run = _run("iris", None, "clusters", "GaussianMixture", names, x, train, test)
    run.metrics = {"model": {"log_density": mixture.score(x[test])}, "baseline": {"log_density": -4.2}}
    run.metrics["baseline_name"] = "one Gaussian for all rows"
    group = p.argmax(1)
    counts = np.zeros((3, 3), int)
    np.add.at(counts, (group, y), 1)
    run.test = {"row": test}
    run.structure = {
        "weight": mixture.weights_, "mean": mixture.means_, "std": np.full((3, 4), 0.4), "deviation": mixture.means_,
        "plane": x[:, :2], "variance": np.array([0.73, 0.23]), "sizes": np.arange(1, 5), "criterion": np.array(
            [900.0, 640.0, 620.0, 680.0]),
        "rows": {"row": np.arange(150), "group": group, "probability": p.max(1),
                 "log_density": mixture.score_samples(x)},
        "compared": {"name": "species", "levels": [str(name) for name in data.target_names], "counts": counts},
    }  # fmt: skip
    run.summary["criterion"] = "BIC"
    return run


def topics() -> Run:
    """Two topics of twenty words."""
    rng = np.random.default_rng(5)
    words = [f"word{index}" for index in range(20)]
    run = _run("notes.csv", None, "topics", "LatentDirichletAllocation", words, rng.poisson(2.0, (60, 20)),
               np.arange(48), np.arange(48, 60))  # fmt: skip
    run.metrics = {"model": {"perplexity": 12.5}, "baseline": {"perplexity": 16.1}, "baseline_name": "one topic"}
    share = rng.beta(8.0, 2.0, 60)
    run.structure = {
        "share": np.array([0.6, 0.4]), "words": np.array([np.arange(10), np.arange(10, 20)]),
        "probability": np.tile(np.linspace(0.16, 0.04, 10), (2, 1)), "sizes": [], "criterion": [],
        "rows": {"row": np.arange(60), "group": rng.integers(0, 2, 60), "probability": share,
                 "std": np.full(60, 0.08)},
    }  # fmt: skip
    return run


def factors() -> Run:
    """Two factors of the diabetes data."""
    data = load_diabetes()
    x, y, train, test = _split(data.data, data.target)
    model = FactorAnalysis(2, random_state=0).fit(x)
    run = _run("diabetes", None, "factors", "FactorAnalysis", list(data.feature_names), x, train, test)
    run.metrics = {"model": {"log_density": -11.0}, "baseline": {"log_density": -14.0}, "baseline_name": "independent"}
    score = model.transform(x)
    correlation = np.array([np.corrcoef(each, y)[0, 1] for each in score.T])
    run.structure = {
        "loading": model.components_, "loading_std": np.full((2, 10), 0.03), "noise": model.noise_variance_.clip(0, 1),
        "explained": np.array([0.3, 0.2]), "sizes": np.arange(1, 4), "criterion": np.array([900.0, 700.0, 710.0]),
        "rows": {"row": np.arange(442), "score": score, "std": np.full((442, 2), 0.3),
                 "log_density": model.score_samples(x)},
        "compared": {"name": "progression", "correlation": correlation},
    }  # fmt: skip
    return run


def bare() -> Run:
    """A run that has nothing at all."""
    return Run(config={}, summary={}, estimator=None, encoding=None, metrics={})


TASKS = {
    "binary": binary, "classes": classes, "many_classes": many_classes, "regression": regression, "network": network,
    "counts": counts, "sequence": sequence, "groups": groups, "topics": topics, "factors": factors, "bare": bare,
}  # fmt: skip


def _split(x, y, share=0.25):
    x = (x - x.mean(0)) / x.std(0)
    order = np.random.default_rng(0).permutation(len(x))
    held = round(share * len(x))
    return x, y, np.sort(order[held:]), np.sort(order[:held])


def _laplace_std(x, p, precision):
    """Laplace's standard deviations."""
    hessian = (x * (p * (1 - p))[:, None]).T @ x + precision * np.eye(x.shape[1])
    return np.sqrt(np.diag(np.linalg.inv(hessian)))


def _class_metrics(p, y, y_train):
    share = np.bincount(y_train, minlength=p.shape[1]) / len(y_train)
    base = np.tile(share, (len(y), 1))
    return {
        "model": _scores(p, y),
        "baseline": _scores(base, y),
        "baseline_name": "the classes' frequencies in training",
    }


def _scores(p, y):
    right, confidence = p.argmax(1) == y, p.max(1)
    bin_index = np.clip(np.ceil(confidence * 10).astype(int) - 1, 0, 9)
    gaps = [abs(np.sum(right[bin_index == each] - confidence[bin_index == each])) for each in range(10)]
    return {
        "nll": float(-np.mean(np.log(np.maximum(p[np.arange(len(y)), y], 1e-300)))),
        "accuracy": float(np.mean(right)),
        "brier": float(np.mean(np.sum((p - np.eye(p.shape[1])[y]) ** 2, axis=1))),
        "ece": float(sum(gaps) / len(y)),
    }


def _numeric_metrics(y, mean, std, y_train):
    def scores(mean, std):
        z = (y - mean) / std
        return {
            "nll": float(np.mean(0.5 * z**2 + np.log(std) + 0.5 * np.log(2 * np.pi))),
            "rmse": float(np.sqrt(np.mean((y - mean) ** 2))),
            "r2": float(1 - np.sum((y - mean) ** 2) / max(np.sum((y - y.mean()) ** 2), 1e-300)),
            "coverage90": float(np.mean(np.abs(z) <= NINETY)),
        }

    wide = scores(np.full(len(y), y_train.mean()), np.full(len(y), y_train.std()))
    return {
        "model": scores(mean, std),
        "baseline": wide,
        "baseline_name": "a Gaussian with the training mean and deviation",
    }


def _run(source, target, task, estimator, names, x, train, test):
    columns = [
        {"name": name, "kind": "number", "missing": 0, "used": True, "mean": float(column.mean()), "std": 1.0,
         "min": float(column.min()), "max": float(column.max())}
        for name, column in zip(names, np.asarray(x, float).T, strict=False)
    ]  # fmt: skip
    if columns:
        dropped = {
            "used": False,
            "note": "has the same value in every row",
            "mean": 1.0,
            "std": 0.0,
            "min": 1.0,
            "max": 1.0,
        }
        columns.append({"name": "version", "kind": "number", "missing": 0, **dropped})
        levels = {"levels": ["A", "B", "C", "D"], "top": [["A", 312], ["B", 140], ["C", 66], ["D", 51]]}
        columns.append({"name": "hospital", "kind": "category", "missing": 12, "used": True, **levels})
    kind = "category" if task in ("binary", "classes") else "number"
    return Run(
        config={"data": source, "target": target, "task": task, "model": "linear", "recipe": None, "seed": 0,
                "test_size": 0.25, "time": None, "params": {}, "estimator": estimator},
        summary={
            "source": source, "rows": len(train) + len(test), "train_rows": len(train), "test_rows": len(test),
            "guesses": [f"the target is the last column, {target!r} (--target chooses another)"],
            "columns": columns, "target": {"name": target, "kind": kind, "missing": 0, "used": True}, "features": names,
        },
        estimator=None, encoding=None, metrics={}, derivation=NEWTON, seconds={"fit": 1.234}, versions=VERSIONS,
    )  # fmt: skip
