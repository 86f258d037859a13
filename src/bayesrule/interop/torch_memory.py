"""PyTorch's tensors as JAX's arrays and back, over the same memory where that is possible.

What JAX reads is PyTorch's own memory (DLPack), if it is contiguous and aligned, as PyTorch allocates it; JAX copies it
otherwise. What JAX has computed is copied into the tensor that is already there, so that a parameter keeps its storage,
its strides and its version counter, and whoever else holds it sees the change. JAX computes asynchronously: the caller
waits (`jax.block_until_ready`) before PyTorch may write to what JAX reads, or read what JAX writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch

_LARGE = 2**14
"""From so many numbers on memory is shared; below, a copy takes less time than DLPack's 0.1 ms of bookkeeping."""


_DTYPES = {
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
}


def shape_of(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the tensor as JAX's array."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"Parameters are of {', '.join(map(str, _DTYPES))}, and one is of {tensor.dtype}.")
    return jax.ShapeDtypeStruct(tuple(tensor.shape), _DTYPES[tensor.dtype])


def check_device(device: torch.device) -> None:
    """Raise where JAX cannot compute on a tensor's device."""
    if device.type == "cpu":
        return
    try:
        found = device.type == "cuda" and bool(jax.devices("gpu"))
    except RuntimeError:
        found = False
    if not found:
        raise ValueError(
            f"The parameters are on {device}, where the step is computed too, and this JAX has only "
            f"{sorted({d.platform for d in jax.devices()})}. Install JAX for that device (jax[cuda12]), or keep the "
            "parameters on the CPU."
        )


def to_jax(tensor: torch.Tensor) -> Any:
    """What JAX reads: the tensor's own memory, or a copy if it is small, not contiguous or not aligned."""
    tensor = tensor.detach().contiguous()
    if tensor.device.type != "cpu" or tensor.numel() >= _LARGE:
        return jax.dlpack.from_dlpack(tensor)
    if tensor.dtype == torch.bfloat16:  # which NumPy knows by JAX's name only
        return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


def to_own_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy in JAX's own memory, which a program may use for its results."""
    return jnp.array(to_jax(tensor), copy=True)


def to_own_torch(array: jax.Array) -> torch.Tensor:
    """A copy in PyTorch's own memory."""
    return torch.from_dlpack(jax.block_until_ready(array)).clone()


def write(tensors: Iterable[torch.Tensor], arrays: Iterable[jax.Array]) -> None:
    """Copy what JAX has computed into the tensors. The arrays must be ready."""
    for tensor, array in zip(tensors, arrays, strict=True):
        tensor.copy_(torch.from_dlpack(array))
