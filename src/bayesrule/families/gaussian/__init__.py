"""Gaussian families, one file for each structure of the precision."""
