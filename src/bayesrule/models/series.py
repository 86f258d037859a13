"""The former name of `sequences`."""

from .sequences import sequences as sequences
