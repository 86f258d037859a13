"""Start a script in several processes on this machine, and watch them: `python -m bayesrule.launch 4 train.py …`.

A step needs all processes, so that the loss of one ends the run: the launcher sees it within a second, says which one
it was, ends the others and exits with a code that is not 0. Signals that ask the launcher to end are passed on, so that
the processes can save. The script calls `bayesrule.join_processes()` before anything else uses JAX.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

_POLL_SECONDS = 0.1
_SAVING_SECONDS = 120.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def launch(count: int, command: Sequence[str], *, grace: float = 10.0, devices: int | None = None) -> int:
    """Run a command in several processes, which find each other through the environment, until all have ended.

    Args:
        count: The number of processes.
        command: The command of each.
        grace: The seconds that the others have to end after one was lost, before they are killed.
        devices: On a CPU, how many devices each process pretends to have; None leaves that as it is.

    Returns:
        0 if all processes ended well; else the exit code of the first that did not, 128 + n if signal n ended it.
    """
    began = time.monotonic()
    address = f"127.0.0.1:{_free_port()}"
    processes = [subprocess.Popen(command, env=_environment(address, count, place, devices)) for place in range(count)]

    def pass_on(number: int, frame: FrameType | None) -> None:
        _signal(processes, number)

    previous = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        while True:
            codes = [process.poll() for process in processes]
            lost = next((place for place, code in enumerate(codes) if code not in (None, 0)), None)
            if lost is not None:
                break
            if None not in codes:
                return 0
            time.sleep(_POLL_SECONDS)
        code = codes[lost] or 0
        asked = code in (128 + signal.SIGTERM, -signal.SIGTERM)  # They save, and end by themselves.
        if not asked:
            seconds = time.monotonic() - began
            print(_message(lost, code, sum(code is None for code in codes), seconds), file=sys.stderr, flush=True)
            _signal(processes, signal.SIGTERM)
        deadline = time.monotonic() + (_SAVING_SECONDS if asked else grace)
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return 128 - code if code < 0 else code
    finally:
        _signal(processes, signal.SIGKILL)
        for process in processes:
            process.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _message(lost: int, code: int, others: int, seconds: float) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (
        f"bayesrule.launch: process {lost} {how} after {seconds:.0f} s. A step needs all processes, so the other "
        f"{others} are ended too. Start the same command again: a fit with checkpoint= goes on from what it has saved."
    )


def _signal(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)


def _environment(address: str, count: int, place: int, devices: int | None) -> dict[str, str]:
    own = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,  # By default it would listen to the whole network.
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(place),
    }
    if devices is not None:
        flag = f"--xla_force_host_platform_device_count={devices}"
        own["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), flag)))
    return {**os.environ, **own}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bayesrule.launch", description="Run a script in several processes on this machine."
    )
    parser.add_argument("processes", type=int, help="how many")
    parser.add_argument("script", help="the script, which calls bayesrule.join_processes() first")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")
    parser.add_argument("--devices", type=int, help="virtual CPU devices for each process")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds to end in, after a process was lost")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error("the number of processes is 1 or more")
    command = [sys.executable, options.script, *options.arguments]
    return launch(options.processes, command, grace=options.grace, devices=options.devices)


if __name__ == "__main__":
    sys.exit(main())
