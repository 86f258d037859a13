"""The time of the import, compared with that of the libraries it builds on: `import jax, equinox, optax`."""

import subprocess
import sys
from pathlib import Path

from timing import compare

PEER = "import jax, equinox, optax"
OURS = {
    "import bayesrule": "import bayesrule",
    "… and bayesrule.Rule": "import bayesrule; bayesrule.Rule",
}
TARGET = 1.3
REPEATS = 7


def seconds(statement: str) -> float:
    """The seconds of a statement in a fresh interpreter, without the interpreter's start."""
    program = f"from time import perf_counter as t; s = t()\n{statement}\nprint(t() - s)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def main(data: Path | None = None) -> None:
    statements = {PEER: PEER, **OURS}
    for statement in statements.values():  # The first import writes bytecode and fills the disk cache.
        seconds(statement)
    times: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(REPEATS):
        for name, statement in statements.items():
            times[name].append(seconds(statement))

    peer = min(times[PEER])
    print(f"{PEER:<28}{1e3 * peer:8.0f} ms")
    for name in OURS:
        print(f"{name:<28}{1e3 * min(times[name]):8.0f} ms")
        print(compare(name, min(times[name]), "its dependencies", peer, TARGET))


if __name__ == "__main__":
    main()
