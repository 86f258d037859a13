"""`bayesrule compare`: several models of one table, cross-validated on the same folds, on one page."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import DEBUG, one_line_errors
from .reading import DATE_FORMAT, DECIMAL, MISSING, SHEET

if TYPE_CHECKING:
    from ..runs.run import Comparison


@one_line_errors
def compare(
    data: Annotated[str, typer.Argument(help="A file, or a name from `bayesrule datasets`.", show_default=False)],
    target: Annotated[str | None, typer.Option("--target", "-t", help="The column to predict.")] = None,
    task: Annotated[
        str | None, typer.Option(help="regression, binary, classes or counts; guessed if not given.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", help="A model, or model:recipe such as mlp:vogn; may be repeated (default: all that can)."
        ),
    ] = None,
    cv: Annotated[int, typer.Option("--cv", help="The number of folds.")] = 5,
    seed: Annotated[int, typer.Option(help="The seed of the folds and of all random numbers.")] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("compare.html"),
    missing: Annotated[list[str] | None, MISSING] = None,
    decimal: Annotated[str | None, DECIMAL] = None,
    date_format: Annotated[str | None, DATE_FORMAT] = None,
    sheet: Annotated[str | None, SHEET] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the path.")] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Compare models of a column of a table: every row is predicted by fits that did not see it.

    Beside the models of this library stand a prediction without inputs and scikit-learn's boosted trees.

    Examples:

      bayesrule compare breast_cancer

      bayesrule compare houses.csv --target price --model linear --model mlp:ivon --cv 10
    """
    from ..report.compare_page import render_comparison
    from ..runs.cross_validate import compare as compare_models
    from ..tables.tables import InputError
    from .fit import load_table

    if out.is_dir():
        raise InputError(f"{out} is a directory: --out is the name of the page, such as compare.html.")
    if not out.resolve().parent.is_dir():
        raise InputError(f"{out.resolve().parent} is not a directory: make it first.")
    if seed < 0:
        raise InputError(f"seed must be a whole number, not negative, got {seed}.")
    reading = {"missing": missing, "decimal": decimal, "date_format": date_format, "sheet": sheet}
    table, own_target, time = load_table(data, reading)
    if time is not None and task in (None, "sequence"):
        raise InputError("compare is for independent rows: fit each model of a sequence with `bayesrule fit`.")
    name = Path(data).name if Path(data).is_file() else data
    config = {"data": name, "target": target or own_target, "task": task, "seed": seed}
    say = (lambda message: None) if quiet else typer.echo
    with _status(quiet) as show:
        comparison = compare_models(table, config, model or [], cv, log=say, on_fold=show)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        temporary.write_text(render_comparison(comparison), encoding="utf-8")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    _print_table(comparison, say)
    typer.echo(str(out) if quiet else f"\npage: {out}")


def _status(quiet: bool) -> Any:
    """A line that says which model is at which fold, in the terminal of standard error."""
    from contextlib import contextmanager

    @contextmanager
    def status() -> Any:
        if quiet or not sys.stderr.isatty():
            yield lambda name, number: None
            return
        from rich.console import Console

        with Console(stderr=True).status("") as shown:
            yield lambda name, number: shown.update(f"{name}: {number} folds done")

    return status()


def _print_table(comparison: Comparison, say: Any) -> None:
    """The scores, the best model first, and how far the others are from it."""
    from ..runs.cross_validate import difference

    fitted = [each for each in comparison.candidates if not each.failure]
    if not fitted:
        return
    names = ("accuracy", "auroc") if comparison.classes else ("rmse", "coverage90")
    labels = {"accuracy": "accuracy", "auroc": "AUROC", "rmse": "RMSE", "coverage90": "in 90 % interval"}
    shown = [name for name in names if name in fitted[0].metrics]
    width = max(len(each.name) for each in fitted)
    say(f"\n{comparison.summary['rows']:,} rows, {comparison.config['folds']} folds; NLL in nats, lower is better")
    heads = "".join(f"{labels[name]:>18}" for name in shown)
    say(f"  {'':<{width}}{'NLL':>10}   {'difference ± s.e.':>20}{heads}{'seconds':>10}")
    for each in fitted:
        gap = "" if each is fitted[0] else "{:.4f} ± {:.4f}".format(*difference(each.losses, fitted[0].losses))
        scores = "".join(f"{each.metrics[name]:>18.4g}" for name in shown)
        say(f"  {each.name:<{width}}{each.metrics['nll']:>10.4f}   {gap:>20}{scores}{each.seconds:>10.1f}")
