"""Import time against that of what we build on: `import jax, equinox, optax`."""

import subprocess
import sys
from pathlib import Path

PEER = "import jax, equinox, optax"
OURS = {
    "import bayesrule": "import bayesrule",
    "… and bayesrule.Rule": "import bayesrule; bayesrule.Rule",
}
TARGET = 1.3
REPEATS = 7


def seconds(statement: str) -> float:
    """How long a statement takes in a fresh interpreter, its start-up not counted."""
    program = f"from time import perf_counter as t; s = t()\n{statement}\nprint(t() - s)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def main(data: Path | None = None) -> None:
    statements = {PEER: PEER, **OURS}
    for statement in statements.values():  # bytecode and the disk's cache are warm from here on
        seconds(statement)
    times: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(REPEATS):
        for name, statement in statements.items():
            times[name].append(seconds(statement))

    peer = min(times[PEER])
    print(f"{PEER:<28}{1e3 * peer:8.0f} ms")
    for name in OURS:
        ours = min(times[name])
        ratio = ours / peer
        verdict = "ok" if ratio <= TARGET else "MISSED"
        print(f"{name:<28}{1e3 * ours:8.0f} ms   ratio {ratio:5.2f}   target ≤ {TARGET}   {verdict}")


if __name__ == "__main__":
    main()
