"""A run as a directory of arrays and JSON, without executable code.

A run is made in `<out>.partial/` and renamed to `<out>/` when it is complete, so that `<out>/` is never half a run. The
unfinished one holds what `--resume` needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..estimators.registry import build_estimator, estimator_class
from ..fitting.checkpoint import naming_the_file, read, sync_folder, write
from ..fitting.result import load as load_result
from ..models.column_gaussian import ColumnGaussian
from ..tables.encoding import Encoding
from ..tables.tables import InputError
from .preprocess import Preprocessing
from .run import Run

FORMAT = 3
_FORMATS = (1, 2, 3)  # Runs of format 1 have no manifest, those before 3 no structure.
KIND = "bayesrule run"
MANIFEST = "manifest.json"
"""In a run: the SHA-256 digest of every file that `load_run` reads, by which a damaged file is found."""
REQUEST = "request.json"
"""In an unfinished run: the options it was started with, and the size and modification time of its data file."""
PID = "pid"
"""In an unfinished run: the id of the process that works on it."""
_UNFINISHED = (REQUEST, f"{REQUEST}.new", PID)
# Unfinished runs of earlier versions, which can be resumed, have other names.
_OLD_NAMES = {"asked.json": REQUEST, "process": PID}
_ARRAYS = ("trace", "test", "history", "influence")
_FILES = ("posterior.npz", "preprocessing.json", "filling.npz", "metrics.json", "results.npz", "run.json")
# Fitted attributes that were renamed, so that older runs still load.
_RENAMED_ATTRIBUTES = {"how_": "prediction_method_"}


def partial_folder(out: Path) -> Path:
    """The directory of an unfinished run, beside the one that it will have."""
    return out.with_name(out.name + ".partial")


def write_request(partial: Path, request: dict[str, Any]) -> None:
    """Save the options of an unfinished run; the file is complete or absent, whenever the process is killed."""
    temporary = partial / f"{REQUEST}.new"
    with naming_the_file(partial / REQUEST):
        temporary.write_text(json.dumps(request), encoding="utf-8")
        temporary.replace(partial / REQUEST)


def read_request(partial: Path) -> dict[str, Any] | None:
    """The options that an unfinished run was started with; None if it did not get as far as saving them."""
    for name in (REQUEST, "asked.json"):
        if (partial / name).exists():
            request = json.loads((partial / name).read_text(encoding="utf-8"))
            return {"data_stamp" if key == "state" else key: value for key, value in request.items()}
    return None


def claim(partial: Path) -> None:
    """Note that this process works on the unfinished run, and give the files of an older version their new names."""
    for old, new in _OLD_NAMES.items():
        if (partial / old).exists():
            (partial / old).replace(partial / new)
    (partial / PID).write_text(str(os.getpid()), encoding="utf-8")


def release(partial: Path) -> None:
    """Note that no process works on the unfinished run any more."""
    (partial / PID).unlink(missing_ok=True)


def is_claimed(partial: Path) -> bool:
    """Whether another process, which is still alive, works on the unfinished run."""
    for name in (PID, "process"):
        try:
            number = int((partial / name).read_text(encoding="utf-8"))
            os.kill(number, 0)  # Signal 0 only asks whether the process exists.
        except (OSError, ValueError):
            continue
        if number != os.getpid():
            return True
    return False


def is_run(folder: Path) -> bool:
    """Whether a directory holds a complete run."""
    try:
        return json.loads((folder / "run.json").read_text(encoding="utf-8")).get("kind") == KIND
    except (OSError, ValueError, AttributeError):
        return False


def save(run: Run, folder: Path) -> None:
    """Write a run's files into a directory. The manifest is written last: a directory with it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    write(folder / "posterior.npz", _attributes(run.estimator))
    if run.encoding is not None:
        _write_json(folder / "preprocessing.json", asdict(run.encoding.encoding))
        write(folder / "filling.npz", {**asdict(run.encoding.columns), "seed": run.encoding.seed})
    _write_json(folder / "metrics.json", run.metrics)
    write(
        folder / "results.npz",
        {name: dict(getattr(run, name)) for name in _ARRAYS} | {"weights": run.weights, "structure": run.structure},
    )
    description = {
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
    _write_json(folder / "run.json", description)
    write_manifest(folder)


def write_manifest(folder: Path) -> None:
    """Write the digests of a run's files as they are now."""
    _write_json(folder / MANIFEST, _manifest(folder))


def _manifest(folder: Path) -> dict[str, Any]:
    """What the manifest of a run says where no file has changed."""
    paths = [folder / name for name in _FILES if (folder / name).exists()]
    return {"kind": KIND, "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}}


def publish(partial: Path, out: Path) -> None:
    """Rename a complete run to its final directory; a run that was there is deleted only after that."""
    # Checkpoints and those before them, and what a killed process had begun to write.
    saved = [*partial.glob("fit*.npz*"), *partial.glob(".*.npz*")]
    for leftover in [*saved, *(partial / name for name in (*_UNFINISHED, *_OLD_NAMES))]:
        leftover.unlink(missing_ok=True)
    previous = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    try:
        if out.exists():
            out.rename(previous / out.name)
        partial.rename(out)
    except OSError:  # The run that was there is put back, and the new one can be published by --resume.
        if (previous / out.name).exists():
            (previous / out.name).rename(out)
        previous.rmdir()
        raise
    sync_folder(out.parent)
    shutil.rmtree(previous, ignore_errors=True)


def discard(partial: Path) -> None:
    """Delete an unfinished run. A directory of that name that no fit made is an error, and stays."""
    if not partial.exists():
        return
    names = {path.name for path in partial.iterdir()} if partial.is_dir() else {""}
    if names and not names & {*_UNFINISHED, *_OLD_NAMES, "asked.json.new", "run.json"}:
        raise InputError(f"{partial} is in the way, and was not made by a fit: move it, or choose another --out.")
    shutil.rmtree(partial)


def load_run(folder: str | Path) -> Run:
    """Read a run from its directory. Nothing in it is executed."""
    folder = Path(folder)
    if not (folder / "run.json").exists():
        raise InputError(f"{folder} is not a run: it has no run.json. Give the directory that `bayesrule fit` made.")
    try:
        description = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        kind, file_format = description["kind"], description["format"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{folder}/run.json is damaged: fit the run again.") from error
    if kind != KIND:
        raise InputError(f"{folder} is not a run of bayesrule: its run.json has the kind {kind!r}.")
    if file_format not in _FORMATS:
        writer = description.get("versions", {}).get("bayesrule", "another version")
        raise InputError(
            f"{folder} has the format {file_format}, and this version reads {FORMAT}: load it with bayesrule {writer}, "
            "which wrote it."
        )
    if file_format != 1 or (folder / MANIFEST).exists():
        _check_manifest(folder)
    try:
        results = read(folder / "results.npz")
        attributes = read(folder / "posterior.npz")
        return Run(
            config=description["config"],
            summary=description["summary"],
            estimator=_restore(description["config"]["estimator"], description["params"], attributes),
            encoding=_load_preprocessing(folder),
            metrics=json.loads((folder / "metrics.json").read_text(encoding="utf-8")),
            classes=description["classes"],
            fits=description["fits"],
            facts=description["facts"],
            derivation=description["derivation"],
            seconds=description["seconds"],
            versions=description["versions"],
            weights=results.pop("weights"),
            **results,
        )
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise InputError(f"{folder} is damaged ({str(error).splitlines()[0]}): fit the run again.") from error


def _check_manifest(folder: Path) -> None:
    """Raise unless every file of a run is as it was written."""
    now = _manifest(folder)
    try:
        written = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        changed = [name for name in _FILES if now["files"].get(name) != written["files"].get(name)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{folder} is damaged: its {MANIFEST} cannot be read. Fit the run again.") from error
    if now != written:
        what = f"{' and '.join(changed) or MANIFEST} changed since the run was written"
        raise InputError(f"{folder} is damaged: {what}. Fit the run again.")


def load(path: str | Path, like: Any = None) -> Any:
    """Read what `Result.save` or `save` wrote, or the `Run` in a directory that `bayesrule fit` made.

    Args:
        path: the file or directory.
        like: any value of the same structure, needed for parameters that are not plain containers.

    >>> import bayesrule as blr, tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     blr.save(Path(folder) / "posterior.npz", {"rate": blr.Gamma(2.0, 3.0)})
    ...     blr.load(Path(folder) / "posterior.npz")
    {'rate': Gamma(shape=f...[], rate=f...[])}
    """
    return load_run(path) if Path(path).is_dir() else load_result(path, like)


def _attributes(estimator: Any) -> dict[str, Any]:
    """The fitted attributes of an estimator: by scikit-learn's convention, the names that end with an underscore."""
    return {
        name: value
        for name, value in vars(estimator).items()
        if name.endswith("_") and not name.startswith("_") and name != "feature_names_in_"
    }


def _restore(name: str, params: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """A fitted estimator from its parameters and attributes. Names from a file are checked before they are used."""
    if estimator_class(name) is None:
        raise InputError(f"the run names an estimator {name!r} that does not exist")
    estimator = build_estimator(name, None, params, 0)
    for attribute, value in attributes.items():
        if not attribute.endswith("_") or attribute.startswith("_"):
            raise InputError(f"the run has an attribute {attribute!r} that estimators do not have")
        setattr(estimator, _RENAMED_ATTRIBUTES.get(attribute, attribute), value)
    return estimator


def _load_preprocessing(folder: Path) -> Preprocessing | None:
    if not (folder / "preprocessing.json").exists():
        return None
    encoding = Encoding(**json.loads((folder / "preprocessing.json").read_text(encoding="utf-8")))
    if not (folder / "filling.npz").exists():
        # Earlier versions wrote none where nothing was missing in training, and nothing is known about how columns
        # depend on one another.
        return Preprocessing.without_dependence(encoding)
    saved = read(folder / "filling.npz")
    if "attributes" in saved:  # Earlier versions wrote the attributes of a factor analysis.
        factors = saved["attributes"]
        loadings, noise = np.asarray(factors["components_"]).T, np.asarray(factors["noise_variance_"])
        return Preprocessing(encoding, ColumnGaussian(np.asarray(factors["mean_"]), loadings, noise))
    seed = int(saved.pop("seed"))
    return Preprocessing(encoding, ColumnGaussian(**saved), seed)


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1, default=_as_json, ensure_ascii=False)
    with naming_the_file(path):
        path.write_text(text + "\n", encoding="utf-8")


def _as_json(value: Any) -> Any:
    """NumPy's values as Python's, which JSON can hold."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"A parameter of type {type(value).__name__} cannot be saved in a run.")
