"""Models to start from, as plain functions of arrays.

Public are the names below and these modules, which are imported by name (`from bayesrule.models import kalman`):

| module | what it has |
|---|---|
| `kalman` | linear-Gaussian state spaces with known matrices: filter, smoother, likelihood, forecasts |
| `linear_gaussian` | the same with unknown matrices, as a `Model` |
| `hmm` | hidden Markov models: Gaussian, Poisson, categorical or any factor's emissions |
| `mixture`, `factor_analysis`, `topics` | Gaussian mixtures, factor analysis and PPCA, latent Dirichlet allocation |
| `gp`, `sparse_gp`, `kernels` | Gaussian processes, dense, as chains or with inducing points, and their kernels |
| `sequences` | series of different lengths as rows of data |
| `landscapes` | test functions with many known minima |

The other modules serve the estimators and runs and may change: `regression`, `ridge`, `component_predictive`,
`factor_analysis_missing`, `column_gaussian` and the starting points in `starts`.
"""

from .networks import BatchNetwork, Network, binary_mlp, cnn, gaussian_nll, mlp, softmax_cross_entropy

__all__ = ["BatchNetwork", "Network", "binary_mlp", "cnn", "gaussian_nll", "mlp", "softmax_cross_entropy"]
