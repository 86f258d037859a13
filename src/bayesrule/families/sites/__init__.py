"""Gaussian priors as base measures, with Gaussian sites on their outputs: processes and chains."""
