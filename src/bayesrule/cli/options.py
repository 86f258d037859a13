"""The options of `bayesrule fit`: flags, then the YAML file, then defaults; and those of a run that is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..tables.options import ReadingOptions
from ..tables.tables import InputError

READING = ("missing", "decimal", "date_format", "sheet", "columns")
NAMES = ("data", "target", "task", "model", "recipe", "time", "out", "test_size", "cv", "seed", *READING, "params")
_TEXT = ("data", "target", "task", "model", "recipe", "time", "out")
_DEFAULTS = {"out": "run", "test_size": 0.2, "seed": 0, "params": {}}


def merge_options(flags: dict[str, Any], config: Path | None, params: list[str]) -> dict[str, Any]:
    """The options of a fit.

    Args:
        flags: the options on the command line, None where they were not given.
        config: a YAML file with options, which flags override.
        params: the values of `--param`, each "name=value".
    """
    from_flags = {name: value for name, value in flags.items() if value is not None}
    from_file = {} if config is None else _read_yaml(config)
    estimator_params = {**(from_file.get("params") or {}), **dict(map(_parse_param, params))}
    options = {**_DEFAULTS, **from_file, **from_flags, "params": estimator_params}
    for name in _TEXT:
        if options.get(name) is not None and not isinstance(options[name], str):
            raise InputError(f"{name} must be text, got {options[name]!r}: put it into quotes.")
    try:
        json.dumps(estimator_params)
    except TypeError as error:
        raise InputError(f"The params {estimator_params} must be numbers, text and lists of these.") from error
    ReadingOptions.from_config(options)  # Raises if one of them is wrong.
    if isinstance(options["seed"], bool) or not isinstance(options["seed"], int) or options["seed"] < 0:
        raise InputError(f"seed must be a whole number, not negative, got {options['seed']!r}.")
    if not isinstance(options["test_size"], float | int) or not 0 < options["test_size"] < 1:
        raise InputError(f"test_size must be a share between 0 and 1, got {options['test_size']!r}.")
    folds = options.get("cv")
    if folds is not None and (isinstance(folds, bool) or not isinstance(folds, int) or folds < 2):
        raise InputError(f"cv must be the number of folds, 2 or more, got {folds!r}.")
    return options


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        raise InputError(f"There is no file {path}: --config takes a YAML file.")
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from error
    if options is None:
        return {}
    if not isinstance(options, dict) or not isinstance(options.get("params"), dict | None):
        raise InputError(f"{path} must be a list of options such as `target: price`.")
    unknown = [name for name in options if name not in NAMES]
    if unknown:
        raise InputError(f"{path} has an option {unknown[0]!r} that does not exist: there are {', '.join(NAMES)}.")
    return {name: value for name, value in options.items() if value is not None}


def _parse_param(text: str) -> tuple[str, Any]:
    import yaml

    name, separator, value = text.partition("=")
    if not separator or not name:
        raise InputError(f"--param takes name=value, such as max_iter=50, got {text!r}.")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"--param {text!r} has a value that is not YAML: put it into quotes.") from error


def parse_column_kinds(texts: list[str] | None) -> dict[str, str] | None:
    """The values of `--column`, each "name=kind", by name; None if there are none."""
    if not texts:
        return None
    parts = [text.rpartition("=") for text in texts]
    wrong = [text for text, (name, _, kind) in zip(texts, parts, strict=True) if not (name and kind)]
    if wrong:
        raise InputError(f"--column takes name=kind, such as zip=category, got {wrong[0]!r}.")
    return {name.strip(): kind.strip() for name, _, kind in parts}


def resume_options(
    partial: Path, out: Path, options: dict[str, Any], explicit: set[str], log: Callable[[str], None]
) -> dict[str, Any] | None:
    """The options of the run that is resumed; None if it is complete.

    Args:
        partial: the directory of the unfinished run.
        out: the directory it will have.
        options: the options of this call.
        explicit: the names of those that were given; they must be the run's.
        log: called with messages for the user.
    """
    from ..runs import store

    if store.is_run(partial):  # It was interrupted when it was complete and only had to be renamed.
        store.publish(partial, out)
    request = store.read_request(partial)
    if request is None:
        if store.is_run(out):
            log(f"the run in {out} is finished: there is nothing to resume")
            return None
        if options.get("data") is not None:  # It was interrupted before anything was saved.
            log("nothing was saved yet: starting from the beginning")
            return options
        raise InputError(f"There is no run to resume in {out}: give --out, or start one without --resume.")
    for name, value in options.items():
        if name in explicit and value != request.get(name):
            raise InputError(
                f"The run in {out} was started with {name} = {request.get(name)!r}, not {value!r}: leave it out, or "
                "start a new run without --resume."
            )
    if request.pop("data_stamp", None) != data_stamp(request["data"]):
        raise InputError(
            f"{request['data']} has changed since the run in {out} was started: start a new one without --resume."
        )
    return request


def data_stamp(data: str) -> list[int] | None:
    """Size and modification time, to detect that the file changed since the run began; None for data by name."""
    path = Path(data)
    if not path.is_file():
        return None
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
