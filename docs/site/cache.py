"""What takes long is computed in a process of its own and kept under `.cache/docs` until its sources change."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "docs"
SOURCE = ROOT / "src" / "bayesrule"
# The programs are small, and compiling them takes most of the time.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)
log = logging.getLogger("mkdocs.hooks.bayesrule")


@cache
def _hash_of_the_library() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        digest.update(str(path.relative_to(SOURCE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def results_of(program: Path, *arguments: Path, name: str) -> Path:
    """The folder that `python program *arguments folder` has filled, from the cache if nothing has changed.

    It is run again when the program, a file among its arguments or the library changes. A program that fails ends the
    build with what it wrote.
    """
    digest = hashlib.sha256(_hash_of_the_library().encode())
    for path in (program, *arguments):
        digest.update(path.read_bytes())
    folder = CACHE / f"{name}-{digest.hexdigest()[:16]}"
    if folder.exists():
        return folder
    log.info(f"Running {name}")
    CACHE.mkdir(parents=True, exist_ok=True)
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
        "JAX_PLATFORMS": "cpu",
        "MPLBACKEND": "Agg",
        "PYTHONIOENCODING": "utf-8",
        "XLA_FLAGS": XLA_FLAGS,
    }
    with tempfile.TemporaryDirectory(dir=CACHE, prefix=".running-") as unfinished:
        command = [sys.executable, str(program), *map(str, arguments), unfinished]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=settings | os.environ, encoding="utf-8", cwd=ROOT
        )
        if done.returncode != 0:
            raise PluginError(f"{name} failed:\n{done.stdout}{done.stderr}")
        for older in CACHE.glob(f"{name}-*"):
            shutil.rmtree(older)
        shutil.copytree(unfinished, folder)
    return folder
