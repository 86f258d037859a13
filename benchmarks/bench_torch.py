"""One step in PyTorch on 10⁷ (and 10⁵) float32 parameters: our optimizer against `torch.optim.Adam` and ivon-opt.

The gradients are fixed tensors, so that only the optimizers are timed: the draw, its place in the parameters and the
mean's return, and the step. All take turns. It runs if PyTorch is installed (`pip install torch==2.13.0`), ivon-opt's
part if that is (`pip install ivon-opt==0.1.3`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import compare, fastest

import bayesrule as blr

LEAVES, SIZE, DECAY = 16, 1000, 1e-3
TARGETS = {("adam", "torch Adam"): 1.5, ("ivon", "ivon-opt"): 0.2}


def parameters(count: int, leaves: int) -> list[Any]:
    import torch

    params = [torch.nn.Parameter(torch.full((count // leaves,), 0.1)) for _ in range(leaves)]
    for p in params:
        p.grad = torch.linspace(-1e-3, 1e-3, count // leaves)
    return params


def ours(rule: blr.Rule, count: int, leaves: int, regularizer: float | None = None) -> Callable[[], None]:
    from bayesrule.interop.torch import Optimizer

    optimizer = Optimizer(parameters(count, leaves), rule, size=SIZE, regularizer=regularizer)

    def run() -> None:
        with optimizer.sampled():
            pass
        optimizer.step()

    return run


def torch_adam(count: int, leaves: int, **options: Any) -> Callable[[], None]:
    import torch

    optimizer = torch.optim.Adam(parameters(count, leaves), lr=1e-3, **options)
    return lambda: optimizer.step() and None


def ivon_opt(count: int, leaves: int) -> Callable[[], None] | None:
    try:
        import ivon
    except ImportError:
        return None
    optimizer = ivon.IVON(parameters(count, leaves), lr=0.1, ess=SIZE, weight_decay=DECAY)

    def run() -> None:
        with optimizer.sampled_params(train=True):
            pass
        optimizer.step()

    return run


def main(data: Path | None = None) -> None:
    try:
        import torch  # noqa: F401  (asks whether it is there)
    except ImportError:
        print("PyTorch is not installed.")
        return
    for count, leaves, repeats in (
        (10_000_000, LEAVES, 40),
        (10_000_000, 1, 40),
        (1_000_000, 160, 100),
        (100_000, LEAVES, 200),
    ):
        runs = {
            "adam": ours(blr.adam(1e-3), count, leaves),
            "ivon": ours(blr.ivon(0.1, curvature=1.0), count, leaves, SIZE * DECAY),
            "torch Adam": torch_adam(count, leaves, foreach=True),
        }
        peer = ivon_opt(count, leaves)
        if peer is not None:
            runs["ivon-opt"] = peer
        times = fastest(runs, repeats)
        print(f"{count:,} parameters in {leaves} tensors")
        for name, seconds in times.items():
            print(f"  {name:<20}{1e3 * seconds:8.2f} ms")
        for (name, peer_name), target in TARGETS.items():
            if peer_name in times:
                print(compare(name, times[name], peer_name, times[peer_name], target))


if __name__ == "__main__":
    main()
