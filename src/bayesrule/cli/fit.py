"""`bayesrule fit`: from a table to the directory of a run, with a report."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import DEBUG, one_line_errors
from .reading import DATE_FORMAT, DECIMAL, MISSING, SHEET

if TYPE_CHECKING:
    from ..runs.run import Run
    from ..tables.tables import Table


_QUIET = typer.Option("--quiet", "-q", help="Print nothing but errors and the path of the report.")


@one_line_errors
def fit(
    data: Annotated[
        str | None,
        typer.Argument(
            help="A CSV, Parquet, NPZ or Excel file, or a name from `bayesrule datasets`.", show_default=False
        ),
    ] = None,
    target: Annotated[str | None, typer.Option("--target", "-t", help="The column to predict.")] = None,
    task: Annotated[
        str | None,
        typer.Option(help="regression, binary, classes, counts or sequence; guessed if not given."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="linear, mlp, binary-mlp or gp; state-space or hmm; without a target mixture, topics or "
            "factor-analysis."
        ),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="The algorithm, by its name in `bayesrule table`.")] = None,
    time: Annotated[str | None, typer.Option(help="The column of times; the rows are then a sequence.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The directory of the run (default: run).")] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML file with any of these options.")] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="A parameter of the estimator, name=value; may be repeated."),
    ] = None,
    test_size: Annotated[float | None, typer.Option(help="The share of rows held out (default: 0.2).")] = None,
    cv: Annotated[int | None, typer.Option("--cv", help="Also cross-validate, with so many folds.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="The seed of the split and of all random numbers (default: 0).")
    ] = None,
    missing: Annotated[list[str] | None, MISSING] = None,
    decimal: Annotated[str | None, DECIMAL] = None,
    date_format: Annotated[str | None, DATE_FORMAT] = None,
    sheet: Annotated[str | None, SHEET] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="What a column is, name=kind, where the guess is wrong: number, category, date, skip (leave it out), "
            "or the format of its dates; may be repeated."
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Fit Parquet files on Dask: local:4 starts workers here, tcp://host:8786 or tls://… is a scheduler."
        ),
    ] = None,
    tls_ca: Annotated[Path | None, typer.Option(help="The authority's certificate, for a cluster by TLS.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="This client's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was interrupted.")] = False,
    save_on: Annotated[
        list[str] | None,
        typer.Option(
            help="A signal besides TERM at which to save the fit and to exit with the code 143, such as USR1 for "
            "SLURM's --signal=B:USR1@60; may be repeated."
        ),
    ] = None,
    quiet: Annotated[bool, _QUIET] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Fit a model that predicts a column of a table, with uncertainty, and write a report.

    Examples:

      bayesrule fit breast_cancer

      bayesrule fit houses.csv --target price --model mlp --recipe vogn --out run/

      bayesrule fit sales.csv --target sold --time week --model state-space

      bayesrule fit customers.csv --model mixture

      bayesrule fit 'table/*.parquet' --target y --cluster local:4

      bayesrule fit --config run.yaml --seed 3

      bayesrule fit --resume --out run/
    """
    from ..fitting.interrupt import signals_named
    from ..runs import store
    from ..tables.tables import InputError
    from .options import merge_options, parse_column_kinds, resume_options

    signals = signals_named(["SIGTERM", *(save_on or [])])
    flags = {
        "data": data,
        "target": target,
        "task": task,
        "model": model,
        "recipe": recipe,
        "time": time,
        "out": None if out is None else str(out),
        "test_size": test_size,
        "cv": cv,
        "seed": seed,
        "missing": missing or None,
        "decimal": decimal,
        "date_format": date_format,
        "sheet": sheet,
        "columns": parse_column_kinds(column),
    }
    options = merge_options(flags, config, param or [])
    out_as_given = options.pop("out")
    folder = Path(out_as_given).resolve()
    partial = store.partial_folder(folder)
    output = _Output(quiet)
    if resume:
        explicit = {name for name, value in flags.items() if value is not None} | ({"params"} if param else set())
        options = resume_options(partial, folder, _with_absolute_path(options), explicit, output.print)
        if options is None:
            return
    if options.get("data") is None:
        raise InputError("There is no data to fit: give a file, or a name from `bayesrule datasets`.")
    options = _with_absolute_path(options)
    with ExitStack() as stack:
        if cluster is not None:
            from .cluster import connect

            stack.enter_context(connect(cluster, tls_ca, tls_cert, tls_key))
        folders = folder, partial, out_as_given
        _fit_in_folder(options, folders, output, signals, resume=resume, on_cluster=cluster is not None)


