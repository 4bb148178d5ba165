"""The recorder: writes what a tape notes to a file, for `dpurt replay`. At most one recording at a time.

Theory of operation. `start` puts a tape to the cores and opens a new file; the task takes the tape's lines in batches and a
thread writes them, whole lines at a time, so a killed node leaves a readable beginning. The node never waits for the disk:
what a slow disk cannot take is lost on the tape, which says so in the file. A recording ends when asked, with the node, when
the file is as large as it may be, or when it cannot be written.

Restart: a recording under way goes on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
import trio

from dpurt.core.eviction import EvictionPolicy
from dpurt.errors import ConfigError
from dpurt.runtime.actor import Actor
from dpurt.wire import recording as r

from .fabric import Access
from .gateway import GatewayAgent
from .index import IndexAgent
from .intake import Intake
from .prefetch import PrefetchAgent
from .spaces import Slab
from .staging import StagingAgent
from .tape import Tape, TapedPolicy, TapedView

log = structlog.get_logger()
GATHER_S = 0.05  # lines of so long share a write
MAX_BYTES = 4 << 30


@dataclass(slots=True, kw_only=True)
class Recording:
    """One under way."""

    path: Path
    fd: int
    tape: Tape
    is_fresh: bool
    num_bytes: int = 0
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class Taps:
    """Those who own the cores."""

    index: IndexAgent
    staging: StagingAgent
    intake: Intake
    prefetch: PrefetchAgent
    gateway: GatewayAgent
    access: Access


class RecorderAgent(Actor[None]):
    """Recordings for replay."""

    name = "recorder"

    def __init__(self, taps: Taps, header: Callable[[bool], r.Header], max_bytes: int = MAX_BYTES) -> None:
        """`header(is_fresh)` says what the node is."""
        super().__init__(1)
        self._taps = taps
        self._header = header
        self._max_bytes = max_bytes
        self._writing = trio.Lock()
        self._begun = trio.Event()
        self.recording: Recording | None = None
        self.recordings = self.failures = 0

    # --- begin and end ---

    def start(self, path: Path) -> Recording:
        """Begin. ConfigError when one is under way, or there can be no new file."""
        if self.recording is not None:
            raise ConfigError("record", f"a recording is under way, to {self.recording.path}")
        header = self._header(self._is_fresh())
        tape = Tape(self._taps.index, header.prefetch.predictors, secrets.token_bytes(32))
        recording = Recording(path=path, fd=_create(path), tape=tape, is_fresh=header.is_fresh)
        try:
            self._write_all(recording, r.encode(header) + b"\n")
        except OSError as error:
            os.close(recording.fd)
            path.unlink(missing_ok=True)
            self.failures += 1
            raise ConfigError(str(path), f"cannot record there: {error.strerror}") from error
        self.recording = recording
        self.recordings += 1
        self._put_tape(tape)
        self._begun.set()
        log.info("recording", path=str(path), is_fresh=header.is_fresh)
        return self.recording

    async def stop(self, why: r.Why) -> Recording:
        """End in good order: everything noted so far is in the file when this returns. ConfigError without a recording."""
        recording = self.recording
        if recording is None or recording.is_ending:
            raise ConfigError(
                "record", "no recording is under way" if recording is None else "it is ending already"
            )
        recording.is_ending = True
        self._take_tape()
        core = self._taps.prefetch.core
        recording.tape.end(why, None if core is None else r.outcomes(core.ledger.totals()))
        async with self._writing:
            if self.recording is not recording:
                raise ConfigError(str(recording.path), "the recording has ended meanwhile")
            try:
                await self._write_some(recording)
            except OSError as error:
                self.failures += 1
                raise ConfigError(str(recording.path), f"cannot record there: {error.strerror}") from error
            finally:
                self._forget()
        log.info("recording_ended", path=str(recording.path), why=why, lost=recording.tape.lost)
        return recording

    @property
    def status(self) -> dict[str, object]:
        """Counters, of the recording under way, if any."""
        recording = self.recording
        return {
            "recordings": self.recordings, "failures": self.failures, "is_recording": int(recording is not None),
            "lines": 0 if recording is None else recording.tape.num_lines,
            "lost": 0 if recording is None else recording.tape.lost,
            "bytes": 0 if recording is None else recording.num_bytes,
        }  # fmt: skip

    def _is_fresh(self) -> bool:
        """Has the node done nothing yet?"""
        pools = [slab.pool.stats() for slab in self._taps.staging.slabs]
        return not self._taps.prefetch.events_seen and not any(pool.takes for pool in pools)

    def _put_tape(self, tape: Tape) -> None:
        self._hand_out(tape)
        core = self._taps.prefetch.core
        if core is not None:
            core.view = TapedView(core.view, tape)
        for slab in self._slabs():
            slab.pool.wrap_policy(_taped(slab.number, tape))
        self._taps.staging.tell_latency_again()  # an idle node has measured it before

    def _take_tape(self) -> None:
        self._hand_out(None)
        core = self._taps.prefetch.core
        if core is not None and isinstance(core.view, TapedView):
            core.view = core.view.view
        for slab in self._slabs():
            slab.pool.wrap_policy(_untaped)

    def _hand_out(self, tape: Tape | None) -> None:
        """To all who note on it themselves."""
        taps = self._taps
        gateway = taps.gateway
        for tapped in (taps.staging, taps.intake, taps.prefetch, gateway, gateway.transfers, taps.access):
            tapped.tape = tape

    def _slabs(self) -> Iterator[Slab]:
        """Those that hold whole blocks. Decode staging, of parts, has a core of its own, which is not recorded."""
        return (slab for slab in self._taps.staging.slabs if not slab.holds_parts)

    def _forget(self) -> None:
        assert self.recording is not None
        os.close(self.recording.fd)
        self.recording = None
        self._begun = trio.Event()

    # --- writing ---

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        while True:
            await self._begun.wait()
            recording = self.recording
            assert recording is not None
            await recording.tape.has_lines.wait()
            await trio.sleep(GATHER_S)
            await self._write_next(recording)

    async def _write_next(self, recording: Recording) -> None:
        try:
            async with self._writing:
                if self.recording is recording:
                    await self._write_some(recording)
        except OSError as error:
            self.failures += 1
            log.error("recording_failed", path=str(recording.path), error=error.strerror)
            self._take_tape()
            self._forget()
            return
        if self.recording is recording and recording.num_bytes >= self._max_bytes:
            await self.stop("full")

    async def _write_some(self, recording: Recording) -> None:
        lines = recording.tape.take()
        await trio.to_thread.run_sync(self._write_lines, recording, lines)

    def _write_lines(self, recording: Recording, lines: list[r.Line]) -> None:
        self._write_all(recording, b"".join(r.encode(line) + b"\n" for line in lines))

    @staticmethod
    def _write_all(recording: Recording, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(recording.fd, view) :]
        recording.num_bytes += len(data)


def _taped(pool: int, tape: Tape) -> Callable[[EvictionPolicy], EvictionPolicy]:
    return lambda policy: TapedPolicy(policy, pool, tape)


def _untaped(policy: EvictionPolicy) -> EvictionPolicy:
    return policy.policy if isinstance(policy, TapedPolicy) else policy


def _create(path: Path) -> int:
    """A new file only its owner can read. What a node saw is nobody else's business, hashes or not."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    except OSError as error:
        raise ConfigError(str(path), f"cannot record there: {error.strerror}") from error
