"""The families q may come from, one file per kind."""

from .banded import BandedGaussian
from .base import ExponentialFamily, Family
from .categorical_chain import CategoricalChain
from .diagonal import DiagonalGaussian
from .dirichlet import Beta, Dirichlet
from .discrete import Bernoulli, Categorical, Poisson
from .fixed import FixedGaussian
from .gamma import Gamma, NormalGamma
from .gaussian import Gaussian
from .gaussian_chain import GaussianChain
from .kronecker import KroneckerGaussian
from .lowrank import LowRankGaussian
from .mixture import Mixture
from .peak import Peak
from .process import GaussianProcess
from .product import Product
from .shared import SharedGaussian
from .sited import SitedGaussian
from .skew import SkewGaussian
from .spike_slab import SpikeSlab
from .state_space import StateSpace
from .student import StudentT
from .wishart import NormalWishart, Wishart

__all__ = [
    "BandedGaussian",
    "Bernoulli",
    "Beta",
    "Categorical",
    "CategoricalChain",
    "DiagonalGaussian",
    "Dirichlet",
    "ExponentialFamily",
    "Family",
    "FixedGaussian",
    "Gamma",
    "Gaussian",
    "GaussianChain",
    "GaussianProcess",
    "KroneckerGaussian",
    "LowRankGaussian",
    "Mixture",
    "NormalGamma",
    "NormalWishart",
    "Peak",
    "Poisson",
    "Product",
    "SharedGaussian",
    "SitedGaussian",
    "SkewGaussian",
    "SpikeSlab",
    "StateSpace",
    "StudentT",
    "Wishart",
]
