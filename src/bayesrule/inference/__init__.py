"""Inference without tuning: a posterior for any log density, and a verdict on how far to trust it."""
