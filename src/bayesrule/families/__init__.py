"""The families that q may belong to, one file for each kind."""

from .base import ExponentialFamily, Family
from .categorical_chain import CategoricalChain
from .dirichlet import Beta, Dirichlet
from .discrete import Bernoulli, Categorical, Poisson
from .gamma import Gamma, NormalGamma
from .gaussian.banded import BandedGaussian
from .gaussian.block_diagonal import BlockDiagonalGaussian
from .gaussian.diagonal import DiagonalGaussian
from .gaussian.fixed import FixedGaussian
from .gaussian.full import Gaussian
from .gaussian.kronecker import KroneckerGaussian
from .gaussian.low_rank import LowRankGaussian
from .gaussian.second_moment import SecondMomentGaussian
from .gaussian.shared import SharedGaussian
from .latent.mixture import Mixture
from .latent.skew_gaussian import SkewGaussian
from .latent.spike_slab import SpikeSlab
from .latent.student_t import StudentT
from .point_mass import Peak, PointMass
from .product import Product
from .sites.base import SitedGaussian
from .sites.chain import GaussianChain
from .sites.process import GaussianProcess
from .sites.state_space import StateSpace
from .wishart import NormalWishart, Wishart

__all__ = [
    "BandedGaussian",
    "Bernoulli",
    "Beta",
    "BlockDiagonalGaussian",
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
    "PointMass",
    "Poisson",
    "Product",
    "SecondMomentGaussian",
    "SharedGaussian",
    "SitedGaussian",
    "SkewGaussian",
    "SpikeSlab",
    "StateSpace",
    "StudentT",
    "Wishart",
]
