"""`bayesrule fit`: from a table to a run directory with a report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import DEBUG as _DEBUG
from .errors import tidy

if TYPE_CHECKING:
    from ..runs.run import Run
    from ..tables.tables import Table


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
    from ..tables.tables import InputError
    from .options import asked, recalled

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
    place = Path(options.pop("out")).resolve()
    partial = store.partial_folder(place)
    said = _Said(quiet)
    if resume:
        names = {name for name, value in given.items() if value is not None} | ({"params"} if param else set())
        options = recalled(partial, place, _located(options), names, said.line)
        if options is None:
            return
    if options.get("data") is None:
        raise InputError("Say what to learn from: a file, or a name from `bayesrule datasets`.")
    options = _located(options)
    table, options = _settled(options)  # what is wrong with them is said before anything is touched
    going_on = (partial / "asked.json").exists() and resume
    _make_room(place, partial, options, going_on)
    try:
        run = _learn(table, options, partial, said)
        _report(run, partial)
    except KeyboardInterrupt:
        said.line(f"interrupted: go on with `bayesrule fit --resume --out {place}`", always=True)
        raise
    except BaseException:
        if not going_on and not any(partial.glob("fit*.npz")):  # else there is something to go on with
            store.discard(partial)
        raise
    finally:
        (partial / "process").unlink(missing_ok=True)
    store.put(partial, place)
    _summary(run, place, said)


def _table(data: str) -> tuple[Table, str | None, str | None]:
    """The table, and the target and times that a dataset has by itself."""
    from ..tables.datasets import DATASETS
    from ..tables.reading import read

    if data in DATASETS and not Path(data).is_file():
        found = DATASETS[data]
        return found.load(), found.target, found.time
    return read(data), None, None


def _located(options: dict[str, Any]) -> dict[str, Any]:
    """With the whole path of a file, so that a run can be resumed from anywhere."""
    data = options.get("data")
    return {**options, "data": str(Path(data).resolve())} if data is not None and Path(data).is_file() else options


def _settled(options: dict[str, Any]) -> tuple[Table, dict[str, Any]]:
    """The table, and the options with what its name brings along."""
    from ..runs.train import settled

    table, target, time = _table(options["data"])
    options = {**options, "target": options.get("target") or target}
    if time is not None and options.get("task") in (None, "sequence"):
        options["time"] = options.get("time") or time
    settled(table, options)
    return table, options


def _make_room(place: Path, partial: Path, options: dict[str, Any], going_on: bool) -> None:
    """A folder to work in, which remembers what was asked for; what is in the way is left alone."""
    from ..runs import store
    from ..tables.tables import InputError
    from .options import state_of

    if place.exists() and not (place.is_dir() and (store.is_run(place) or not any(place.iterdir()))):
        raise InputError(f"{place} is there already, and is not a run: choose another place with --out.")
    if not place.parent.is_dir():
        raise InputError(f"{place.parent} is not a directory: make it first, or choose another place with --out.")
    if _at_work(partial / "process"):
        raise InputError(f"Another fit is at work on {place}: wait for it, or choose another place with --out.")
    if not going_on:
        store.discard(partial)
        partial.mkdir()
        file = partial / "asked.json.new"
        file.write_text(json.dumps({**options, "state": state_of(options["data"])}), encoding="utf-8")
        file.replace(partial / "asked.json")
    (partial / "process").write_text(str(os.getpid()), encoding="utf-8")


def _at_work(file: Path) -> bool:
    """Whether the process that left its number is alive, and another one."""
    try:
        number = int(file.read_text(encoding="utf-8"))
        os.kill(number, 0)
    except (OSError, ValueError):
        return False
    return number != os.getpid()


def _learn(table: Table, options: dict[str, Any], partial: Path, said: _Said) -> Run:
    from ..runs.train import train

    if Path(options["data"]).is_file():  # a report is shown around: it has the file's name, and not whose it is
        options = {**options, "data": Path(options["data"]).name}
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
    report = place / "report.html"
    report = report.relative_to(Path.cwd()) if report.is_relative_to(Path.cwd()) else report
    typer.echo(str(report) if said.quiet else f"report: {report}")


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
