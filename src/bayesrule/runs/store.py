"""A run as a directory: arrays and JSON, no code; written beside its place and then put there at once."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .. import estimators
from ..estimators.registry import build
from ..fitting.checkpoint import read, write
from ..fitting.result import load as load_result
from ..tables.encoding import Encoding
from ..tables.tables import InputError
from .preprocess import Preparation
from .run import Run

FORMAT = 1
KIND = "bayesrule run"
MARKS = ("asked.json", "asked.json.new", "process")  # of a run that is being made
_ARRAYS = ("trace", "test", "history", "influence")


def partial_folder(out: Path) -> Path:
    """Where a run is while it is made."""
    return out.with_name(out.name + ".partial")


def is_run(folder: Path) -> bool:
    """Whether a whole run is there."""
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8")).get("kind") == KIND
    except (OSError, ValueError, AttributeError):
        return False


def save(run: Run, folder: Path) -> None:
    """Write a run's files into a directory; `run.json` comes last, and says that all are there."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "posterior.npz", _attributes(run.estimator))
    preparation: Preparation | None = run.encoding
    if preparation is not None:
        _json(folder / "preprocessing.json", asdict(preparation.encoding))
        if preparation.filling is not None:
            filling = {"params": preparation.filling.get_params(), "attributes": _attributes(preparation.filling)}
            write(folder / "filling.npz", filling)
    _json(folder / "metrics.json", run.metrics)
    write(folder / "results.npz", {name: dict(getattr(run, name)) for name in _ARRAYS} | {"weights": run.weights})
    said = {
        "kind": KIND,
        "format": FORMAT,
        "config": run.config,
        "summary": run.summary,
        "classes": run.classes,
        "fits": run.fits,
        "facts": run.facts,
        "derivation": run.derivation,
        "seconds": run.seconds,
        "versions": run.versions,
        "params": run.estimator.get_params(),
    }
    _json(folder / "run.json", said)


def put(partial: Path, out: Path) -> None:
    """Move a finished run to its place; the one that was there goes last."""
    for leftover in [*partial.glob("fit*.npz"), *(partial / name for name in MARKS)]:
        leftover.unlink(missing_ok=True)
    old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    if out.exists():
        out.rename(old / out.name)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def discard(partial: Path) -> None:
    """Remove what an earlier fit left; anything else of that name is left alone, and is an error."""
    if not partial.exists():
        return
    names = {path.name for path in partial.iterdir()} if partial.is_dir() else {""}
    if names and not names & {*MARKS, "run.json"}:
        raise InputError(
            f"{partial} is in the way, and is not what a fit left there: move it, or choose another --out."
        )
    shutil.rmtree(partial)


def load_run(folder: str | Path) -> Run:
    """Read a run back. Nothing in the directory is executed."""
    folder = Path(folder)
    if not (folder / "run.json").exists():
        raise InputError(f"{folder} is not a run, and not a file that Result.save wrote: it has no run.json.")
    try:
        said = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        kind, form = said["kind"], said["format"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{folder}/run.json is damaged: fit the run again.") from error
    if kind != KIND:
        raise InputError(f"{folder} is not a run of bayesrule: its run.json says {kind!r}.")
    if form != FORMAT:
        made = said.get("versions", {}).get("bayesrule", "another version")
        raise InputError(
            f"{folder} has the format {form}, and this version reads {FORMAT}: load it with bayesrule {made}, which "
            "wrote it."
        )
    try:
        results = read(folder / "results.npz")
        estimator = _restored(said["config"]["estimator"], said["params"], read(folder / "posterior.npz"))
        return Run(
            config=said["config"],
            summary=said["summary"],
            estimator=estimator,
            encoding=_preparation(folder),
            metrics=json.loads((folder / "metrics.json").read_text(encoding="utf-8")),
            classes=said["classes"],
            fits=said["fits"],
            facts=said["facts"],
            derivation=said["derivation"],
            seconds=said["seconds"],
            versions=said["versions"],
            weights=results.pop("weights"),
            **results,
        )
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{folder} is damaged ({str(error).splitlines()[0]}): fit the run again.") from error


def load(path: str | Path, like: Any = None) -> Any:
    """What `Result.save` or `save` wrote, or the `Run` of a directory that `bayesrule fit` made.

    Parameters that are not plain containers need `like`, any value of the same structure.
    """
    return load_run(path) if Path(path).is_dir() else load_result(path, like)


def _attributes(estimator: Any) -> dict[str, Any]:
    """What was learnt: names that end with an underscore, as scikit-learn has it."""
    return {
        name: value
        for name, value in vars(estimator).items()
        if name.endswith("_") and not name.startswith("_") and name != "feature_names_in_"
    }


def _restored(name: str, params: dict[str, Any], attributes: dict[str, Any]) -> Any:
    if name not in dir(estimators):
        raise InputError(f"the run names an estimator {name!r} that does not exist")
    estimator = build(name, None, params, 0)
    for attribute, value in attributes.items():
        if not attribute.endswith("_") or attribute.startswith("_"):
            raise InputError(f"the run has an attribute {attribute!r} that estimators do not have")
        setattr(estimator, attribute, value)
    return estimator


def _preparation(folder: Path) -> Preparation | None:
    if not (folder / "preprocessing.json").exists():
        return None
    encoding = Encoding(**json.loads((folder / "preprocessing.json").read_text(encoding="utf-8")))
    if not (folder / "filling.npz").exists():
        return Preparation(encoding)
    filling = read(folder / "filling.npz")
    return Preparation(encoding, _restored("FactorAnalysis", filling["params"], filling["attributes"]))


def _json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, default=_plain, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a setting of type {type(value).__name__} cannot be saved")
