"""Where is the loss evaluated? One file for each kind of points."""
