"""Makes data/dynamax_hmm.npz: dynamax 1.0.3's filter, smoother and best path of a chain whose weights are drawn.

    pip install dynamax==1.0.3
    python tests/reference/make_dynamax.py

It needs nightly builds of TensorFlow Probability, so that the tests read its numbers from the file.
"""

import os
from pathlib import Path

import numpy as np

os.environ["JAX_ENABLE_X64"] = "1"

from dynamax.hidden_markov_model import hmm_posterior_mode, hmm_two_filter_smoother

FILE = Path(__file__).parent / "data" / "dynamax_hmm.npz"


def main() -> None:
    random = np.random.default_rng(6)
    initial = random.dirichlet(np.ones(4))
    transitions = random.dirichlet(np.full(4, 0.7), 4)
    log_likelihoods = 3 * random.normal(size=(60, 4))
    actual = hmm_two_filter_smoother(initial, transitions, log_likelihoods)
    np.savez_compressed(
        FILE,
        initial=initial,
        transitions=transitions,
        log_likelihoods=log_likelihoods,
        log_likelihood=actual.marginal_loglik,
        filtered=actual.filtered_probs,
        smoothed=actual.smoothed_probs,
        pairs=actual.trans_probs,
        path=hmm_posterior_mode(initial, transitions, log_likelihoods),
    )


if __name__ == "__main__":
    main()
