"""Why a fit ended: an enumeration whose members are the strings that users compare with and files hold."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why a fit ended. A member equals and prints as its string, and `message` says what it means.

    Inside the compiled loop a reason is the integer `code`; 0 means that nothing has ended the loop so far.

    >>> Reason.CONVERGED == "converged", f"{Reason.CONVERGED}", Reason("steps").code
    (True, 'converged', 0)
    >>> Reason.STALLED.message
    'no fraction of the step that the guard tried was acceptable'
    """

    message: str

    STEPS = "steps", "all steps were taken"
    CONVERGED = "converged", "the estimated distance to the optimum fell below the tolerance"
    NOT_FINITE = "not finite", "the loss or one of its derivatives was not a finite number"
    OUTSIDE = "left the domain", "the natural parameter λ left Ω"
    STALLED = "stalled", "no fraction of the step that the guard tried was acceptable"
    INTERRUPTED = "interrupted", "it was interrupted (Ctrl-C, or a signal that asked to save)"
    PRECISION_LOST = "precision lost", "rounding errors are larger than the tolerance"
    COARSE_POINTS = "points too coarse", "it converged at its own points, which are too coarse for the integrals"
    STOPPED = "stopped early", "the validation metric no longer improved, or on_step ended the fit"

    def __new__(cls, value: str, message: str) -> Reason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.message = message
        return member

    @property
    def code(self) -> int:
        """The integer that stands for this reason inside the compiled loop."""
        return list(Reason).index(self)

    @property
    def rejected_a_step(self) -> bool:
        """Whether the last step was measured but not taken; the trace has an entry for it, the count has not."""
        return self in (Reason.NOT_FINITE, Reason.OUTSIDE, Reason.STALLED)

    @staticmethod
    def of(code: int) -> Reason:
        """The reason with this code."""
        return list(Reason)[code]

    def __repr__(self) -> str:
        return repr(self.value)
