"""Starting points of models: clusters, principal axes."""
