"""`python -m bayesrule` is the command line."""

from .cli import app

app()
