"""The NVMe/RDMA bdev against an implementation that is not ours: the Linux kernel's target over Soft-RoCE, in the test
VM.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trio

from dpurt.bdev import Bdev
from dpurt.bdev.buffers import aligned_buffer
from dpurt.bdev.nvme import Pacing
from dpurt.bdev.nvme_rdma import NvmeRdmaBdev
from dpurt.errors import BdevError
from dpurt.testing.bdev_contract import check_bdev

pytestmark = pytest.mark.vm

NQN = os.environ.get("DPURT_VM_NQN", "")
NVMET = Path("/sys/kernel/config/nvmet")
MAIN = ("10.9.0.1", 4430)
PATIENT = Pacing(connect_s=60.0)


@contextlib.asynccontextmanager
async def opened(*addresses: tuple[str, int], **params: object) -> AsyncIterator[NvmeRdmaBdev]:
    bdev = await NvmeRdmaBdev.open(addresses or [MAIN], NQN, pacing=PATIENT, **params)  # type: ignore[arg-type]
    async with contextlib.aclosing(bdev):
        yield bdev


def soon(seconds: float = 60.0) -> float:
    return trio.current_time() + seconds


def noise(length: int, seed: int = 0) -> memoryview:
    buffer = aligned_buffer(length)
    buffer[:] = random.Random(seed).randbytes(length)
    return buffer


async def read(bdev: Bdev, offset: int, length: int) -> memoryview:
    buffer = aligned_buffer(length)
    await bdev.read_into(offset, [buffer], soon())
    return buffer


async def test_what_is_written_is_read() -> None:
    async with opened() as bdev:
        print(bdev.info)
        data = noise(1 << 20)
        await bdev.write_from(1 << 20, [data], soon())
        assert await read(bdev, 1 << 20, len(data)) == data
