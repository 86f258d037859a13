"""Write one file for each kind of state, unfinished fit, result and run, and what the tests expect of them.

    JAX_ENABLE_X64=1 PYTHONPATH=tests python -m saved_files.make NAME

NAME is a new folder here, named after what is about to change in the files. One that is there is never written again:
its files stand for those that users have.
"""

import dataclasses
import json
import sys
import tempfile
import zipfile
from pathlib import Path

import jax

import bayesrule as blr
from saved_files import runs
from saved_files.fits import FITS, as_lists, course, cut, verdict
from saved_files.kinds import FURTHER, KINDS, advanced, first_state, numbers
from saved_files.posteriors import POSTERIORS

HERE = Path(__file__).parent


def states(folder):
    expected = {}
    for name, kind in KINDS.items():
        rule, task = kind.rule(), kind.task()
        state, _ = advanced(kind, first_state(kind, rule, task), kind.steps)
        blr.save(folder / f"{name}.npz", state)
        after, objective = advanced(kind, state, FURTHER)
        expected[name] = {
            "class": type(state.q).__name__,
            "count": int(state.count),
            "fields": [field.name for field in dataclasses.fields(state) if getattr(state, field.name) is not None],
            "q": as_lists(numbers(state.q)),
            "after": as_lists(numbers(after.q)),
            "objective": objective,
        }
    return expected


def fits(folder):
    expected = {}
    for name, fit in FITS.items():
        cut(fit, folder / f"{name}.npz")
        whole = fit.run(fit.start, fit.steps)
        whole.save(folder / f"{name}, finished.npz")
        expected[name] = as_lists({**course(whole), **verdict(whole)})
    return expected


def posteriors(folder):
    made = {name: make() for name, make in POSTERIORS.items()}
    blr.save(folder / "posteriors.npz", made)
    return {name: as_lists(numbers(q)) for name, q in made.items()}


def finished_runs(folder):
    expected, table = {}, runs.write_table(folder)
    for name in runs.RUNS:
        runs.fit_run(folder, name)
        expected[name] = runs.predictions(blr.load(folder / name), table)
    return expected


def killed_run(folder):
    table = runs.write_table(folder)
    runs.kill_run(folder)
    with tempfile.TemporaryDirectory() as elsewhere:
        runs.invoke("fit", str(table), *runs.LONG_RUN, "-o", f"{elsewhere}/run")
        return runs.predictions(blr.load(Path(elsewhere) / "run"), table)


def inferences(folder):
    expected = {}
    for name, (infer, _) in runs.INFERENCES.items():
        posterior = infer()
        posterior.save(folder / f"{name}.npz")
        expected[name] = as_lists(runs.described(posterior))
    return expected


def sharded(folder):
    runs.kill_sharded(folder)
    start = blr.shard_parameters(jax.numpy.array([0.3, -0.2]), runs.one_device())
    return as_lists(course(runs.sharded_fit(start, 10)))


def optimizers(folder):
    import torch

    expected = {}
    for name in runs.OPTIMIZERS:
        params = runs.first_params()
        optimizer = runs.optimizer_of(name, params)
        runs.train(optimizer, params, range(3))
        torch.save([[p.detach() for p in params], optimizer.state_dict()], folder / f"{name}.pt")
        runs.train(optimizer, params, range(3, 6))
        expected[name] = params[0].tolist()
    return expected


MAKERS = (states, posteriors, fits, finished_runs, killed_run, inferences, sharded, optimizers)


def main(name):
    if not jax.config.read("jax_enable_x64"):
        raise SystemExit("The numbers are to be in double precision: set JAX_ENABLE_X64=1.")
    place = HERE / name
    place.mkdir()
    expected = {}
    with tempfile.TemporaryDirectory() as temporary, zipfile.ZipFile(place / "files.zip", "w") as archive:
        for make in MAKERS:
            folder = Path(temporary) / make.__name__
            folder.mkdir()
            expected[make.__name__] = make(folder)
        for path in sorted(Path(temporary).rglob("*")):
            if path.is_file():
                entry = zipfile.ZipInfo(str(path.relative_to(temporary)))
                archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    (place / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