def _fit_in_folder(
    options: dict[str, Any],
    folders: tuple[Path, Path, str],
    output: _Output,
    signals: tuple[signal.Signals, ...],
    *,
    resume: bool,
    on_cluster: bool,
) -> None:
    """Fit, and write the directory of the run; `folders` are that, that of the unfinished run, and --out as given."""
    from ..fitting.interrupt import exit_on
    from ..runs import store

    folder, partial, out_as_given = folders
    # Mistakes in the options are reported before any file is written or deleted.
    table, options, partitions = _load_and_check(options, on_cluster)
    resuming = resume and store.read_request(partial) is not None
    _prepare_folder(folder, partial, options, resuming)
    how_to_resume = f"continue with `bayesrule fit --resume --out {folder}`"
    try:
        with exit_on(signals):
            run = _train(table, options, partial, output, signals, partitions)
            # For the command that the report shows; a directory elsewhere is the author's business.
            run.config["out"] = folder.name if Path(out_as_given).is_absolute() else out_as_given
            _write_report(run, partial)
    except KeyboardInterrupt:
        output.print(f"interrupted: {how_to_resume}", always=True)
        raise
    except SystemExit:
        output.print(f"ended by a signal: {how_to_resume}", always=True)
        raise
    except BaseException as error:
        if not resuming and not any(partial.glob("fit*.npz")):  # Nothing was saved that could be resumed.
            store.discard(partial)
        elif isinstance(error, OSError):
            output.print(f"the fits so far are kept: when there is room, {how_to_resume}", always=True)
        raise
    finally:
        store.release(partial)
    store.publish(partial, folder)
    _print_summary(run, folder, output)


def load_table(data: str, options: dict[str, Any]) -> tuple[Table, str | None, str | None]:
    """The table, and for a data set by name its target and column of times."""
    from ..tables.datasets import DATASETS
    from ..tables.options import ReadingOptions
    from ..tables.reading import read

    if data in DATASETS and not Path(data).is_file():
        entry = DATASETS[data]
        return entry.load(), entry.target, entry.time
    return read(data, ReadingOptions.from_config(options)), None, None


def _with_absolute_path(options: dict[str, Any]) -> dict[str, Any]:
    """The options with the absolute path of a data file, so that a run can be resumed from any directory."""
    data = options.get("data")
    return {**options, "data": str(Path(data).resolve())} if data is not None and Path(data).is_file() else options


def _load_and_check(options: dict[str, Any], on_cluster: bool) -> tuple[Table, dict[str, Any], Any]:
    """The table (a sample of one in partitions), the options with the target and times of a data set by name, and the
    partitions; raises if the options do not fit the table."""
    from ..runs.train import check_config
    from ..tables.tables import InputError

    partitions = None
    if on_cluster:
        partitions = _load_partitions(options)
        table, target, time = partitions.sample, None, None
    else:
        table, target, time = load_table(options["data"], options)
    options = {**options, "target": options.get("target") or target}
    if time is not None and options.get("task") in (None, "sequence"):
        options["time"] = options.get("time") or time
    try:
        check_config(table, options)
    except InputError as error:
        if not table.notes:
            raise
        # What was guessed about the file, such as its sheet, may be the reason.
        raise InputError(f"{error} ({'; '.join(table.notes)})") from error
    return table, options, partitions


def _load_partitions(options: dict[str, Any]) -> Any:
    """A table in Dask's partitions; raises where its model is not one that is fitted to them."""
    from ..runs.partitioned import read_partitioned
    from ..tables.options import ReadingOptions
    from ..tables.tables import InputError

    wrong = [name for name in ("time", "cv") if options.get(name) is not None]
    if wrong or options.get("model") not in (None, "linear") or options.get("task") == "sequence":
        what = f"--{wrong[0]}" if wrong else "sequences and other models"
        raise InputError(f"--cluster fits --model linear to independent rows, not {what}: leave one of them out.")
    return read_partitioned(options["data"], ReadingOptions.from_config(options))


