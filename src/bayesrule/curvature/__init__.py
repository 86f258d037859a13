"""What is measured at the points? The gradient, and what stands for the Hessian."""
