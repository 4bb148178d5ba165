"""NVMe/RDMA: the namespaces of any NVMe over RDMA target as bdevs; the target's adapter moves the bytes.

Theory of operation. Memory the bdev was given is registered, and each command names its data there by address and key:
the target writes a read's data straight into our buffers, and reads a write's from them, without a copy or a cycle of
ours. A command has one such descriptor (Linux takes no more), so operations are cut where their memory is not in one
piece. Buffers elsewhere work, by a copy.

Connections are made by the RDMA connection manager, whose private data the targets want. What is on the wire is
`dpurt.wire.nvme_rdma`, queue pairs and completions `dpurt.rdma`; paths, retries and deadlines are `dpurt.bdev.nvme`.

RoCE v2 over IPv4 only (see `dpurt.rdma.device`). No in-band authentication, no memory windows: the target may reach
all added memory for as long as it is connected, so it has to be trusted with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from dpurt.bdev import DeviceMemory
from dpurt.bdev.nvme import NvmeBdev, Pacing
from dpurt.bdev.nvme_association import QueueShape
from dpurt.bdev.nvme_opening import Address, find_subsystem, make_login
from dpurt.bdev.nvme_rdma_memory import Memory
from dpurt.bdev.nvme_rdma_queue import RdmaConnection
from dpurt.errors import BdevError, QueuePairError, RdmaLimit, RdmaUnavailable
from dpurt.rdma.binding import missing
from dpurt.rdma.cm import CmId
from dpurt.rdma.device import why_off
from dpurt.wire.nvme_queue import Completion
from dpurt.wire.nvme_rdma import MAX_IN_CAPSULE_BYTES

__all__ = ["NvmeRdmaBdev"]


class _RdmaTransport:
    """A `Transport`."""

    kind = "nvme-rdma"

    def __init__(self) -> None:
        self._memory = Memory()

    def runs(self, pieces: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
        return self._memory.layout.runs(pieces, most)

    async def add_memory(self, memory: DeviceMemory) -> None:
        await self._memory.add(memory.address, memory.length)

    def close(self) -> None:
        self._memory.close()

    async def connect(
        self,
        nursery: trio.Nursery,
        address: Address,
        shape: QueueShape,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
    ) -> RdmaConnection:
        try:
            connection = await self._connect(address, shape, deliver, lost)
        except (QueuePairError, RdmaLimit, RdmaUnavailable) as error:
            raise OSError(str(error)) from error
        nursery.start_soon(connection.watch)
        return connection

    async def _connect(
        self,
        address: Address,
        shape: QueueShape,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
    ) -> RdmaConnection:
        host, service = await _resolve_name(address)
        cm = CmId()
        try:
            port = self._memory.port(*await cm.resolve(host, service))
        except BaseException:
            cm.close()
            raise
        in_capsule = min(shape.in_capsule_bytes, MAX_IN_CAPSULE_BYTES)
        connection = RdmaConnection(
            cm, port, self._memory, shape.queue_id, shape.size, in_capsule, deliver, lost
        )
        try:
            await connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection


async def _resolve_name(address: Address) -> Address:
    """To an IPv4 address. Raises OSError."""
    found = await trio.socket.getaddrinfo(*address, family=trio.socket.AF_INET, type=trio.socket.SOCK_STREAM)
    host, port = found[0][4][:2]
    return str(host), int(port)


class NvmeRdmaBdev(NvmeBdev[Address]):
    """See `Bdev`. Make one with `await NvmeRdmaBdev.open(...)`."""

    @classmethod
    async def open(
        cls,
        addresses: Sequence[Address],
        subnqn: str,
        *,
        nsid: int | None = None,
        name: str | None = None,
        hostnqn: str | None = None,
        num_queues: int = 1,
        queue_size: int = 128,
        keep_alive_s: float = 15.0,
        discovery: bool = False,
        sq_flow_control: bool = False,
        pacing: Pacing | None = None,
    ) -> NvmeRdmaBdev:
        """Connect to a namespace of the subsystem, by all of the addresses (host, port). As `NvmeTcpBdev.open`;
        without pyverbs it is a BdevError that says what to install.
        """
        login = make_login(addresses, subnqn, hostnqn, num_queues, queue_size, keep_alive_s, sq_flow_control)
        if reason := missing() or why_off():
            raise BdevError(name or subnqn, "open", 0, 0, "unavailable", reason)
        targets = [(host, port) for host, port in addresses]
        pace = pacing or Pacing()
        transport = _RdmaTransport()
        if discovery:
            try:
                targets = await find_subsystem(targets, transport, login, pace, name or subnqn)
            except BaseException:
                transport.close()
                raise
        bdev = cls(targets, transport, login, nsid=nsid, name=name, pacing=pace)
        await bdev._start()
        return bdev
