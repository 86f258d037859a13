"""What the rule does, as pictures: each runs the rule itself."""
