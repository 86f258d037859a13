"""The objective ℓ̄(θ): losses over examples, batches of them, and regularizers."""
