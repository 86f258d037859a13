"""Models to start from, as plain functions of arrays.

Small networks are here; `kalman` and `linear_gaussian` (state spaces, known and learnt), `hmm`, `gp`, `sparse_gp` and
`kernels`, `mixture`, `factor_analysis`, `topics` and `series` are modules of their own.
"""

from .networks import BatchNetwork, Network, binary_mlp, cnn, gaussian_nll, mlp, softmax_cross_entropy

__all__ = ["BatchNetwork", "Network", "binary_mlp", "cnn", "gaussian_nll", "mlp", "softmax_cross_entropy"]
