"""Device profiles by name, each with the source of its figures. Data only.

"vendor" marks what only a maker or an article repeating it claims; nobody here has measured it. Figures the
sources do not give (writes, mostly) are assumed, and said to be. A device of one's own is measured, not
claimed: see `dpurt.replay.measured_device`.
"""

from __future__ import annotations

from dpurt.core.device_model import DeviceProfile

__all__ = ["DEVICES"]

_WRITES = "; write figures assumed"

DEVICES = {
    profile.name: profile
    for profile in (
        DeviceProfile(
            name="ai_ssd",
            read_latency_s=100e-6,
            write_latency_s=30e-6,
            read_bytes_per_s=14e9,
            write_bytes_per_s=7e9,
            source="vendor: AI SSD tier of 2026 articles, 14 GB/s, ~100 us" + _WRITES,
        ),
        DeviceProfile(
            name="pcie5_tlc",
            read_latency_s=100e-6,
            write_latency_s=30e-6,
            read_bytes_per_s=14e9,
            write_bytes_per_s=7e9,
            source="vendor: Kioxia CM9 class, PCIe 5 TLC, 14 GB/s; latency of the AI SSD tier" + _WRITES,
        ),
        DeviceProfile(
            name="xl_flash",
            read_latency_s=33e-6,
            write_latency_s=15e-6,
            read_bytes_per_s=14e9,
            write_bytes_per_s=10e9,
            queue_depth=128,
            source="vendor: InnoGrit N3X class, XL-FLASH, 14 GB/s, latency a third of TLC's" + _WRITES,
        ),
        DeviceProfile(
            name="fdp",
            read_latency_s=100e-6,
            write_latency_s=30e-6,
            read_bytes_per_s=14e9,
            write_bytes_per_s=10e9,
            source="vendor: DapuStor X5 class with FDP, write amplification < 1.5; "
            "read figures of a PCIe 5 drive" + _WRITES,
        ),
        DeviceProfile(
            name="qlc",
            read_latency_s=200e-6,
            write_latency_s=60e-6,
            read_bytes_per_s=7e9,
            write_bytes_per_s=3e9,
            source="vendor: Solidigm D5 class, QLC, 60 TB and more; read figures of the ordinary NVMe tier, "
            "3-7 GB/s, ~200 us" + _WRITES,
        ),
        DeviceProfile(
            name="nvme",
            read_latency_s=200e-6,
            write_latency_s=30e-6,
            read_bytes_per_s=7e9,
            write_bytes_per_s=5e9,
            source="vendor: ordinary NVMe tier of 2026 articles, upper end of 3-7 GB/s, ~200 us" + _WRITES,
        ),
        DeviceProfile(
            name="nvme_slow",
            read_latency_s=200e-6,
            write_latency_s=30e-6,
            read_bytes_per_s=3e9,
            write_bytes_per_s=2e9,
            source="vendor: ordinary NVMe tier of 2026 articles, lower end of 3-7 GB/s, ~200 us" + _WRITES,
        ),
        DeviceProfile(
            name="storage_node",
            read_latency_s=100e-6,
            write_latency_s=30e-6,
            read_bytes_per_s=28e9,
            write_bytes_per_s=14e9,
            queue_depth=256,
            source="vendor: storage node of 2026 articles, lower end of 28-42 GB/s sustained" + _WRITES,
        ),
    )
}
