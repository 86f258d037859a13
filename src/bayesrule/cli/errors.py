"""What all commands share: one-line errors with exit codes, and a cache of compiled programs between runs."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import typer

from ..numerics.disk_cache import default_folder, has_accelerator_plugin

Command = TypeVar("Command", bound=Callable[..., Any])

DEBUG = typer.Option("--debug", help="Show where an error came from.")
EXIT_CODES = (
    "Exit codes: 0 success, 1 failure (or a failed check), 2 wrong input, 130 interrupted, 143 ended by a signal."
)


def configure_jax() -> None:
    """Set JAX's environment variables, those that the user has not set, so that commands start quickly and quietly.

    Compiled programs are kept on disk between runs. JAX reads the variables when it is imported, so that nothing is
    done in a process that has imported it.

    XLA logs every program that it writes to disk, which are warnings. On processors with AVX-512 it also logs two
    errors, of 3 kB, for every program that it reads: it compares the features for which the program was compiled with
    those of the processor, and takes "prefer-no-gather" and "prefer-no-scatter", which only tell the compiler what is
    fast, for instructions that the processor lacks. Nothing true is lost with these messages, because a program of
    another processor is never read: the features are in the key by which JAX looks for it, and
    `tests/test_jax_canaries.py` holds that. Where there are devices other than the CPU, errors are shown.
    """
    if "jax" in sys.modules:
        return
    # Tracing makes many small objects that live as long as the program; frequent garbage collection costs a second.
    gc.set_threshold(200_000, 20, 20)
    if not has_accelerator_plugin():  # Then JAX need not search for devices, which takes a second.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    folder = default_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # The home directory cannot be written to, and every run compiles.
        return
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # 3 leaves out errors, which XLA raises as well where they are not the ones above; 2 leaves out warnings.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if os.environ.get("JAX_PLATFORMS") == "cpu" else "2")


def one_line_errors(command: Command) -> Command:
    """Decorate a command: errors become one line on standard error and an exit code, unless `--debug` is given."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        configure_jax()
        debug = kwargs.get("debug", False)
        try:
            return command(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            _print_error("interrupted")
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise typer.Exit(0) from None
        except (ValueError, OSError) as error:
            if debug:
                raise
            _print_error(_one_line(error))
            raise typer.Exit(2) from None
        except Exception as error:
            if debug:
                raise
            _print_error(f"{type(error).__name__}: {_one_line(error)} (--debug shows where)")
            raise typer.Exit(1) from None

    return wrapped  # pyright: ignore[reportReturnType]  # functools.wraps keeps the signature.


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _print_error(message: str) -> None:
    typer.echo(f"bayesrule: {message}", err=True)
