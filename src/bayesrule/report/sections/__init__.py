"""The sections of the report: each function makes one from a run, or returns None if the run has no data for it."""
