"""Many replays of one trace: policies x scenarios, on several processes, and resumable.

Results come in the order of the runs, whoever finished first, so the number of processes changes no figure. Each
process is a `dpurt.replay.worker`; a thread feeds each. A journal, if there is one, keeps each finished run as a JSON
line under a key that covers the trace's bytes, how it was read, policy, scenario and this code; a run whose key is in
it is not repeated. A last line torn by an interruption is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import msgspec

from dpurt.errors import ConfigError
from dpurt.progress import Progress
from dpurt.replay.engine import replay
from dpurt.replay.formats import Reading
from dpurt.replay.policies import POLICIES
from dpurt.replay.report import Result
from dpurt.replay.trace import Trace
from dpurt.replay.worker import Answer, Run, Task, every

__all__ = ["Journal", "WORTH_A_PROCESS", "sweep"]

WORTH_A_PROCESS = 300_000  # block references to replay, below which starting processes takes longer
_CODE = ("core/*.py", "replay/*.py", "priors/*", "wire/recording.py")  # what results depend on
_FIRST = b'{"key":"'  # what an entry begins with
_ANSWERS = msgspec.json.Decoder(Answer)


class _Entry(msgspec.Struct, frozen=True):
    key: str
    result: Result


class Journal:
    """Finished runs in a file. ConfigError when it cannot be read or written, or is something else."""

    def __init__(self, path: Path, trace_file: Path, reading: Reading) -> None:
        self._path = path
        files = [trace_file, *_read_beside(reading), *_sources()]
        self._basis = _digest(*(file.read_bytes() for file in files), msgspec.json.encode(reading))
        self._lock = threading.Lock()
        try:
            self._known, whole_bytes = self._load()
            self._file = path.open("ab")
            self._file.truncate(whole_bytes)
        except OSError as error:
            raise ConfigError(str(path), f"cannot keep finished runs here: {error.strerror}") from error

    def get(self, run: Run) -> Result | None:
        """The result of an equal run, if it has been finished."""
        return self._known.get(self._key(run))

    def put(self, run: Run, result: Result) -> None:
        """Keep a finished run. Any thread may call this."""
        entry = msgspec.json.encode(_Entry(self._key(run), result))
        with self._lock:
            self._file.write(entry + b"\n")
            self._file.flush()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _key(self, run: Run) -> str:
        return _digest(self._basis.encode(), msgspec.json.encode(run))

    def _load(self) -> tuple[dict[str, Result], int]:
        """What is in the file, and how many bytes of it are whole lines."""
        text = self._path.read_bytes() if self._path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if text and not whole and not _FIRST.startswith(text[: len(_FIRST)]):
            raise ConfigError(str(self._path), "expected a journal of finished runs; name a new file")
        known = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = msgspec.json.decode(line, type=_Entry)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{self._path}:{number}", f"expected a finished run: {error}") from error
            known[entry.key] = entry.result
        return known, len(whole)


def _read_beside(reading: Reading) -> list[Path]:
    return [Path(name) for name in (reading.arrivals, reading.sessions) if name]


def _sources() -> list[Path]:
    package = Path(__file__).parent.parent
    return [path for part in _CODE for path in sorted(package.glob(part)) if path.is_file()]


def _digest(*parts: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


@dataclass(slots=True)
class _Done:
    """How far all runs are together, in requests. Threads add to it."""

    progress: Progress
    arrived: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self, run: int, arrived: int) -> None:
        with self.lock:
            self.arrived[run] = arrived
            self.progress.update(sum(self.arrived.values()))


def sweep(
    trace: Trace, path: Path, reading: Reading, runs: Sequence[Run], jobs: int, journal: Journal | None = None
) -> list[Result]:
    """The result of each run, in order, on `jobs` processes (1: this one). `trace` is `path` read as `reading`."""
    known = {n: r for n, run in enumerate(runs) if journal and (r := journal.get(run)) is not None}
    missing = [n for n in range(len(runs)) if n not in known]
    with Progress("replay", len(trace.requests) * len(missing)) as progress:
        done = _Done(progress)
        one = _Here(trace) if jobs == 1 or len(missing) < 2 else _Processes(path, reading, jobs)
        for number, result in one.run({n: runs[n] for n in missing}, done):
            known[number] = result
            if journal is not None:
                journal.put(runs[number], result)
    return [known[number] for number in range(len(runs))]


@dataclass(frozen=True, slots=True)
class _Here:
    """Runs one after the other in this process."""

    trace: Trace

    def run(self, runs: dict[int, Run], done: _Done) -> Iterator[tuple[int, Result]]:
        requests = self.trace.requests
        step = max(1, len(requests) // 100)
        for number, run in runs.items():
            update = functools.partial(done.update, number)
            yield number, replay(requests, POLICIES[run.policy], run.scenario, every(step, update))
            update(len(requests))


@dataclass(frozen=True, slots=True)
class _Processes:
    """Runs on worker processes, each fed by a thread: the next run goes to whoever is free."""

    path: Path
    reading: Reading
    jobs: int

    def run(self, runs: dict[int, Run], done: _Done) -> Iterator[tuple[int, Result]]:
        todo: _Todo = queue.SimpleQueue()
        for numbered in runs.items():
            todo.put(numbered)
        finished: _Finished = queue.SimpleQueue()
        with contextlib.ExitStack() as stack:
            for _ in range(min(self.jobs, len(runs))):
                stack.enter_context(_worker(Task(str(self.path), self.reading), todo, finished, done))
            for _ in runs:
                answer = finished.get()
                if isinstance(answer, BaseException):
                    raise answer
                yield answer


_Todo = queue.SimpleQueue[tuple[int, Run]]
_Finished = queue.SimpleQueue[tuple[int, Result] | BaseException]


@contextlib.contextmanager
def _worker(task: Task, todo: _Todo, finished: _Finished, done: _Done) -> Iterator[None]:
    """A process and the thread that feeds it. Both end with the context, finished or not."""
    command = [sys.executable, "-m", "dpurt.replay.worker"]
    pipe = subprocess.PIPE  # and a session of its own: an interrupt is ours to handle
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        feeder = threading.Thread(target=_feed, args=(process, task, todo, finished, done))
        feeder.start()
        try:
            yield
        finally:
            process.kill()
            feeder.join()


def _send(process: subprocess.Popen[bytes], message: Task | Run) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(message) + b"\n")
    process.stdin.flush()


def _feed(
    process: subprocess.Popen[bytes], task: Task, todo: _Todo, finished: _Finished, done: _Done
) -> None:
    """Give runs to one worker until there are none. What goes wrong is the sweep's to raise."""
    try:
        with contextlib.suppress(BrokenPipeError):  # its answer, or the lack of one, says why
            _send(process, task)
        while True:
            number, run = todo.get_nowait()
            with contextlib.suppress(BrokenPipeError):
                _send(process, run)
            result = _result(process, functools.partial(done.update, number))
            finished.put((number, result))
    except queue.Empty:
        return
    except BaseException as error:
        finished.put(error)


def _result(process: subprocess.Popen[bytes], arrived: Callable[[int], None]) -> Result:
    assert process.stdout is not None
    for line in process.stdout:
        answer = _ANSWERS.decode(line)
        if answer.error is not None:
            raise ConfigError("trace", answer.error)
        if answer.result is not None:
            return answer.result
        arrived(answer.arrived or 0)
    raise ConfigError("replay", f"a worker process ended with code {process.wait()} in the middle of a run")
