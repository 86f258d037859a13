"""Where models start: clusters for mixtures and hidden Markov models, principal components for latent variables."""
