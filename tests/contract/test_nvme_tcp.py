"""The NVMe/TCP bdev keeps the contract, on targets of both kinds."""

from __future__ import annotations

import pytest
import trio

from dpurt.bdev import Bdev
from dpurt.bdev.factory import open_bdev
from dpurt.testing.bdev_contract import MIN_BYTES, check_bdev
from dpurt.testing.fake_spdk.nvme_target import SUBSYSTEM, FakeNvmeTarget, Namespace, Style

STYLES = {
    "spdk": (Style(), {}),
    "spdk-flow-control": (Style(), {"sq_flow_control": True}),
    "kernel": (Style.kernel(), {"num_queues": 3, "queue_size": 16}),
    "digests": (Style(c2h_bytes=20_000), {"header_digest": True, "data_digest": True}),
    "aligned": (Style(alignment=15, padding=36, max_h2c_bytes=4096, r2t_bytes=40_000), {"queue_size": 2}),
    "no-deallocate": (Style(has_deallocate=False, max_io_bytes=2 << 20), {"data_digest": True}),
}


@pytest.mark.parametrize("style", STYLES)
async def test_nvme_tcp_keeps_the_contract(style: str) -> None:
    shape, params = STYLES[style]
    target = FakeNvmeTarget({1: Namespace(MIN_BYTES)}, style=shape)

    async with trio.open_nursery() as nursery:
        port = await target.listen(nursery)

        async def make() -> Bdev:
            return await open_bdev("nvme-tcp", addresses=[("127.0.0.1", port)], subnqn=SUBSYSTEM, **params)

        async def reopen(bdev: Bdev) -> Bdev:
            return await make()

        await check_bdev(make, reopen=reopen)
        nursery.cancel_scope.cancel()
