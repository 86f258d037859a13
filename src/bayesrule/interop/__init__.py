"""Ways in for people who already have a loop, a module or a model: optax, flax, equinox, PyTorch, NumPyro."""
