"""Lines of a recording: every event comes back as it was, and nothing but numbers and known words gets in."""

from __future__ import annotations

import msgspec
import pytest

from dpurt.core.events import (
    Arrived,
    Consumed,
    DecodeStep,
    Demanded,
    Dropped,
    Event,
    Evicted,
    FetchFailed,
    Finished,
    Owner,
    Paused,
    Ranked,
    Resumed,
    SequenceGone,
    Staged,
    Stored,
)
from dpurt.core.prefetch import Fetch
from dpurt.wire import recording as r

EVENTS: list[Event] = [
    Arrived(1, Owner("3", ""), (10, 20), None),
    Arrived(1, Owner("3", ""), (), 2.5),
    Consumed(1, 0, 8),
    Stored(1, (30,)),
    Paused(1, 1.5, "tool_use"),
    Paused(1),
    Resumed(1),
    Finished(1, "end_turn"),
    SequenceGone(1),
    DecodeStep(1, 7, 2, (10,), (Ranked(3, (20, 10), 9.25),), (0.5,)),
    DecodeStep(1, 7, 2),
    Demanded(10, 1, "in_flight", (1 << 100) | 1),
    Demanded(10, 1, "nvme"),
    Staged(10, 5),
    FetchFailed(5, "no_room"),
    Evicted(10),
    Dropped(10),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    line = r.told(event, 0.1 + 0.2, 0.3, 3, (2, 32))
    back = r.decode_line(r.encode(line))
    assert back == line
    assert r.event_of(back) == event  # type: ignore[arg-type]


def test_times_are_exact() -> None:
    now = 84210.123456789012
    back = r.decode_line(r.encode(r.Tick(now)))
    assert back == r.Tick(now)


def test_what_an_engine_says_freely_is_not_written() -> None:
    assert r.told(Finished(1, "patient 4711 was discharged"), 0.0, 0.0, 0, (0, 0)) == r.FinishedLine(
        0.0, 1, "other"
    )


def test_a_fetch_names_its_predictor_by_number() -> None:
    line = r.fetched(Fetch(4, 10, None, 1.5, "hint"), ("sliding_window", "hint"))
    assert line == r.Fetched(4, 10, None, 1.5, 1)


@pytest.mark.parametrize(
    "line",
    [
        b'["finished",1.0,1,"a secret"]', b'["evicted",1.0]', b'["evicted",1.0,1,[1,2,3]]', b'["evicted",1.0,-1]',
        b'["evicted",1.0,"token"]', b'["block",1,"not a hash",0,false,"0"]', b'["failed",1.0,1,"because"]', b'["x"]',
        b'{"now":1}', b'["tick",null]',
    ],
)  # fmt: skip
def test_a_line_with_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        r.decode_line(line)


def test_a_header_with_an_unknown_field_is_refused() -> None:
    prefetch = r.Prefetch(
        predictors=("hint",), block_s=0.1, lookahead_blocks=1, bandwidth_bytes_per_s=1.0, staging_bytes=1,
        queue_depth=1, min_probability=0.1,
    )  # fmt: skip
    header = r.Header(
        started_at=1.0, wall=2.0, is_fresh=True, eviction="lru", has_prefetch=True, prior="", prefetch=prefetch, pools=(),
        devices=(),
    )  # fmt: skip
    fields = msgspec.json.decode(r.encode(header), type=dict[str, object])
    assert r.decode_header(r.encode(header)) == header
    with pytest.raises(msgspec.DecodeError, match="model"):
        r.decode_header(r.encode({**fields, "model": "llama"}))
