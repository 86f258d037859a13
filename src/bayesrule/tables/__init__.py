"""Tables: read from files, described, and encoded as numbers for a model; and the task that a target suggests."""
