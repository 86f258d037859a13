"""Models to start from: small networks as plain functions over dictionaries of arrays."""

from .networks import BatchNetwork, Network, binary_mlp, cnn, gaussian_nll, mlp, softmax_cross_entropy

__all__ = ["BatchNetwork", "Network", "binary_mlp", "cnn", "gaussian_nll", "mlp", "softmax_cross_entropy"]
