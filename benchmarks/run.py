"""Run the benchmarks: every `bench_*.py` of this folder, each in a fresh interpreter.

A benchmark is a file with `main(data)`, where `data` is a folder of data sets or None. It runs our algorithms and their
peers in turns and prints the ratios of the least times with their targets (see timing.py). The fresh interpreter keeps
the compiled programs and settings (float64, threads) of one benchmark out of the next.
"""

import argparse
import importlib.util
import multiprocessing
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def run(path: Path, data: Path | None) -> None:
    """Import the benchmark and call its `main`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(data)


def main() -> int:
    benchmarks = {path.stem.removeprefix("bench_"): path for path in sorted(FOLDER.glob("bench_*.py"))}
    parser = argparse.ArgumentParser(description="Measure bayesrule against its peers.")
    parser.add_argument("--data", type=Path, help="folder with the larger data sets")
    parser.add_argument("--only", nargs="+", choices=benchmarks, metavar="NAME", help=", ".join(benchmarks))
    arguments = parser.parse_args()

    failed = []
    for name in arguments.only or benchmarks:
        print(f"\n{name}\n{'─' * len(name)}", flush=True)
        process = multiprocessing.get_context("spawn").Process(target=run, args=(benchmarks[name], arguments.data))
        process.start()
        process.join()
        if process.exitcode:
            failed.append(name)
    if failed:
        print(f"\nThese benchmarks failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
