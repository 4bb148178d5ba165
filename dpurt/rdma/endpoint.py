"""An opened RDMA device on Trio: one protection domain, one completion queue, and the task that reads it.

Theory of operation. `run` is the completion task. It asks for the next event, takes what is there (also what came just before
it asked), and sleeps on the completion channel's descriptor until that says something or a post says `expect`. Then it polls, a
scheduler pass between two looks, until nothing has come for `SPIN_S`. So a busy link is polled, also by the others' tasks that
wait for sockets, and an idle one costs nothing. `stats` says what the polling cost. A software device is not polled: it would
take the CPU that moves the bytes (measured on Soft-RoCE: half the rate). But it does much of its work inside the call that
posts, so a single `look` right after a post often finds it done, and saves the event and two scheduler passes.

pyverbs does not tell the channel's descriptor, so it is found as the one that is new; and its `get_cq_event` would block with
the interpreter's lock held, so the descriptor is made non-blocking first.

All queue pairs share the completion queue; each claims room in it for all it can have under way, so it cannot overflow.

Leaves to others: what is moved and when; who may; connecting (addresses travel some other way).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from dataclasses import dataclass
from typing import Any

import trio

from dpurt.errors import RdmaLimit, RdmaUnavailable
from dpurt.rdma.binding import verbs
from dpurt.rdma.device import RdmaDevice
from dpurt.rdma.memory import (
    Access,
    Registration,
    Window,
    allocate_dmabuf_mr,
    allocate_mr,
    allocate_window,
    refused,
)
from dpurt.rdma.queue_pair import QueuePair, Requests

__all__ = ["Adapter", "AdapterStats"]

MAX_COMPLETIONS = 16384
SPIN_S = 0.001
_BATCH = 64
_FINDING = threading.Lock()  # two channels opened at once would both be new


@dataclass(slots=True)
class AdapterStats:
    """Counters of one adapter."""

    completions: int = 0
    failed: int = 0  # of these
    polls: int = 0
    empty_polls: int = 0
    events: int = 0
    queue_pairs: int = 0  # open now
    regions: int = 0
    windows: int = 0


class Adapter:
    """One device, opened. Raises RdmaUnavailable. `max_chunk_bytes`: of one registration, if less than the device's limit."""

    def __init__(
        self,
        device: RdmaDevice,
        *,
        max_completions: int = MAX_COMPLETIONS,
        max_chunk_bytes: int = 1 << 62,
    ) -> None:
        self.device = device
        self.max_chunk_bytes = min(max_chunk_bytes, device.limits.max_mr_bytes)
        self.stats = AdapterStats()
        self._max_completions = min(max_completions, device.limits.max_cqe)
        self.failure = ""
        self._promised = 0
        self._spin_s = 0.0 if device.limits.is_software else SPIN_S
        self._busy_until = 0.0
        self._nap = trio.CancelScope()
        self._queue_pairs: dict[int, QueuePair] = {}
        self._serials = itertools.cycle(range(1, 1 << 15))
        self._scope = trio.CancelScope()
        self._is_open = True
        self._owned: list[Any] = []  # in order of making
        try:
            self._open()
        except verbs().PyverbsError as error:
            self._close_owned()
            raise RdmaUnavailable(device.name, f"cannot be opened: {error}") from error

    def _open(self) -> None:
        v = verbs()
        context = v.Context(name=self.device.name)
        self._owned.append(context)
        self.pd = v.PD(context)
        self._owned.append(self.pd)
        self._channel, self._event_fd = _open_channel(context)
        self._owned.append(self._channel)
        self.requests = Requests()
        self.cq = v.CQ(context, self._max_completions, None, self._channel, 0)
        self._owned.append(self.cq)

    # --- completions ---

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The completion task; ends when the adapter is closed. Without it nothing is ever reported."""
        task_status.started()
        try:
            with self._scope:
                while self._is_open:
                    self.cq.req_notify()
                    self._poll_all()
                    await self._sleep()
                    if self._spin_s:
                        await self._poll_while_busy()
        except verbs().PyverbsError as error:
            self._fail(f"the device failed: {error}")

    def _fail(self, reason: str) -> None:
        """Nothing will be reported any more: that is the end of every queue pair, and there will be no other."""
        self.failure = reason
        for queue_pair in list(self._queue_pairs.values()):
            queue_pair.give_up(reason)

    def expect(self) -> None:
        """Something was posted or asked for: its answer is likely soon, so look instead of sleeping."""
        if self._spin_s:
            self._busy_until = trio.current_time() + self._spin_s
            self._nap.cancel()

    def look(self) -> None:
        """Take what has completed by now, where that is likely: right after a post to a software device."""
        if not self._spin_s and self._is_open and not self.failure:
            try:
                self._poll()
            except verbs().PyverbsError as error:
                self._fail(f"the device failed: {error}")

    async def _sleep(self) -> None:
        with trio.CancelScope() as self._nap:
            try:
                await trio.lowlevel.wait_readable(self._event_fd)
            except trio.ClosedResourceError:
                return
            if self._is_open:  # else it was closed while we were woken, and pyverbs would not notice
                self._take_event()

    def _take_event(self) -> None:
        """The one that woke us. Another one, if there is, wakes us again: asking whether there is costs more, as the answer
        is an exception.
        """
        self._channel.get_cq_event(self.cq)
        self.cq.ack_events(1)
        self.stats.events += 1

    def _take_events(self) -> None:
        with contextlib.suppress(verbs().PyverbsRDMAError):  # EAGAIN: that was all
            while True:
                self._take_event()

    async def _poll_while_busy(self) -> None:
        while self._is_open:
            now = trio.current_time()
            if self._poll():
                self._busy_until = now + self._spin_s
            if now >= self._busy_until:
                return
            await trio.lowlevel.checkpoint()

    def _poll_all(self) -> None:
        while self._is_open and self._poll() == _BATCH:
            pass

    def _poll(self) -> int:
        count: int
        count, done = self.cq.poll(_BATCH)
        self.stats.polls += 1
        self.stats.empty_polls += not count
        self.stats.completions += count
        for wc in done:
            self.stats.failed += wc.status != 0
            queue_pair = self._queue_pairs.get(wc.qp_num)
            if queue_pair is not None:
                queue_pair.completed(wc)
        return count

    # --- queue pairs ---

    def queue_pair(self, *, send_depth: int, receive_depth: int, access: Access) -> QueuePair:
        """A new queue pair, in RESET. Raises RdmaLimit."""
        v = verbs()
        if self.failure:
            raise RdmaLimit(self.device.name, self.failure, "see the kernel's log; a restart opens it again")
        self._check_depth(send_depth, receive_depth)
        cap = v.QPCap(
            max_send_wr=send_depth, max_recv_wr=max(1, receive_depth), max_send_sge=1, max_recv_sge=1
        )
        initial = v.QPInitAttr(qp_type=v.enums.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0)
        try:
            handle = v.QP(self.pd, initial)
        except v.PyverbsError as error:
            raise refused(self.device, "a queue pair", error) from error
        made = QueuePair(self, handle, next(self._serials), send_depth, receive_depth, access)
        self._promised += made.depth
        self._queue_pairs[made.number] = made
        self.stats.queue_pairs += 1
        return made

    def _check_depth(self, send_depth: int, receive_depth: int) -> None:
        limits = self.device.limits
        if max(send_depth, receive_depth) > limits.max_qp_wr:
            raise RdmaLimit(
                self.device.name,
                f"a queue of {max(send_depth, receive_depth)} requests; the device allows {limits.max_qp_wr}",
                "ask for a smaller depth",
            )
        if self._promised + send_depth + receive_depth > self._max_completions:
            raise RdmaLimit(
                self.device.name,
                f"the completion queue has {self._max_completions} entries, {self._promised} are promised",
                "connect fewer hosts, or make queues less deep",
            )

    def discard(self, queue_pair: QueuePair) -> None:
        """The queue pair is about to be destroyed; only it calls this."""
        del self._queue_pairs[queue_pair.number]
        self._promised -= queue_pair.depth
        self.stats.queue_pairs -= 1

    # --- memory ---

    def register(self, address: int, length: int, access: Access, owner: object = None) -> Registration:
        """Register memory. `owner` is kept alive with it. Raises RdmaLimit, which names the limit and the remedy."""
        return Registration(self, address, length, access, owner)

    def window(self) -> Window:
        """A new type-2 window. Raises RdmaLimit."""
        return Window(self)

    def make_mr(self, address: int, length: int, access: Access) -> Any:
        made = allocate_mr(self.pd, self.device, address, length, access)
        self.stats.regions += 1
        return made

    def make_dmabuf_mr(self, fd: int, offset: int, length: int, access: Access) -> Any:
        made = allocate_dmabuf_mr(self.pd, self.device, fd, offset, length, access)
        self.stats.regions += 1
        return made

    def make_window(self) -> Any:
        made = allocate_window(self.pd, self.device)
        self.stats.windows += 1
        return made

    def forget_mr(self, handle: Any) -> None:
        if self._is_open:  # else it went with the device
            handle.close()
            self.stats.regions -= 1

    def forget_window(self, handle: Any) -> None:
        if self._is_open:
            handle.close()
            self.stats.windows -= 1

    # --- the end ---

    def close(self) -> None:
        """End the completion task and everything of this adapter, at once. Idempotent."""
        if not self._is_open:
            return
        for queue_pair in list(self._queue_pairs.values()):
            queue_pair.destroy()
        self._is_open = False
        self._scope.cancel()
        self._take_events()
        trio.lowlevel.notify_closing(self._event_fd)
        self._close_owned()

    def _close_owned(self) -> None:
        while self._owned:
            self._owned.pop().close()


def _open_channel(context: Any) -> tuple[Any, int]:
    v = verbs()
    with _FINDING:
        before = _event_files()
        channel = v.CompChannel(context)
        [descriptor] = _event_files() - before
    os.set_blocking(descriptor, False)
    return channel, descriptor


def _event_files() -> set[int]:
    """Numbers of this process's open verbs event files."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "infinibandevent" in os.readlink(entry.path):
                found.add(int(entry.name))
    return found
