"""How every command starts and ends: where compiled programs are kept, what an error looks like."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer

Command = TypeVar("Command", bound=Callable[..., Any])

DEBUG = typer.Option("--debug", help="Show where an error came from.")
EXIT_CODES = "Exit codes: 0 all went well, 1 something failed, 2 wrong input, 130 interrupted."


def cache_folder() -> Path:
    """The user's cache folder for this program."""
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "bayesrule"


def keep_compiled() -> None:
    """JAX's compiled programs are kept between runs, so that the second starts fast; variables that are set stay."""
    if "jax" in sys.modules:  # the process has its own ways
        return
    # Tracing makes many small objects that live as long as the program: looking through them takes a second.
    gc.set_threshold(200_000, 20, 20)
    folder = cache_folder() / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that cannot be written to: compile every time
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA would say of every program that it was kept
    if not _accelerated():
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _accelerated() -> bool:
    """Whether JAX has something else than the processor to look for; looking takes a second."""
    from importlib.util import find_spec

    return any(
        find_spec(name) is not None for name in ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu", "jax_plugins")
    )


def tidy(command: Command) -> Command:
    """A command whose errors are one line, unless it is asked to `debug`."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        keep_compiled()
        debug = kwargs.get("debug", False)
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            _complain("interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise typer.Exit(0) from None
        except (ValueError, OSError) as error:
            if debug:
                raise
            _complain(_line(error))
            raise typer.Exit(2) from None
        except Exception as error:
            if debug:
                raise
            _complain(f"{type(error).__name__}: {_line(error)} (--debug shows where)")
            raise typer.Exit(1) from None

    return wrapped  # pyright: ignore[reportReturnType]  # the same signature, by functools.wraps


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _complain(text: str) -> None:
    typer.echo(f"bayesrule: {text}", err=True)
