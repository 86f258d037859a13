"""Estimators in worker processes: searches in parallel, and compiled programs that come from disk."""

import json
import subprocess
import sys

import pytest

# The processes of a user, with a cache folder of its own and nothing in it.
SCRIPT = """
import json
import sys

import numpy as np


def fit_and_count(model, X, y):
    \"\"\"Fit in whatever process this is, and count the programs that were compiled, and those from disk.\"\"\"
    import jax

    counts = {"cache_hits": 0, "cache_misses": 0}

    def listen(event, **details):
        name = event.rsplit("/", 1)[1]
        if name in counts:
            counts[name] += 1

    jax.monitoring.register_event_listener(listen)
    prediction = model.fit(X, y).predict(X)
    return counts, prediction.tolist()


if __name__ == "__main__":
    import os

    from joblib import Parallel, delayed
    from sklearn.base import clone
    from sklearn.model_selection import GridSearchCV

    import bayesrule as blr

    blr.keep_programs()
    from bayesrule.estimators import RidgeRegression

    random = np.random.default_rng(0)
    X = random.normal(size=(90, 3))
    y = X @ [1.0, 0.0, 2.0] + 0.1 * random.normal(size=90)
    # Programs of any size, so that the counts do not depend on how fast the compiler is today.
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    here = fit_and_count(RidgeRegression(), X, y)
    workers = Parallel(n_jobs=2)(delayed(fit_and_count)(clone(RidgeRegression()), X, y) for _ in range(2))
    grid = {"prior_precision": [1e-3, 1e6]}
    search = GridSearchCV(RidgeRegression(noise=1.0), grid, cv=2, n_jobs=2).fit(X, y)
    json.dump({"here": here, "workers": workers, "best": search.best_params_}, sys.stdout)
"""


@pytest.mark.extended
def test_workers_read_programs_from_disk(tmp_path, monkeypatch):
    (tmp_path / "search.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("JAX_COMPILATION_CACHE_DIR", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    run = subprocess.run(
        [sys.executable, "search.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
    )
    found = json.loads(run.stdout)
    (compiled_here, predictions), workers = found["here"], found["workers"]
    assert compiled_here["cache_misses"] > 3
    assert list((tmp_path / "caches" / "bayesrule" / "jax").iterdir())
    for counts, there in workers:
        assert counts["cache_misses"] == 0
        assert counts["cache_hits"] >= compiled_here["cache_misses"]
        assert there == predictions
    assert found["best"] == {"prior_precision": 1e-3}
    assert "SIGILL" not in run.stderr
