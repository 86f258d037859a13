"""The families q may come from, one file per kind."""

from .base import ExponentialFamily, Family
from .diagonal import DiagonalGaussian
from .dirichlet import Beta, Dirichlet
from .discrete import Bernoulli, Categorical, Poisson
from .fixed import FixedGaussian
from .gamma import Gamma, NormalGamma
from .gaussian import Gaussian
from .kronecker import KroneckerGaussian
from .lowrank import LowRankGaussian
from .mixture import Mixture
from .peak import Peak
from .product import Product
from .shared import SharedGaussian
from .skew import SkewGaussian
from .spike_slab import SpikeSlab
from .student import StudentT
from .wishart import NormalWishart, Wishart

__all__ = [
    "Bernoulli",
    "Beta",
    "Categorical",
    "DiagonalGaussian",
    "Dirichlet",
    "ExponentialFamily",
    "Family",
    "FixedGaussian",
    "Gamma",
    "Gaussian",
    "KroneckerGaussian",
    "LowRankGaussian",
    "Mixture",
    "NormalGamma",
    "NormalWishart",
    "Peak",
    "Poisson",
    "Product",
    "SharedGaussian",
    "SkewGaussian",
    "SpikeSlab",
    "StudentT",
    "Wishart",
]
