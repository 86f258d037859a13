"""The sections of the report: each file makes one from a run, or says None where the run has nothing for it."""