def _prepare_folder(folder: Path, partial: Path, options: dict[str, Any], resuming: bool) -> None:
    """Make the directory of the unfinished run and save its options there; raise if something is in the way."""
    from ..runs import store
    from ..tables.tables import InputError
    from .options import data_stamp

    if folder.exists() and not (folder.is_dir() and (store.is_run(folder) or not any(folder.iterdir()))):
        raise InputError(f"{folder} exists and is not a run: choose another directory with --out.")
    if not folder.parent.is_dir():
        raise InputError(f"{folder.parent} is not a directory: make it first, or choose another one with --out.")
    if store.is_claimed(partial):
        raise InputError(f"Another fit is writing {folder}: wait for it, or choose another directory with --out.")
    if not resuming:
        store.discard(partial)
        partial.mkdir()
        store.write_request(partial, {**options, "data_stamp": data_stamp(options["data"])})
    store.claim(partial)


def _train(
    table: Table,
    options: dict[str, Any],
    partial: Path,
    output: _Output,
    signals: tuple[signal.Signals, ...],
    partitions: Any = None,
) -> Run:
    from ..runs.cross_validate import summarize
    from ..runs.train import train

    if partitions is not None or Path(options["data"]).is_file():
        # A run is meant to be shared: it records the name of the data file, not the directories of its author.
        options = {**options, "data": Path(options["data"]).name}
    with output.progress_bar() as show:
        how = {"on_progress": show, "log": output.print, "signals": signals}
        # Other models would be fitted to the sample, and are no references for a model of all rows.
        run = train(table, options, folder=partial, references=partitions is None, partitions=partitions, **how)
    if options.get("cv") is not None:
        run.metrics["cv"] = summarize(table, run.config, options["cv"])
    return run


def _write_report(run: Run, partial: Path) -> None:
    import time

    from ..report.page import render_report
    from ..runs import store

    began = time.perf_counter()
    text = render_report(run)
    run.seconds["report"] = round(time.perf_counter() - began, 2)
    (partial / "report.html").write_text(text, encoding="utf-8")
    store.save(run, partial)


def _print_summary(run: Run, folder: Path, output: _Output) -> None:
    labels = {
        "nll": "NLL (nats)",
        "accuracy": "accuracy",
        "auroc": "AUROC",
        "ece": "ECE",
        "rmse": "RMSE",
        "coverage90": "in 90 % interval",
        "log_density": "log density (nats)",
        "perplexity": "perplexity",
    }
    others = [(each["name"], each["metrics"]) for each in run.metrics.get("references") or ()]
    shown = [(run.config["estimator"], run.metrics["model"]), ("baseline", run.metrics["baseline"]), *others]
    output.print("")
    rows = f"{run.summary['test_rows']:,} held-out rows"
    output.print(f"{rows:<24}" + "".join(f"   {name:>14}" for name, _ in shown))
    for name, label in labels.items():
        if name in run.metrics["model"]:
            cells = [f"{scores[name]:.4g}" if name in scores else "" for _, scores in shown]
            widths = [max(14, len(title)) for title, _ in shown]
            output.print(f"  {label:<22}" + "".join(f"   {cell:>{w}}" for cell, w in zip(cells, widths, strict=True)))
    cv = run.metrics.get("cv")
    if cv is not None:
        output.print("")
        output.print(f"{cv['folds']} folds, {cv['rows']:,} rows")
        for name, label in labels.items():
            if name in cv["model"]:
                error = f" ± {cv['errors'][name]:.2g}" if name in cv["errors"] else ""
                output.print(f"  {label:<22}   {cv['model'][name]:>14.4g}{error}")
    if run.facts.get("bound") is not None:
        from ..fitting.bound import with_error

        output.print("")
        normalized = run.facts.get("bound_normalized", True)
        bound = with_error(run.facts["bound"], run.facts.get("bound_error"), normalized)
        output.print(f"  bound (nats)       {bound}")
    output.print("")
    report = folder / "report.html"
    report = report.relative_to(Path.cwd()) if report.is_relative_to(Path.cwd()) else report
    typer.echo(str(report) if output.quiet else f"report: {report}")


class _Output:
    """What the command prints: messages, and a progress bar if standard error is a terminal; with `quiet` neither."""

    def __init__(self, quiet: bool):
        self.quiet = quiet

    def print(self, message: str, *, always: bool = False) -> None:
        """Print a message unless `quiet`; one that is `always` printed goes to standard error."""
        if always or not self.quiet:
            typer.echo(message, err=always)

    def progress_bar(self) -> Any:
        from .progress import bar, no_bar

        return no_bar() if self.quiet or not sys.stderr.isatty() else bar()
