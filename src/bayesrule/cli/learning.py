"""Commands that learn from tables: `fit`, `predict`, and `datasets`, the tables that are at hand."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .starting import tidy

if TYPE_CHECKING:
    from ..data.tables import Table
    from ..runs.run import Run

_DEBUG = typer.Option("--debug", help="Show where an error came from.")
_QUIET = typer.Option("--quiet", "-q", help="Print nothing but errors and the report's path.")


@tidy
def fit(
    data: Annotated[
        str | None,
        typer.Argument(help="A CSV, Parquet or NPZ file, or a name from `bayesrule datasets`.", show_default=False),
    ] = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="The column to predict.")] = None,
    task: Annotated[
        str | None, typer.Option(help="regression, binary, classes, counts or sequence; guessed from the target.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="linear, mlp, binary-mlp or gp; state-space or hmm.")] = None,
    recipe: Annotated[str | None, typer.Option(help="The algorithm, by its name in `bayesrule table`.")] = None,
    time: Annotated[str | None, typer.Option(help="The column of times: the rows are a sequence.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Where the run goes.  [default: run]")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with any of these options.")] = None,
    param: Annotated[
        list[str] | None, typer.Option("--param", "-p", help="A setting of the estimator, name=value; may be repeated.")
    ] = None,
    test_size: Annotated[float | None, typer.Option(help="The share of rows held out.  [default: 0.2]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the split and of everything random.  [default: 0]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was cut short.")] = False,
    quiet: Annotated[bool, _QUIET] = False,
    debug: Annotated[bool, _DEBUG] = False,
) -> None:
    """Learn to predict a column of a table, with honest uncertainty, and write a report.

    Examples:

      bayesrule fit breast_cancer

      bayesrule fit houses.csv --target price --model mlp --recipe vogn --out run/

      bayesrule fit sales.csv --target sold --time week --model state-space

      bayesrule fit --config run.yaml --seed 3

      bayesrule fit --resume --out run/
    """
    from ..runs import store
    from .asking import asked, recalled

    given = {
        "data": data,
        "target": target,
        "task": task,
        "model": model,
        "recipe": recipe,
        "time": time,
        "out": None if out is None else str(out),
        "test_size": test_size,
        "seed": seed,
    }
    options = asked(given, config, param or [])
    place = Path(options.pop("out"))
    partial = store.partial_folder(place)
    said = _Said(quiet)
    if resume:
        options = recalled(partial, place, options, said.line)
        if options is None:
            return
    _make_room(place, partial, options, resume)
    try:
        run = _learn(options, partial, said)
        _report(run, partial)
    except KeyboardInterrupt:
        said.line(f"interrupted: go on with `bayesrule fit --resume --out {place}`", always=True)
        raise
    except BaseException:
        _discard(partial)
        raise
    store.put(partial, place)
    _summary(run, place, said)


@tidy
def predict(
    run: Annotated[Path, typer.Argument(help="A run's directory.", show_default=False)],
    data: Annotated[
        str | None, typer.Argument(help="A file with the columns that the run was trained on.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A CSV file; else it is printed.")] = None,
    steps: Annotated[int | None, typer.Option(help="How far ahead to forecast a sequence.  [default: 12]")] = None,
    debug: Annotated[bool, _DEBUG] = False,
) -> None:
    """Predict new rows with uncertainty, as CSV.

    Examples:

      bayesrule predict run/ new.csv --out predictions.csv

      bayesrule predict run/ --steps 24
    """
    from ..runs.store import load_run

    loaded = load_run(run)
    found = loaded.predict(None if data is None else _table(data)[0], steps=steps)
    if out is None:
        _write_csv(found, sys.stdout)
        return
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            _write_csv(found, file)
        Path(temporary).replace(out)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@tidy
def datasets() -> None:
    """List the data that can be used by name."""
    from ..data.datasets import DATASETS

    width = max(map(len, DATASETS))
    for one in DATASETS.values():
        typer.echo(f"{one.name:<{width}}  {one.what} (target: {one.target})")


def _table(data: str) -> tuple[Table, str | None, str | None]:
    """The table, and the target and times that a dataset has by itself."""
    from ..data.datasets import DATASETS
    from ..data.reading import read

    if data in DATASETS and not Path(data).is_file():
        found = DATASETS[data]
        return found.load(), found.target, found.time
    return read(data), None, None


def _make_room(place: Path, partial: Path, options: dict[str, Any], resume: bool) -> None:
    """An empty folder to work in, which remembers what was asked for; what is in the way is left alone."""
    from ..data.tables import InputError
    from ..runs import store

    if place.exists() and not (place.is_dir() and (store.is_run(place) or not any(place.iterdir()))):
        raise InputError(f"{place} is there already, and is not a run: choose another place with --out.")
    if not place.parent.is_dir():
        raise InputError(f"{place.parent} is not a directory: make it first, or choose another place with --out.")
    if not resume:
        _discard(partial)
    partial.mkdir(exist_ok=True)
    if not resume:
        file = partial / "asked.json.new"
        file.write_text(json.dumps(options), encoding="utf-8")
        file.replace(partial / "asked.json")


def _discard(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _learn(options: dict[str, Any], partial: Path, said: _Said) -> Run:
    from ..runs.training import train

    table, target, time = _table(options["data"])
    options = {**options, "target": options.get("target") or target}
    if time is not None and options.get("task") in (None, "sequence"):
        options["time"] = options.get("time") or time
    with said.progress() as show:
        return train(table, options, folder=partial, show=show, say=said.line)


def _report(run: Run, partial: Path) -> None:
    import time

    from ..report.page import page
    from ..runs import store

    began = time.perf_counter()
    text = page(run)
    run.seconds["report"] = round(time.perf_counter() - began, 2)
    (partial / "report.html").write_text(text, encoding="utf-8")
    store.save(run, partial)


def _summary(run: Run, place: Path, said: _Said) -> None:
    ours, theirs = run.metrics["model"], run.metrics["baseline"]
    names = {
        "nll": "NLL (nats)",
        "accuracy": "accuracy",
        "ece": "ECE",
        "rmse": "RMSE",
        "coverage90": "in 90 % interval",
    }
    rows = [(label, ours[name], theirs[name]) for name, label in names.items() if name in ours]
    said.line("")
    said.line(f"{run.summary['test_rows']:,} held-out rows   {run.config['estimator']}   baseline")
    for label, mine, other in rows:
        said.line(f"  {label:<18} {mine:>12.4g} {other:>14.4g}")
    said.line("")
    typer.echo(str(place / "report.html") if said.quiet else f"report: {place / 'report.html'}")


def _write_csv(columns: dict[str, Any], file: Any) -> None:
    import csv

    writer = csv.writer(file)
    writer.writerow(columns)
    shown = [[_cell(value) for value in values] for values in columns.values()]
    writer.writerows(zip(*shown, strict=True))


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


class _Said:
    """What is printed: lines and a progress bar on standard error's terminal, or nothing."""

    def __init__(self, quiet: bool):
        self.quiet = quiet

    def line(self, text: str, *, always: bool = False) -> None:
        if always or not self.quiet:
            typer.echo(text, err=always)

    def progress(self) -> Any:
        from .progress import bar, silent

        return silent() if self.quiet or not sys.stderr.isatty() else bar()
