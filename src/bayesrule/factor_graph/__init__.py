"""Models of named blocks and factors: messages are derivatives in μ."""
