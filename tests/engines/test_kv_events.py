"""Every dialect of engines' KV events, as their own code writes them (tests/golden); and whatever else may come."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpurt.engines.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EndOfReplay,
    KvBatch,
    KvEvent,
    Malformed,
    decode_live,
    decode_replay,
    tokens_of,
)
from dpurt.engines.publisher import Publisher
from dpurt.engines.residency import Engine, Residency
from dpurt.engines.vllm_events import DIALECT

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "kv-events.json").read_text())["vectors"]
KINDS = {BlockStored: "stored", BlockRemoved: "removed", AllBlocksCleared: "cleared"}


def frames_of(vector: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in vector["frames_hex"]]


def decode(vector: dict[str, Any]) -> KvBatch | EndOfReplay | Malformed:
    return (decode_live if vector["channel"] == "sub" else decode_replay)(frames_of(vector))


def plain(value: Any) -> Any:
    """As the golden file writes it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def event_as_expected(event: KvEvent) -> dict[str, Any]:
    kind = next(name for cls, name in KINDS.items() if isinstance(event, cls))
    fields = msgspec.structs.asdict(event)
    if isinstance(event, BlockStored):
        fields["token_ids"] = msgspec.msgpack.decode(event.token_ids)
        assert tokens_of(event.token_ids) == (fields["token_ids"] or [])
    return {"kind": kind, **{name: plain(value) for name, value in fields.items()}}


def is_sound(event: KvEvent) -> bool:
    """Tokens are not looked at before somebody asks: then they are what they should be, or the event is as good as dropped."""
    try:
        return not isinstance(event, BlockStored) or tokens_of(event.token_ids) is not None
    except ValueError:
        return False


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda vector: vector["id"])
def test_every_golden_message_decodes_as_its_engine_meant_it(vector: dict[str, Any]) -> None:
    expected, found = vector["expected"], decode(vector)
    if "end_of_replay" in expected:
        assert found == EndOfReplay()
    elif expected.get("error") == "event-shape":
        assert isinstance(found, KvBatch)
        assert found.dropped + sum(not is_sound(event) for event in found.events) == 1
        assert (found.skipped, sum(map(is_sound, found.events))) == (0, 0)
    elif "error" in expected:
        assert isinstance(found, Malformed)
        assert found.category in [expected["error"], *expected.get("also_ok", [])]
    else:
        assert isinstance(found, KvBatch)
        assert (found.topic, found.seq, found.ts, found.dp_rank) == tuple(
            expected[name] for name in ("topic", "seq", "ts", "dp_rank")
        )
        assert [event_as_expected(event) for event in found.events] == expected["events"]
        assert (found.skipped, found.dropped) == (expected.get("skipped", 0), 0)


def test_golden_is_all_there() -> None:
    assert len(GOLDEN) == 33
    assert {vector["status"] for vector in GOLDEN} == {"valid", "malformed"}


def message(*events: Any, seq: int = 0) -> list[bytes]:
    return [b"", seq.to_bytes(8, "big"), msgspec.msgpack.encode([1.5, list(events), 0])]


def test_pairs_for_tokens_are_read_in_both_forms() -> None:
    fields = {
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [[1, 2], [2, 3]],
        "block_size": 2,
        "lora_id": None,
    }
    for event in ({"type": "BlockStored", **fields}, ["BlockStored", *fields.values()]):
        batch = decode_live(message(event))
        assert isinstance(batch, KvBatch)
        [found] = batch.events
        assert isinstance(found, BlockStored)
        assert tokens_of(found.token_ids) == [(1, 2), (2, 3)]


def test_events_of_both_dialects_may_meet_in_one_batch() -> None:
    batch = decode_live(
        message(["AllBlocksCleared"], {"type": "AllBlocksCleared"}, {"type": "New"}, ["New", 1], 7)
    )
    assert isinstance(batch, KvBatch)
    assert (len(batch.events), batch.skipped, batch.dropped) == (2, 2, 1)


def test_a_replay_without_topic_frame_is_read_too() -> None:
    _, number, payload = message(["AllBlocksCleared"], seq=3)
    batch = decode_replay([b"", number, payload])
    assert isinstance(batch, KvBatch)
    assert batch.seq == 3
    assert decode_replay([b"", b"\xff" * 8, b""]) == EndOfReplay()


def mutated(frames: list[bytes], rng: random.Random) -> list[bytes]:
    frames = list(frames)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(frames))
        body = bytearray(frames[at])
        match rng.randrange(6):
            case 0 if body:
                body[rng.randrange(len(body))] = rng.randrange(256)
            case 1 if body:
                body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
            case 2 if body:
                del body[rng.randrange(len(body)) :]
            case 3:
                body[rng.randint(0, len(body)) : 0] = rng.randbytes(rng.randrange(1, 9))
            case 4 if len(body) > 2:
                start = rng.randrange(len(body))
                del body[start : start + rng.randrange(1, 9)]
            case _:
                if rng.random() < 0.1:
                    frames.append(b"")
        frames[at] = bytes(body)
    return frames


def test_100_000_mutated_messages_are_counted_drops_and_nothing_else() -> None:
    """Through decoder, publisher and index: nothing is raised, and each message is applied, known, held, or counted."""
    rng = random.Random(5)
    small = [frames_of(v) for v in GOLDEN if v["channel"] == "sub" and len(v["frames_hex"]) == 3]
    small = [frames for frames in small if sum(map(len, frames)) < 1500]
    publisher = Publisher(Residency(Engine(dialect=DIALECT, block_tokens=16)), has_replay=False, now=0.0)
    for i in range(100_000):
        assert publisher.live(mutated(small[i % len(small)], rng), float(i)) is None
        if i % 1000 == 0:
            publisher.residency.held.leading(None, bytes(640))  # reads what was told below the root
    stats = publisher.stats
    assert stats.messages + stats.repeats + sum(stats.malformed.values()) == 100_000
    assert set(stats.malformed) == {"frame-count", "seq-length", "payload-decode", "batch-shape"}
    assert min(stats.messages, stats.dropped_events, stats.skipped_events, stats.generations) > 100
    publisher.residency.held.check_integrity()
    for start in range(200):
        prompt = b"".join((start * 31 % 128_000 + i).to_bytes(4, "little") for i in range(64))
        publisher.residency.held.leading(None, prompt)
