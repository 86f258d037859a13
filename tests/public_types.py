"""Whether a strict type checker of a user knows the type of every public name, by `pyright --verifytypes`.

    python tests/public_types.py

It reads the sources as an installed package, reports every public name (and every member of a public class) whose type
is unknown in part or as a whole, and fails if there is one. `make lint` runs it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from test_public import public_definitions

SOURCE = Path(__file__).parent.parent / "src"
# scikit-learn is not typed, so the base classes of estimators are unknown; what the estimators themselves say is not.
UNTYPED_BASES = ("Type of metaclass unknown", "Type of base class")


def verify_types():
    """Pyright's report on the package: its symbols, with what is wrong with each."""
    beside = Path(sys.executable).parent
    paths = {"PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(SOURCE)}
    command = [str(beside / "pyright"), "--verifytypes", "bayesrule", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)["typeCompleteness"]
    if Path(report["packageRootDirectory"]).resolve() != SOURCE.resolve() / "bayesrule":
        raise SystemExit(f"pyright looked at {report['packageRootDirectory']}, and not at {SOURCE}.")
    return report["symbols"]


def main():
    public = tuple(public_definitions())
    is_public = lambda name: name in public or name.startswith(tuple(f"{one}." for one in public))
    symbols = {symbol["name"].removeprefix("bayesrule."): symbol for symbol in verify_types()}
    missing = [name for name in public if name not in symbols]
    if missing:
        raise SystemExit(f"pyright does not see {missing}.")
    problems = []
    for name, symbol in symbols.items():
        if not is_public(name) or symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]:
            continue
        messages = [problem["message"] for problem in symbol["diagnostics"]]
        own = [message for message in messages if not message.startswith(UNTYPED_BASES)]
        problems += [f"{name}: {message.splitlines()[0]}" for message in own]
    checked = sum(map(is_public, symbols))
    print("\n".join(problems) or f"The types of {checked} public names and members are known.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
