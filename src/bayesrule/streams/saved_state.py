"""The state of somebody else's iterator as a tree that a checkpoint holds: plain values and arrays, and no code."""

from __future__ import annotations

from typing import Any

import numpy as np


def pack(state: Any) -> Any:
    """A state as a tree of lists, plain values and NumPy arrays, each value with its kind in front of it.

    >>> unpack(pack({"epoch": 3, 7: (b"ab", None, [1.5])}))
    {'epoch': 3, 7: (b'ab', None, [1.5])}
    """
    if state is None or isinstance(state, bool | int | float | str):
        return ["plain", state]
    if isinstance(state, bytes):
        return ["bytes", np.frombuffer(state, np.uint8)]
    if isinstance(state, dict):
        return ["dict", [[pack(key), pack(value)] for key, value in state.items()]]
    if isinstance(state, list | tuple):
        return ["list" if isinstance(state, list) else "tuple", [pack(value) for value in state]]
    if isinstance(state, np.ndarray | np.generic):
        return ["array", np.asarray(state)]
    if type(state).__module__.partition(".")[0] == "torch" and hasattr(state, "numpy"):
        return ["tensor", state.numpy()]
    raise ValueError(
        f"The state of the data's iterator has a {type(state).__name__}, and a checkpoint holds numbers, text and "
        "arrays alone, no code: let the state consist of these, or remove checkpoint=."
    )


def unpack(packed: Any) -> Any:
    """The state that `pack` was given."""
    kind, value = packed
    if kind == "plain":
        return value
    if kind == "bytes":
        return np.asarray(value, np.uint8).tobytes()
    if kind == "dict":
        return {unpack(key): unpack(each) for key, each in value}
    if kind in ("list", "tuple"):
        values = [unpack(each) for each in value]
        return values if kind == "list" else tuple(values)
    if kind == "tensor":
        import torch

        return torch.from_numpy(np.array(value))
    return np.asarray(value)
