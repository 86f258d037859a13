"""Compiled programs on disk, so that another process need not compile them again.

`keep_programs()` turns JAX's compilation cache on, for this process and for those that it starts. Worker processes of
joblib (`GridSearchCV(n_jobs=2)`, `cross_val_score`) do so by themselves when an estimator arrives, unless the user has
decided otherwise: each of them would compile every program that another worker, or the last search, has compiled.

Nothing here imports JAX at the top, because `quiet_workers` has to run before JAX is imported.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LEAST_SECONDS = 0.05  # Programs that compile in less time are not worth a file.


def default_folder() -> Path:
    """The folder of compiled programs among the user's caches, by the operating system's convention."""
    home = Path.home()
    if sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "bayesrule" / "jax"


def keep_programs(folder: str | Path | None = None) -> Path:
    """Keep compiled programs on disk, for this process and all that it starts from now on.

    A program that was compiled before by any of them is read from its file, in a tenth of the time. Without this call
    every process compiles its own, except for joblib's workers. Call it before JAX is imported, at the top of a
    program: then XLA does not log the programs that it reads.

    Args:
        folder: where; by default the user's cache folder. It is made if it does not exist.

    Returns:
        The folder.
    """
    if _has_only_cpu():  # As for workers, see `quiet_workers`; where JAX was imported before, only for these.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import jax

    path = default_folder() if folder is None else Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)  # It holds machine code: nobody else may write there.
    settings = {
        "jax_compilation_cache_dir": str(path),
        "jax_persistent_cache_min_compile_time_secs": _LEAST_SECONDS,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)  # JAX reads them where it is imported next, in a child process.
    _forget_decision()
    return path


@cache
def keep_programs_in_workers() -> None:
    """Turn the cache on in a worker process of joblib or multiprocessing; elsewhere, or where it is on, do nothing.

    Called when an estimator is unpickled. `JAX_ENABLE_COMPILATION_CACHE=0` turns it off.
    """
    import jax

    config: Any = jax.config  # Its settings are attributes that no type names.
    if not _is_worker() or config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    try:
        keep_programs()
    except OSError:  # The home directory cannot be written to, and every process compiles.
        return


def quiet_workers() -> None:
    """Keep XLA from logging every program that a worker reads from disk, unless the user has set the level of its log.

    Called where the package is imported, because XLA reads the level when it is loaded. On processors with AVX-512 it
    takes "prefer-no-gather", which tells the compiler what is fast, for an instruction that the processor lacks, and
    logs two errors of 3 kB for every program. Nothing true is lost with them: the processor's features are in the key
    by which a program is looked for. Errors are logged where there are devices other than the CPU.
    """
    if "jax" not in sys.modules and "multiprocessing" in sys.modules and _is_worker() and _has_only_cpu():
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def has_accelerator_plugin() -> bool:
    """Whether a plugin of JAX for a GPU or TPU is installed."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu", "jax_plugins")
    return any(find_spec(name) is not None for name in plugins)


def _has_only_cpu() -> bool:
    return os.environ.get("JAX_PLATFORMS") == "cpu" or not has_accelerator_plugin()


def _is_worker() -> bool:
    """Whether this process was started by another one of Python's, to work for it."""
    is_loky = multiprocessing.current_process().name.startswith("LokyProcess")
    return is_loky or multiprocessing.parent_process() is not None


def _forget_decision() -> None:
    """JAX decides at the first compilation whether there is a cache; let it decide again."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
