"""What a fit is asked for: flags before the YAML file before the defaults; and what a run that was cut short had."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..tables.tables import InputError

KEYS = ("data", "target", "task", "model", "recipe", "time", "out", "test_size", "seed", "params")
_DEFAULTS = {"out": "run", "test_size": 0.2, "seed": 0, "params": {}}


def asked(given: dict[str, Any], config: Path | None, params: list[str]) -> dict[str, Any]:
    """The options of a fit, from flags and a file."""
    options = {name: value for name, value in given.items() if value is not None}
    from_file = {} if config is None else _yaml(config)
    settings = {**(from_file.get("params") or {}), **dict(map(_setting, params))}
    options = {**_DEFAULTS, **from_file, **options, "params": settings}
    for name in ("data", "target", "task", "model", "recipe", "time", "out"):
        if options.get(name) is not None and not isinstance(options[name], str):
            raise InputError(f"{name} is text, got {options[name]!r}: put it into quotes.")
    try:
        json.dumps(settings)
    except TypeError as error:
        raise InputError(f"The settings {settings} hold something else than numbers, text and lists.") from error
    if isinstance(options["seed"], bool) or not isinstance(options["seed"], int) or options["seed"] < 0:
        raise InputError(f"seed is a whole number that is not negative, got {options['seed']!r}.")
    if not isinstance(options["test_size"], float | int) or not 0 < options["test_size"] < 1:
        raise InputError(f"test_size is a share between 0 and 1, got {options['test_size']!r}.")
    return options


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        raise InputError(f"There is no file {path}: --config takes a YAML file.")
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {str(error).splitlines()[0]}.") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or (found.get("params") is not None and not isinstance(found["params"], dict)):
        raise InputError(f"{path} has to be a list of options such as `target: price`.")
    wrong = [name for name in found if name not in KEYS]
    if wrong:
        raise InputError(f"{path} has an option {wrong[0]!r} that does not exist: there are {', '.join(KEYS)}.")
    return {name: value for name, value in found.items() if value is not None}


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    name, separator, value = text.partition("=")
    if not separator or not name:
        raise InputError(f"--param takes name=value, such as max_iter=50, got {text!r}.")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InputError(f"--param {text!r} has a value that cannot be read.") from error


def recalled(
    partial: Path, place: Path, options: dict[str, Any], given: set[str], say: Callable[[str], None]
) -> dict[str, Any] | None:
    """What the run that was cut short was asked for; None where it is finished. `given` are this call's options."""
    from ..runs import store

    if store.is_run(partial):  # cut while it was put into its place
        store.put(partial, place)
    if not (partial / "asked.json").exists():
        if store.is_run(place):
            say(f"the run in {place} is finished: there is nothing to go on with")
            return None
        if options.get("data") is not None:  # cut before anything was written down
            say("nothing was saved yet: starting from the beginning")
            return options
        raise InputError(f"There is no run to go on with in {place}: give --out, or start one without --resume.")
    before = json.loads((partial / "asked.json").read_text(encoding="utf-8"))
    for name, value in options.items():
        if name in given and value != before.get(name):
            raise InputError(
                f"The run in {place} was started with {name} = {before.get(name)!r}, not {value!r}: leave it out, or "
                "start a new run without --resume."
            )
    if before.get("state") != state_of(before["data"]):
        raise InputError(
            f"{before['data']} has changed since the run in {place} was started: start a new one without --resume."
        )
    return {name: value for name, value in before.items() if name != "state"}


def state_of(data: str) -> list[int] | None:
    """What tells a file from itself at another time: its size, and when it was written. None for data by name."""
    path = Path(data)
    if not path.is_file():
        return None
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
