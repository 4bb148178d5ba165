"""A bdev of an SPDK target: found, provided and watched over its JSON-RPC socket, its bytes by one of its exports.

Theory of operation. Opening connects to the target, applies the profile if one is given (what is missing is made, see
`spdk_apply`), sets the limits, and looks which ways lead to the bdev: a vhost-user-blk controller on this machine, or an
NVMe over RDMA or TCP subsystem. "auto" prefers them in this order: with the first two the target moves bytes to and from our
memory by itself (RDMA is passed over where it cannot be used). All
of that is done again on every later connection: a restarted target comes back with no bdevs. The way itself reconnects on
its own; until both are back, operations fail as ``unavailable``.

The export is trusted to lead to that bdev for as long as its name does: what is on the device is the block store's
question, which looks at its superblock after every reconnection.

What goes wrong later (a profile refused, a limit not taken) is kept in `trouble` for whoever shows it; NVMe health of the
target's controllers, asked for every `HEALTH_S`, in `health`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import trio

from dpurt.bdev import Bdev, BdevInfo, BdevStats, DeviceMemory
from dpurt.bdev.nvme_rdma import NvmeRdmaBdev
from dpurt.bdev.nvme_tcp import NvmeTcpBdev
from dpurt.bdev.spdk_apply import ProfileRefused, apply, find_profile, load_keys, load_profile, read_state
from dpurt.bdev.spdk_health import NvmeHealth
from dpurt.bdev.spdk_profile import KeyMaterial, Profile
from dpurt.bdev.spdk_rpc import SpdkRpc, open_spdk_rpc
from dpurt.bdev.spdk_state import TargetState
from dpurt.bdev.spdk_status import read_health
from dpurt.bdev.vhost_user import VhostUserBdev
from dpurt.errors import (
    BdevError,
    DeadlineExceeded,
    DpurtError,
    RemoteProtocolError,
    RpcError,
    TargetUnavailable,
)
from dpurt.rdma.device import why_off

__all__ = ["SpdkBdev", "Way"]

Way = Literal["auto", "vhost-user", "nvme-rdma", "nvme-tcp"]
OPEN_S = 15.0
RECONCILE_S = 15.0
HEALTH_S = 60.0


class SpdkBdev:
    """See `Bdev`. Make one with `await SpdkBdev.open(...)`."""

    def __init__(
        self,
        label: str,
        bdev: str,
        profile: Profile | None,
        keys: Mapping[str, KeyMaterial],
        qos: Mapping[str, int],
    ) -> None:
        self._label = label
        self._bdev = bdev
        self._profile = profile
        self._keys = keys
        self._qos = qos
        self._inner: Bdev
        self._state: TargetState | None = None
        self._answered = trio.Event()  # the target has been asked once, to its end
        self._running = trio.CancelScope()
        self._ended = trio.Event()
        self.trouble = ""
        self.health: dict[str, NvmeHealth] = {}
        self.reconciled = 0

    @classmethod
    async def open(
        cls,
        rpc: str | Path,
        bdev: str,
        *,
        name: str | None = None,
        path: Way = "auto",
        profile: str | Path | None = None,
        settings: Mapping[str, str] | None = None,
        qos: Mapping[str, int] | None = None,
    ) -> SpdkBdev:
        """The bdev called `bdev` (name, alias or UUID) of the target at the socket `rpc`. `profile` is a ready one's name
        or a file.

        Raises BdevError when the target or the bdev is not there or not exported, ConfigError for a bad profile.
        """
        file = None if profile is None else find_profile(profile)
        made = None if file is None else load_profile(file, settings or {})
        keys = {} if made is None or file is None else load_keys(made, file.parent)
        self = cls(name or bdev, bdev, made, keys, qos or {})
        trio.lowlevel.spawn_system_task(self._run, rpc)
        try:
            with trio.fail_after(OPEN_S):
                await self._answered.wait()
            self._inner = await self._open_way(path)
        except trio.TooSlowError as error:
            await self._stop()
            raise self._failure("unavailable", f"{rpc}: no answer within {OPEN_S:.0f} s") from error
        except BaseException:
            await self._stop()
            raise
        return self

    # --- Bdev ---

    @property
    def info(self) -> BdevInfo:
        return self._inner.info

    @property
    def stats(self) -> BdevStats:
        return self._inner.stats

    async def add_memory(self, memory: DeviceMemory, deadline: float) -> None:
        await self._inner.add_memory(memory, deadline)

    async def read_into(self, offset: int, buffers: Sequence[memoryview], deadline: float) -> None:
        await self._inner.read_into(offset, buffers, deadline)

    async def write_from(
        self, offset: int, buffers: Sequence[memoryview], deadline: float, *, placement: int = 0
    ) -> None:
        await self._inner.write_from(offset, buffers, deadline, placement=placement)

    async def deallocate(self, offset: int, length: int, deadline: float) -> None:
        await self._inner.deallocate(offset, length, deadline)

    async def flush(self, deadline: float) -> None:
        await self._inner.flush(deadline)

    async def drain(self) -> None:
        await self._inner.drain()

    async def aclose(self) -> None:
        """Close the way and the control connection. What the target holds, stays."""
        with trio.CancelScope(shield=True):
            await self._inner.aclose()
            await self._stop()

    # --- the target ---

    async def _run(self, rpc: str | Path) -> None:
        """The owner of the control connection, for the bdev's life."""
        try:
            with self._running:
                async with open_spdk_rpc(rpc, self._reconcile) as connection:
                    await self._watch(connection)
        except DpurtError as error:
            self.trouble = str(error)
        finally:
            self._answered.set()
            self._ended.set()

    async def _watch(self, rpc: SpdkRpc) -> None:
        """First of all, find out whether there is a target; then look after health."""
        try:
            await rpc.call("spdk_get_version", deadline=trio.current_time() + OPEN_S)
        except (TargetUnavailable, DeadlineExceeded) as error:
            self.trouble = str(error)
            self._answered.set()
        while True:
            try:
                self.health = await read_health(rpc, trio.current_time() + RECONCILE_S)
            except (RpcError, TargetUnavailable, DeadlineExceeded, RemoteProtocolError):
                self.health = {}  # an old figure would be a wrong one
            await trio.sleep(HEALTH_S)

    async def _reconcile(self, rpc: SpdkRpc) -> None:
        """Bring a target that may have just started to where it should be."""
        deadline = trio.current_time() + RECONCILE_S
        try:
            if self._profile is not None:
                await apply(rpc, self._profile, self._keys, deadline)
            if self._qos:
                await rpc.call("bdev_set_qos_limit", {"name": self._bdev, **self._qos}, deadline=deadline)
            self._state = await read_state(rpc, deadline)
        except (RpcError, ProfileRefused) as error:  # trying again would not help
            self.trouble = str(error)
        else:
            self.trouble = ""
            self.reconciled += 1
        self._answered.set()

    async def _stop(self) -> None:
        self._running.cancel()
        await self._ended.wait()

    # --- the way ---

    async def _open_way(self, path: Way) -> Bdev:
        if self._state is None:
            raise self._failure("unavailable", self.trouble)
        found = self._state.find(self._bdev)
        if found is None:
            known = ", ".join(bdev["name"] for bdev in self._state.bdevs) or "none"
            raise self._failure(
                "gone", f"the target has no bdev {self._bdev!r}; it has: {known}. {self.trouble}".strip()
            )
        socket = vhost_socket(found["name"], self._state)
        over_rdma = nvmf_subsystem(found["name"], self._state, "RDMA")
        over_tcp = nvmf_subsystem(found["name"], self._state, "TCP")
        if socket is not None and path in ("auto", "vhost-user"):
            return await VhostUserBdev.open(socket, name=self._label)
        if over_rdma is not None and (path == "nvme-rdma" or (path == "auto" and not why_off())):
            subnqn, nsid, addresses = over_rdma
            return await NvmeRdmaBdev.open(addresses, subnqn, nsid=nsid, name=self._label)
        if over_tcp is not None and path in ("auto", "nvme-tcp"):
            subnqn, nsid, addresses = over_tcp
            return await NvmeTcpBdev.open(addresses, subnqn, nsid=nsid, name=self._label)
        wanted = "vhost-user, nvme-rdma or nvme-tcp" if path == "auto" else path
        raise self._failure(
            "unavailable", f"bdev {self._bdev!r} is not exported over {wanted}: see dpurt spdk up"
        )

    def _failure(self, status: str, detail: str) -> BdevError:
        return BdevError(self._label, "open", 0, 0, status, detail)


def vhost_socket(name: str, state: TargetState) -> str | None:
    """The socket of the vhost-blk controller that shows a bdev."""
    for shown in state.vhost:
        if shown.get("backend_specific", {}).get("block", {}).get("bdev") == name:
            return shown.get("socket")
    return None


def nvmf_subsystem(
    name: str, state: TargetState, trtype: str
) -> tuple[str, int | None, list[tuple[str, int]]] | None:
    """(NQN, namespace id, addresses) of the NVMe over fabrics subsystem that shows a bdev over this transport."""
    for subsystem in state.subsystems:
        spaces = [space for space in subsystem.get("namespaces", []) if space.get("bdev_name") == name]
        addresses = [
            (at["traddr"], int(at["trsvcid"]))
            for at in subsystem.get("listen_addresses", [])
            if at["trtype"].upper() == trtype and at["trsvcid"].isdecimal()
        ]
        if spaces and addresses:
            return subsystem["nqn"], spaces[0].get("nsid"), addresses
    return None
