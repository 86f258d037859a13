"""Pictures of the algorithms of Table 1 and of the paper's figures, each drawn from a run of the rule."""
