"""The device that computes: whether it is there and knows the dtype, and what memory it has left."""

import psutil
import torch

from epd_engine.machine.cgroup import memory_left


class DeviceError(Exception):
    """A device that cannot run the model as asked; the message says why, and what to do."""


def find_device(name: str, dtype: torch.dtype) -> torch.device:
    """Makes a GPU this thread's current one. Raises `DeviceError` for a device that is unknown or absent, or
    cannot compute in `dtype`.

    Every CPU computes in all three, if by detours (`has_products`).
    """
    unknown = DeviceError(f"--device {name}: give cpu, cuda, or one of several such as cuda:1")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown from error
    if device.type not in ("cpu", "cuda"):
        raise unknown
    if device.type == "cpu":
        return device
    if (device.index or 0) >= (count := torch.cuda.device_count()):
        raise DeviceError(
            f"--device {name}: {count or 'no'} CUDA devices are to be seen here (torch {torch.__version__}); "
            f"without one, start with --device cpu"
        )
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability(device) < (8, 0):
        gpu = torch.cuda.get_device_name(device)
        raise DeviceError(f"{gpu} does not compute in bfloat16: start with --dtype float16 or float32")
    # Kernels of Python packages run on the current one, wherever their tensors are.
    torch.cuda.set_device(device)
    return device


def check_alive(device: torch.device) -> None:
    """Raises what a GPU raises at everything once a kernel's fault has made it useless to this process."""
    if device.type == "cuda":
        torch.zeros(1, device=device).item()


def has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether it has kernels for products of such matrices, and not only a loop of torch's."""
    if device.type == "cpu" and dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if device.type == "cpu" and dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def free_memory(device: torch.device) -> int:
    """Bytes that are left for this process to take, within the limits of its container."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limit = memory_left()
    available = int(psutil.virtual_memory().available)
    return available if limit is None else min(limit, available)
