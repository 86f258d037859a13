"""The page of a comparison: what it concludes, and names from strangers."""

import re

import numpy as np

from bayesrule.report.compare_page import render_comparison
from bayesrule.runs.run import Candidate, Comparison
from report.test_page import HOSTILE, Reader


def candidate(name, losses, command="--model linear", seconds=1.0):
    folds = [float(part.mean()) for part in np.array_split(losses, 5)]
    metrics = {"nll": float(losses.mean()), "rmse": 2.0, "r2": 0.5, "coverage90": 0.9}
    errors = {"nll": float(losses.std() / len(losses) ** 0.5), "rmse": 0.1, "coverage90": 0.01}
    return Candidate(name, f"the model {name}", command, losses, metrics, errors, folds, seconds)


def comparison(*candidates):
    config = {"data": "houses.csv", "target": "price", "task": "regression", "folds": 5, "seed": 0}
    return Comparison(config, {"source": "houses.csv", "rows": 400, "guesses": []}, list(candidates))


def read(found):
    text = render_comparison(found)
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    assert not {"script", "link", "img"} & set(reader.tags)
    return text, " ".join(" ".join(reader.text).split()).replace("\u202f", " ")


def losses(shift=0.0, noise=0.0, seed=1):
    shared = np.random.default_rng(0).normal(2.0, 1.0, 400)
    return shared + shift + noise * np.random.default_rng(seed).normal(size=400)


def test_models_that_cannot_be_told_apart():
    best = candidate("mlp", losses(), "--model mlp", 30.0)
    close = candidate("linear", losses(0.001, 0.1), seconds=2.0)
    far = candidate("baseline", losses(1.0, 0.1, 2), "")
    _, text = read(comparison(best, close, far))
    assert "mlp has the least NLL" in text
    assert "; linear is not clearly worse" in text
    assert "Take linear : of the 2 models here" in text
    assert "bayesrule fit houses.csv --target price --model linear" in text


def test_a_clear_winner_and_better_trees():
    trees = candidate("boosted trees", losses(), "")
    best = candidate("gp", losses(0.2, 0.1), "--model gp")
    far = candidate("baseline", losses(1.0, 0.1, 2), "")
    _, text = read(comparison(trees, best, far))
    # The differences of 400 rows have a standard deviation of 0.1.
    assert re.search(r"the next, gp ?, is 0\.(19|20|21) ± 0\.00\d+ behind", text)
    assert re.search(r"Boosted trees are ahead of all models here by 0\.(19|20|21) ± 0\.00\d+ nats", text)
    assert "--model gp" in text


def test_nothing_to_learn():
    base = candidate("baseline", losses(), "")
    best = candidate("linear", losses(0.001, 0.1))
    _, text = read(comparison(base, best))
    assert "No model is clearly better than a prediction that ignores the inputs" in text


def test_names_from_strangers_stay_text():
    found = comparison(candidate(HOSTILE, losses()), candidate("b", losses(0.1)))
    found.config |= {"data": HOSTILE, "target": HOSTILE}
    found.summary |= {"source": HOSTILE, "guesses": [HOSTILE]}
    found.candidates.append(Candidate(HOSTILE, HOSTILE, HOSTILE, failure=HOSTILE))
    text, _ = read(found)
    assert "<script" not in text
    assert not set(text) & set("\u202e\x00\ud800")
