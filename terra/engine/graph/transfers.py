"""Asynchronous copies between host and device, fills that don't synchronize, events that mark how far a device is."""

from collections.abc import Callable

import torch
from jaxtyping import Int64
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Begin to copy a tensor of the CPU to a device, behind the work that the device has been given before.

    The host does not wait for that work, as it would if the copy were from memory that is not pinned. A tensor that is
    pinned already must not be changed until the copy is done.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fill(tensor: Tensor, dim: int, index: int | Int64[Tensor, " n"], number: int) -> None:
    """Fill a tensor with a number at one index of a dimension, or at several, without synchronizing with the device.

    An assignment, `tensor[index] = number`, copies the number to the device and waits for that copy where
    `tensor[index]` has no dimension left or `index` is a tensor.
    """
    if isinstance(index, int):
        tensor.select(dim, index).fill_(number)
    else:  # `index_fill_` is not implemented for FP8
        tensor[(slice(None),) * dim + (index,)] = tensor.new_full((), number)


def to_host(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to copy tensors of one device to the CPU; the result waits for the copies.

    Work that the device is given later does not change them.
    """
    copies = tuple(tensor.to("cpu", copy=True, non_blocking=True) for tensor in tensors)
    copied = mark(tensors[0].device)

    def wait() -> tuple[Tensor, ...]:
        copied()
        return copies

    return wait


def mark(device: torch.device) -> Callable[[], None]:
    """A mark behind all work that the device has been given; the result waits until the device has come there.

    A CPU has done its work when it returns, so that there is nothing to wait for.
    """
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
