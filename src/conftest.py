"""A module whose extra is not installed has no doctests to run."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["bayesrule/interop/torch.py", "bayesrule/interop/torch_memory.py"]
