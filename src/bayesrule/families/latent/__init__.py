"""Families of the form ∫ q(θ | w) q(w) dw: mixtures, Student-t, skew Gaussian, spike and slab."""
