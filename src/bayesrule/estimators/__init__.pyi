from .factor_analysis import PPCA as PPCA
from .factor_analysis import FactorAnalysis as FactorAnalysis
from .gaussian_process import GaussianProcessClassifier as GaussianProcessClassifier
from .gaussian_process import GaussianProcessRegressor as GaussianProcessRegressor
from .hmm import CategoricalHMM as CategoricalHMM
from .hmm import GaussianHMM as GaussianHMM
from .hmm import PoissonHMM as PoissonHMM
from .linear import LogisticRegression as LogisticRegression
from .linear import PoissonRegression as PoissonRegression
from .mixture import GaussianMixture as GaussianMixture
from .networks import BinaryMLPClassifier as BinaryMLPClassifier
from .networks import MLPClassifier as MLPClassifier
from .networks import MLPRegressor as MLPRegressor
from .ridge import RidgeRegression as RidgeRegression
from .state_space import LinearGaussianStateSpace as LinearGaussianStateSpace
from .topics import LatentDirichletAllocation as LatentDirichletAllocation

EXPORTS: dict[str, str]
