"""Tables: read from files, described, guessed at, and turned into numbers that a model takes."""
