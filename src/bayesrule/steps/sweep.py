"""The order in which a model's blocks take their steps, and how many each takes before the next one's turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import equinox as eqx

from .schedule import Number, number


class Sweep(eqx.Module):
    """Blocks in turn instead of all at once: each step starts from where the blocks before it have moved.

    Args:
        order: The blocks, or groups of them that move together. By default every block by itself, local ones first;
            `"parallel"` is one group of all blocks.
        local: With a number, local blocks (one member per row) take full steps, ρ = 1, whatever the rate (SVI): at most
            that many of them at each visit.
        together: How many rows repeat their local steps together, until all of them have converged; by default all.
        peaks: How many steps a block that is read at its mode takes at each visit at most: an M-step without a closed
            form takes several of Newton's.
        tolerance: Local blocks and blocks that are read at their mode stop early if the mean change of λ in every row
            is not above it.

    >>> import bayesrule as blr
    >>> print(Sweep([["w", "b"], "noise"]), "or", Sweep("parallel"))
    in turn w+b, noise or all blocks at once
    >>> print(blr.svi(0.1).steps.sweep)
    block by block, ρ = 1 in local blocks
    """

    tolerance: Any
    order: tuple[tuple[str, ...], ...] | str | None = eqx.field(static=True)
    local: int | None = eqx.field(static=True)
    together: int | None = eqx.field(static=True)
    peaks: int = eqx.field(static=True)

    def __init__(
        self,
        order: Sequence[str | Sequence[str]] | str | None = None,
        *,
        local: int | None = None,
        together: int | None = None,
        peaks: int = 1,
        tolerance: Number = 0.0,
    ):
        if isinstance(order, str) and order != "parallel":
            raise ValueError(f'order= lists blocks, or is "parallel", got {order!r}: use [{order!r}] for one block.')
        if peaks < 1 or (local is not None and local < 1) or (together is not None and together < 1):
            raise ValueError(
                f"A sweep takes at least one step in every block, of one row or more together, got local={local}, "
                f"peaks={peaks}, together={together}."
            )
        self.order = None if order is None else "parallel"
        if order is not None and not isinstance(order, str):
            self.order = tuple((group,) if isinstance(group, str) else tuple(group) for group in order)
        self.local, self.together, self.peaks = local, together, peaks
        self.tolerance = number(tolerance, "The tolerance")

    def groups(self, blocks: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """The groups of blocks in their order, for a model with these blocks."""
        if self.order is None:
            return tuple((name,) for name in blocks)
        if isinstance(self.order, str):
            return (tuple(blocks),)
        named = [name for group in self.order for name in group]
        if set(named) != set(blocks):
            raise ValueError(
                f"The sweep goes over {named}, and the model's blocks are {list(blocks)}: list every block in order=."
            )
        return self.order

    def __str__(self) -> str:
        text = "block by block" if self.order is None else "all blocks at once"
        if isinstance(self.order, tuple):
            text = f"in turn {', '.join('+'.join(group) for group in self.order)}"
        if self.local is not None:
            text += ", ρ = 1 in local blocks" + (f" (up to {self.local} steps)" if self.local > 1 else "")
        return text + (f", up to {self.peaks} steps at a peak" if self.peaks > 1 else "")
