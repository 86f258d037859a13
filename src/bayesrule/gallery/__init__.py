"""Pictures of Table 1, each drawn from a run of the rule."""
