"""Makes data/ivon_opt.npz: trajectories of ivon-opt 0.1.3 (torch 2.13.0) on an analytic loss, with its noise.

    pip install torch==2.13.0 ivon-opt==0.1.3
    python tests/reference/make_ivon.py

Only the package's public interface is used. The noise is read off the parameters inside `sampled_params`.
"""

from pathlib import Path

import ivon
import numpy as np
import torch

STEPS = 100
CASES = {
    "plain": {"lr": 0.1, "ess": 50.0, "weight_decay": 0.02, "beta1": 0.9, "beta2": 0.99, "hess_init": 0.7},
    "cold": {"lr": 0.05, "ess": 400.0, "weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "hess_init": 1.5},
    "not rescaled": {
        "lr": 0.05, "ess": 50.0, "weight_decay": 0.02, "beta1": 0.9, "beta2": 0.95, "hess_init": 0.7,
        "rescale_lr": False,
    },
    "two samples": {
        "lr": 0.1, "ess": 50.0, "weight_decay": 0.02, "beta1": 0.9, "beta2": 0.95, "hess_init": 0.7, "mc_samples": 2,
    },
}  # fmt: skip


def loss(theta):
    """A smooth loss with positive, negative and vanishing curvature."""
    scale = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.1, 0.7], dtype=theta.dtype)
    return torch.sum(scale * torch.cosh(theta - 0.5)) + 0.3 * torch.sin(theta[0] * theta[1]) - 0.2 * theta[4] ** 2


def main() -> None:
    torch.set_default_dtype(torch.float64)
    arrays = {}
    for name, options in CASES.items():
        torch.manual_seed(0)
        start = torch.tensor([0.3, -0.4, 1.2, 0.0, -1.0, 2.0])
        theta = torch.nn.Parameter(start.clone())
        samples = options.get("mc_samples", 1)
        optimizer = ivon.IVON([theta], **options)
        means, deviations = [], []
        for _ in range(STEPS):
            before = theta.detach().clone()
            for _ in range(samples):
                with optimizer.sampled_params(train=True):
                    deviations.append((theta.detach() - before).numpy().copy())
                    optimizer.zero_grad()
                    loss(theta).backward()
            optimizer.step()
            means.append(theta.detach().numpy().copy())
        arrays[f"{name}/means"] = np.array(means)
        arrays[f"{name}/deviations"] = np.array(deviations).reshape(STEPS, samples, -1)
        arrays[f"{name}/hessian"] = optimizer.param_groups[0]["hess"].detach().numpy().copy()
    np.savez_compressed(Path(__file__).parent / "data" / "ivon_opt.npz", **arrays)


if __name__ == "__main__":
    main()
