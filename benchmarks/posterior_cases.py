"""Every posterior with known moments: posteriordb's and the Inference Gym's, and the synthetic ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from posterior_case import Case, Errors, Mode, Moments, judge
from posteriordb_models import FOLDER, read_cases
from synthetic_posteriors import synthetic_cases

__all__ = ["FOLDER", "Case", "Errors", "Mode", "Moments", "judge", "load_cases"]


def load_cases(folder: Path | str = FOLDER, names: Iterable[str] = ()) -> list[Case]:
    """All cases, or those that are named.

    Args:
        folder: has the JSON files of posteriordb and the Inference Gym, itself or in folders of these names; the
            repository's own copy where nothing is said.
        names: of cases, or of groups ("posteriordb", "inference_gym", "synthetic").
    """
    cases = [*read_cases(Path(folder)), *synthetic_cases()]
    wanted = set(names)
    unknown = wanted - {case.name for case in cases} - {case.group for case in cases}
    if unknown:
        raise ValueError(f"No such case: {', '.join(sorted(unknown))}. There are {', '.join(c.name for c in cases)}.")
    return [case for case in cases if not wanted or wanted & {case.name, case.group}]
