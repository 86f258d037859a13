"""Other libraries' objects as this one takes them; each in a module of its own, as some are optional dependencies."""
