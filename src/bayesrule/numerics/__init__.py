"""Numerical ground floor: linear algebra, special functions, random numbers, pytrees. Knows no distribution."""
