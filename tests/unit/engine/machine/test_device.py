"""Devices by name, and what is free on them."""

import psutil
import pytest
import torch

from epd_engine.machine.device import DeviceError, find_device, free_memory


@pytest.mark.parametrize("name", ["tpu", "mps", "meta", "cuda:x", ""])
def test_a_device_that_is_not_known_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(DeviceError, match=f"--device {name}: give cpu, cuda, or one of several"):
        find_device(name, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cpu_computes_in_each_dtype(dtype: torch.dtype) -> None:
    assert find_device("cpu", dtype) == torch.device("cpu")


def test_no_more_is_free_than_the_machine_has() -> None:
    assert 0 < free_memory(torch.device("cpu")) <= psutil.virtual_memory().total
