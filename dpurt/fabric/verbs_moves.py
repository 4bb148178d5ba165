"""Which bytes go where: cutting local and remote runs to the same lengths, and registering memory for one transfer. Mostly pure.

Leaves to others: who may (`dpurt.fabric.access`), carrying the works out (`dpurt.rdma.queue_pair`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from dpurt.fabric.verbs_control import Run
from dpurt.rdma.endpoint import Adapter
from dpurt.rdma.memory import Access, Registration, Segment
from dpurt.rdma.queue_pair import Opcode, Sge, Work

__all__ = [
    "Span",
    "Stretch",
    "aligned",
    "joined",
    "length_of",
    "merged",
    "registered",
    "runs_of",
    "sges_of",
    "striped",
    "with_immediate",
]

MAX_WORK_BYTES = 1 << 20
_PAGE = 4096

Span = tuple[int, int]  # address, length
Stretch = tuple[int, int, int]  # address, length, key


def aligned(opcode: Opcode, local: Iterable[Sge], remote: Iterable[Run]) -> list[Work]:
    """One work for each stretch that is whole on both sides. Both sides have the same number of bytes."""
    works = []
    theirs = joined((run.address, run.length, run.key) for run in remote)
    to, room, rkey = 0, 0, 0
    for at, left, lkey in joined((sge.address, sge.length, sge.lkey) for sge in local):
        while left:
            while not room:
                to, room, rkey = next(theirs)
            size = min(left, room, MAX_WORK_BYTES)
            works.append(Work(opcode, (Sge(at, size, lkey),), to, rkey))
            at, left = at + size, left - size
            to, room = to + size, room - size
    return works


def joined(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """Neighbours as one: a work, or a line of a grant, costs more than its bytes when these are few."""
    start = length = key = 0
    for address, more, its_key in stretches:
        if length and address == start + length and its_key == key:
            length += more
            continue
        if length:
            yield start, length, key
        start, length, key = address, more, its_key
    if length:
        yield start, length, key


def with_immediate(works: Sequence[Work], immediate: int) -> list[Work]:
    """The same, but the last one tells the peer."""
    return [*works[:-1], replace(works[-1], opcode=Opcode.WRITE_IMMEDIATE, immediate=immediate & 0xFFFFFFFF)]


def length_of(works: Iterable[Work]) -> int:
    return sum(sge.length for work in works for sge in work.local)


def striped(works: Iterable[Work], step: int) -> list[list[Work]]:
    """The works cut into groups of `step` bytes each, but for the last."""
    groups: list[list[Work]] = []
    room = 0
    for work in works:
        [sge] = work.local
        done = 0
        while done < sge.length:
            if not room:
                groups.append([])
                room = step
            size = min(room, sge.length - done)
            here = Sge(sge.address + done, size, sge.lkey)
            groups[-1].append(replace(work, local=(here,), remote_address=work.remote_address + done))
            done, room = done + size, room - size
    return groups


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans on the same or neighbouring pages become one, so that many small pieces of a buffer cost one registration."""
    found: list[Span] = []
    for address, length in sorted(spans):
        if found and address <= _page_end(found[-1]):
            first = found[-1][0]
            found[-1] = first, max(sum(found[-1]), address + length) - first
        else:
            found.append((address, length))
    return found


def _page_end(span: Span) -> int:
    return -(-sum(span) // _PAGE) * _PAGE


@contextmanager
def registered(
    adapter: Adapter, known: Iterable[Registration], spans: Sequence[Span], access: Access
) -> Iterator[list[Registration]]:
    """Registrations that hold all of `spans`: the known ones that do, and some made for now. Raises RdmaLimit."""
    kept = [registration for registration in known if any(registration.holds(*span) for span in spans)]
    missing = [span for span in spans if not any(registration.holds(*span) for registration in kept)]
    made: list[Registration] = []
    try:
        for address, length in merged(missing):
            made.append(adapter.register(address, length, access))
        yield kept + made
    finally:
        for registration in made:
            registration.close()


def _segments(registrations: Sequence[Registration], spans: Iterable[Span]) -> Iterator[Segment]:
    """Spans that are registered, cut where a registration's chunks end."""
    for span in spans:
        holder = next(registration for registration in registrations if registration.holds(*span))
        yield from holder.segments(*span)


def sges_of(registrations: Sequence[Registration], spans: Iterable[Span]) -> Iterator[Sge]:
    """Registered spans as local elements of our own works."""
    for segment in _segments(registrations, spans):
        yield Sge(segment.address, segment.length, segment.chunk.lkey)


def runs_of(registrations: Sequence[Registration], spans: Iterable[Span]) -> list[Run]:
    """Registered spans as the peer may touch them."""
    segments = _segments(registrations, spans)
    return [
        Run(*stretch)
        for stretch in joined((segment.address, segment.length, segment.chunk.rkey) for segment in segments)
    ]
