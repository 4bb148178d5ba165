"""Device memory (a GPU's) as a memory region: shared with a NIC by a dma-buf descriptor. UNTRIED: no such device was at hand.

The driver that has the memory exports a dma-buf (CUDA: `cuMemGetHandleForAddressRange` with the dma-buf handle type, ROCm:
`hsa_amd_portable_export_dmabuf`); the NIC's driver pins it there, so a peer's WRITE lands in the GPU without touching host DRAM. A CPU
cannot read it through this process: `view` raises, so whoever checks bytes must do it on the device. A NIC or kernel that cannot
do it (Soft-RoCE among them) is an `RdmaLimit` that says so.

Memory that a driver gives an *address* in this process (nvidia-peermem) needs nothing of this: it is registered like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpurt.errors import FabricError

__all__ = ["DeviceRegion"]


@dataclass(frozen=True, slots=True)
class DeviceRegion:
    """`size` bytes at `offset` of the dma-buf `fd`, which stays the caller's. `address`: the device's own, for its users."""

    region_id: int
    name: str
    size: int
    fd: int
    offset: int = 0
    address: int = 0

    @property
    def view(self) -> memoryview:
        """There is none."""
        raise FabricError(self.name, "view", "limit", 0, "device memory cannot be read by the CPU")
