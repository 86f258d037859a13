"""A NumPyro model, fitted without tuning: `posterior = fit(model, args, kwargs, key=key)`, with a verdict.

Every continuous latent site becomes a part of θ on its unconstrained space (NumPyro's `biject_to`), and the model's
joint density, with the Jacobians and with its discrete sites summed out, is the density that `bayesrule.infer` infers.
Arrays among the model's arguments stay arguments of the compiled programs: a second fit with other data of the same
shapes compiles nothing.
"""

try:
    # Whether it can be imported is the question.
    import numpyro as _numpyro  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise ImportError("bayesrule.interop.numpyro needs NumPyro: pip install 'bayesrule[numpyro]'.") from error

from .fit import fit, load
from .leave_one_out import LeaveOneOut
from .model import Call, LogJoint, Model, PriorDraw, Traced, Values
from .posterior import NumpyroPosterior

__all__ = [
    "Call",
    "LeaveOneOut",
    "LogJoint",
    "Model",
    "NumpyroPosterior",
    "PriorDraw",
    "Traced",
    "Values",
    "fit",
    "load",
]
