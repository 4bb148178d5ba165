"""After any mix of loss, replay and restart the index equals what the publishers hold; and how single faults are met."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dpurt.core.held_blocks import HostTier, Leading
from dpurt.engines import sglang_events, vllm_events
from dpurt.engines.kv_events import END_SEQ
from dpurt.engines.publisher import MAX_LOST, MAX_TRIES, PROBE_S, SILENT_S, Ask, Publisher
from dpurt.engines.residency import Engine, Residency, label_of
from dpurt.engines.sources import Source, checked
from dpurt.errors import RemoteProtocolError

BLOCK = 4
Chain = tuple[int, ...]
WORDS = {HostTier.HBM: "GPU", HostTier.CPU: "CPU"}


def hash_of(chain: Chain) -> int:
    return int.from_bytes(hashlib.sha256(repr(chain).encode()).digest()[-8:], "big")


def tokens_of(chain: Sequence[int]) -> list[int]:
    return [block * 10 + i for block in chain for i in range(BLOCK)]


def stored(chain: Chain, first: int = 0, medium: str | None = "GPU", **fields: Any) -> dict[str, Any]:
    """Blocks `first` and on of a chain."""
    return {
        "type": "BlockStored",
        "block_hashes": [hash_of(chain[: i + 1]) for i in range(first, len(chain))],
        "parent_block_hash": hash_of(chain[:first]) if first else None,
        "token_ids": tokens_of(chain[first:]),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        **fields,
    }


def placeholder(chain: Chain, medium: str) -> dict[str, Any]:
    return {
        **stored(chain, len(chain) - 1, medium),
        "token_ids": [],
        "block_size": 0,
        "parent_block_hash": None,
    }


def removed(chain: Chain, medium: str | None = "GPU", **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [hash_of(chain)], "medium": medium, **fields}


CLEARED = {"type": "AllBlocksCleared"}


@dataclass
class Process:
    """An engine: what it holds, and the messages it can replay."""

    ts: float
    held: dict[tuple[Chain, HostTier], int] = field(default_factory=dict)
    sent: list[list[bytes]] = field(default_factory=list)

    def publish(self, *events: Any) -> list[bytes]:
        self.ts += 0.5
        payload = msgspec.msgpack.encode([self.ts, list(events), 0])
        self.sent.append([b"t", len(self.sent).to_bytes(8, "big"), payload])
        return self.sent[-1]


class Line:
    """A publisher's core, its engine, and the sockets between them."""

    def __init__(self, dialect: Any = vllm_events.DIALECT, **options: Any) -> None:
        self.process = Process(ts=100.0)
        self.residency = Residency(Engine(dialect=dialect, block_tokens=BLOCK, loras=frozenset({"adapter"})))
        self.core = Publisher(self.residency, has_replay=options.get("has_replay", True), now=0.0)
        self.now = 0.0
        self.under_way: list[list[bytes]] = []
        self.asked: Ask | None = None
        self.buffer = options.get("buffer", 10**6)

    def publish(self, *events: Any) -> None:
        self.under_way.append(self.process.publish(*events))

    def note(self, ask: Ask | None) -> None:
        if ask is not None:
            assert self.asked is None, "asked for a second replay during the first"
            self.asked = ask

    def deliver(self, count: int = 10**6) -> None:
        for frames in self.under_way[:count]:
            self.note(self.core.live(frames, self.now))
        del self.under_way[:count]

    def replay(self, lose: Callable[[int], bool] = lambda _: False) -> None:
        assert self.asked is not None
        kept = max(len(self.process.sent) - self.buffer, 0)
        start, self.asked = max(self.asked.start, kept), None
        for number, frames in enumerate(self.process.sent[start:]):
            if not lose(number):
                assert self.core.replayed([b"", *frames], self.now) is None
        self.note(self.core.replayed([b"", b"", END_SEQ, b""], self.now))

    def fail_replay(self) -> None:
        self.asked = None
        self.note(self.core.replay_failed(self.now))

    def restart(self, ts: float | None = None) -> None:
        self.process = Process(ts=self.process.ts + 10 if ts is None else ts)
        self.note(self.core.interrupted(self.now))  # the sockets noticed

    def settle(self) -> None:
        """All that was sent and not lost arrives, and a probe finds what was lost at the end."""
        self.deliver()
        for _ in range(2):
            while self.asked is not None:
                self.replay()
            self.now += PROBE_S
            self.note(self.core.tick(self.now))
        while self.asked is not None:
            self.replay()

    def known(self) -> set[tuple[Chain, HostTier]]:
        """What of the engine's holdings is known."""
        return {key for key in self.process.held if self.residency.held.holds(hash_of(key[0]), key[1])}

    def leading(self, chain: Chain, label: bytes = b"") -> Leading:
        return self.residency.held.leading(None, prompt(chain), label)

    def true_leading(self, chain: Chain) -> Leading:
        """What the engine holds of a prompt."""
        held = self.process.held
        parts = [chain[: i + 1] for i in range(len(chain))]
        hbm = [(part, HostTier.HBM) in held for part in parts]
        both = [one or (part, HostTier.CPU) in held for one, part in zip(hbm, parts, strict=True)]
        return Leading(*([*one, False].index(False) for one in (hbm, both)))


def prompt(chain: Chain) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens_of(chain))


class Publishing(RuleBasedStateMachine):
    """Two engines with the same prompts; one forgets old messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [Line(), Line()]

    which = st.integers(0, 1)
    blocks = st.integers(0, 2)

    def batch(self, line: Line, rng: random.Random, count: int) -> list[Any]:
        return [self.event(line.process.held, rng) for _ in range(count)]

    def event(self, held: dict[tuple[Chain, HostTier], int], rng: random.Random) -> Any:
        here = sorted({chain for chain, _ in held})
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                below = rng.choice([(), *here]) if rng.random() < 0.8 else ()
                chain = (*below, *(rng.randrange(3) for _ in range(rng.randint(1, 3))))
                tier = rng.choice((HostTier.HBM, HostTier.HBM, HostTier.CPU))
                return self.store(held, chain, len(below), tier)
            case 4 if here:
                chain = rng.choice(here)
                self.count(held, chain, HostTier.CPU)
                return placeholder(chain, "CPU")
            case 5 if rng.random() < 0.15:
                for key in [key for key in held if key[1] is HostTier.HBM]:
                    del held[key]
                return CLEARED
            case 6:
                return {"type": "SomethingNew", "x": 1}
            case _ if held:
                chain, tier = rng.choice(sorted(held))
                held[chain, tier] -= 1
                if not held[chain, tier]:
                    del held[chain, tier]
                return removed(chain, WORDS[tier])
        return {"type": "BlockRemoved", "block_hashes": [12345], "medium": "GPU"}  # never stored

    def store(self, held: dict[tuple[Chain, HostTier], int], chain: Chain, first: int, tier: HostTier) -> Any:
        for i in range(first, len(chain)):
            self.count(held, chain[: i + 1], tier)
        return stored(chain, first, WORDS[tier])

    @staticmethod
    def count(held: dict[tuple[Chain, HostTier], int], chain: Chain, tier: HostTier) -> None:
        held[chain, tier] = held.get((chain, tier), 0) + 1 if tier is HostTier.CPU else 1

    @rule(which=which, seed=st.integers(0, 2**32), count=st.integers(0, 4))
    def publish(self, which: int, seed: int, count: int) -> None:
        line = self.lines[which]
        line.publish(*self.batch(line, random.Random(seed), count))

    @rule(which=which, chain=st.lists(blocks, min_size=2, max_size=5).map(tuple), seed=st.integers(0, 99))
    def publish_child_first(self, which: int, chain: Chain, seed: int) -> None:
        line = self.lines[which]
        events = [stored(chain[: i + 1], i, "CPU") for i in range(len(chain))]
        for i in range(len(chain)):
            self.count(line.process.held, chain[: i + 1], HostTier.CPU)
        random.Random(seed).shuffle(events)
        line.publish(*events)

    @rule(which=which, count=st.integers(1, 3))
    def deliver(self, which: int, count: int) -> None:
        self.lines[which].deliver(count)

    @rule(which=which)
    def lose(self, which: int) -> None:
        del self.lines[which].under_way[:1]

    @rule(which=which)
    def deliver_twice(self, which: int) -> None:
        line = self.lines[which]
        line.under_way[:1] = line.under_way[:1] * 2

    @rule(which=which)
    def restart(self, which: int) -> None:
        self.lines[which].restart()

    @rule(which=which, lost=st.sets(st.integers(0, 5)))
    def replay(self, which: int, lost: set[int]) -> None:
        line = self.lines[which]
        if line.asked is not None:
            line.replay(lost.__contains__)

    @rule(which=which)
    def fail_replay(self, which: int) -> None:
        if self.lines[which].asked is not None:
            self.lines[which].fail_replay()

    @rule(which=which)
    def time_passes(self, which: int) -> None:
        line = self.lines[which]
        line.now += PROBE_S
        line.note(line.core.tick(line.now))

    @rule(which=which)
    def in_the_end_the_index_equals_what_is_held(self, which: int) -> None:
        line = self.lines[which]
        line.settle()
        assert not line.core.is_partial
        assert line.known() == set(line.process.held)
        assert len(line.residency.held) == len(line.process.held)  # and not a block more
        for chain in {chain for chain, _ in line.process.held}:
            assert line.leading(chain) == line.true_leading(chain)

    @rule(which=which, chain=st.lists(blocks, min_size=1, max_size=6).map(tuple))
    def any_prompt_may_be_asked_for_at_any_time(self, which: int, chain: Chain) -> None:
        leading = self.lines[which].leading(chain)
        assert 0 <= leading.hbm <= leading.both <= len(chain)

    @invariant()
    def what_is_held_is_consistent(self) -> None:
        for line in self.lines:
            line.residency.held.check_integrity()


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# --- single faults ---


def line(**options: Any) -> Line:
    return Line(**options)


def test_a_gap_is_seen_with_the_very_next_message_and_replayed_from_the_last_one_known() -> None:
    one = line()
    for i in range(3):
        one.publish(stored((i,)))
    del one.under_way[1]
    one.deliver(1)
    assert one.asked is None
    one.deliver(1)
    assert one.asked == Ask(0)
    assert one.core.stats.gaps == 1
    one.replay()
    assert [one.residency.held.holds(hash_of((i,)), HostTier.HBM) for i in range(3)] == [True] * 3
    assert (one.core.stats.lost, one.core.is_partial) == (0, False)


def test_without_a_replay_socket_a_gap_clears_what_may_be_gone_and_goes_on() -> None:
    one = line(has_replay=False)
    for i in range(3):
        one.publish(stored((i,)))
    del one.under_way[1]
    one.deliver()
    assert [one.residency.held.holds(hash_of((i,)), HostTier.HBM) for i in range(3)] == [False, False, True]
    assert (one.core.stats.lost, one.core.is_partial) == (1, True)


def test_what_the_replay_no_longer_has_is_lost_and_counted() -> None:
    one = line(buffer=2)
    for i in range(6):
        one.publish(stored((i,)))
    del one.under_way[1:5]
    one.deliver()
    one.replay()
    held = [one.residency.held.holds(hash_of((i,)), HostTier.HBM) for i in range(6)]
    assert held == [False] * 4 + [True] * 2
    assert (one.core.stats.lost, one.core.is_partial) == (3, True)


def test_who_joins_late_asks_for_all_there_was() -> None:
    one = line()
    for i in range(4):
        one.publish(stored((i,)))
    one.under_way.clear()
    one.note(one.core.interrupted(0.0))
    assert one.asked == Ask(0)
    one.replay()
    assert one.residency.held.holds(hash_of((0,)), HostTier.HBM)
    assert not one.core.is_partial


def test_a_new_process_clears_what_the_old_one_said_also_when_its_clock_is_behind() -> None:
    one = line()
    one.publish(stored((1,)))
    one.deliver()
    one.restart(ts=1.0)
    one.publish(stored((2,)))
    one.settle()
    assert not one.residency.held.holds(hash_of((1,)), HostTier.HBM)
    assert one.residency.held.holds(hash_of((2,)), HostTier.HBM)
    assert one.core.stats.generations == 1


@pytest.mark.parametrize("is_held_back", [True, False])
def test_a_message_of_the_old_process_that_comes_after_a_restart_is_found_out_even_when_the_first_new_one_is_lost(
    is_held_back: bool,
) -> None:
    one = line()
    one.publish(stored((1,)))
    one.restart()
    if is_held_back:
        one.deliver()
        one.replay()
    else:
        one.replay()
        one.deliver()
    one.publish(stored((2,)))
    one.under_way.clear()
    one.publish(stored((3,)))
    one.settle()
    assert [one.residency.held.holds(hash_of((i,)), HostTier.HBM) for i in (1, 2, 3)] == [False, True, True]
    assert one.core.stats.generations == 1


def test_a_replay_that_never_comes_is_given_up_and_the_stream_goes_on() -> None:
    one = line()
    for i in range(3):
        one.publish(stored((i,)))
    del one.under_way[1]
    one.deliver()
    for _ in range(MAX_TRIES):
        if one.asked is not None:
            one.fail_replay()
    assert one.asked is None
    assert one.residency.held.holds(hash_of((2,)), HostTier.HBM)
    one.settle()  # and once it comes, all is known again
    assert one.residency.held.holds(hash_of((1,)), HostTier.HBM)
    assert not one.core.is_partial


def test_a_message_that_cannot_be_read_is_asked_for_again_and_passed_over_if_it_is_no_better() -> None:
    one = line()
    one.publish(stored((0,)))
    one.publish(stored((1,)))
    one.under_way[1] = [*one.under_way[1][:2], b"\xc1"]
    one.deliver()
    assert one.asked == Ask(0)
    one.process.sent[1] = [*one.process.sent[1][:2], b"\xc1"]
    one.replay()
    one.publish(stored((2,)))
    one.deliver()
    assert one.residency.held.holds(hash_of((2,)), HostTier.HBM)
    assert one.core.stats.malformed == {"payload-decode": 2}


def test_silence_is_noticed_and_an_answered_probe_ends_it() -> None:
    one = line()
    one.now = SILENT_S + 1
    assert one.core.is_silent(one.now)
    one.note(one.core.tick(one.now))
    one.replay()
    assert not one.core.is_silent(one.now)
    assert one.core.confirmed_at == one.now


# --- what events mean ---


def holds(one: Line, chain: Chain, tier: HostTier = HostTier.HBM) -> bool:
    one.deliver()
    return one.residency.held.holds(hash_of(chain), tier)


def test_a_child_may_come_before_its_parent() -> None:
    one = line()
    one.publish(stored((1, 2, 3), 2, "CPU"), stored((1, 2), 1, "CPU"))
    one.deliver()
    assert one.leading((1, 2, 3)) == Leading(0, 0)
    one.publish(stored((1,), 0, "CPU"))
    one.deliver()
    assert one.leading((1, 2, 3)) == Leading(0, 3)


def test_a_block_that_went_from_amid_a_chain_and_comes_back_with_another_one_below_it_leads_on() -> None:
    one = line()
    one.publish(stored((0, 0, 0)), removed((0, 0)), stored((0, 0, 1), 1))
    one.deliver()
    assert one.leading((0, 0, 0)) == one.leading((0, 0, 1)) == Leading(3, 3)


def test_a_long_chain_told_backwards_is_found() -> None:
    one, chain = line(), tuple(range(3000))
    one.publish(*(stored(chain[: i + 1], i, "CPU") for i in reversed(range(3000))))
    one.deliver()
    assert one.leading(chain) == Leading(0, 3000)


def test_a_placeholder_tells_of_a_tier_and_makes_no_block() -> None:
    one = line()
    one.publish(placeholder((1,), "CPU"))
    one.deliver()
    assert one.leading((1,)) == Leading(0, 0)
    one.publish(stored((1,)), removed((1,)))
    one.deliver()
    assert one.leading((1,)) == Leading(0, 1)


def test_an_offloaded_hash_told_twice_must_be_removed_twice_in_vllm_only() -> None:
    for dialect, word, left in (
        (vllm_events.DIALECT, "CPU", True),
        (sglang_events.DIALECT, "CPU_PINNED", False),
    ):
        one = line(dialect=dialect)
        one.publish(stored((1,), 0, word), stored((1,), 0, word), removed((1,), word))
        assert holds(one, (1,), HostTier.CPU) is left


def test_a_clear_is_of_the_gpu_pool_in_vllm_and_of_both_in_sglang() -> None:
    for dialect, word, left in (
        (vllm_events.DIALECT, "CPU", True),
        (sglang_events.DIALECT, "CPU_PINNED", False),
    ):
        one = line(dialect=dialect)
        one.publish(stored((1,)), stored((1,), 0, word), CLEARED)
        assert not holds(one, (1,))
        assert holds(one, (1,), HostTier.CPU) is left


def test_windowed_groups_do_not_count_neither_when_stored_nor_when_removed() -> None:
    one = line()
    one.publish(
        stored((1,), group_idx=0, kv_cache_spec_kind="full_attention"),
        stored((2,), group_idx=1, kv_cache_spec_kind="sliding_window"),
        removed((1,), group_idx=1),
    )
    assert holds(one, (1,))
    assert not holds(one, (2,))
    assert one.residency.stats.passed_over == {"group": 2}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"block_size": 3}, "block_size"),
        ({"token_ids": list(range(100 * BLOCK))}, "too_long"),
        ({"lora_name": "unknown"}, "lora"),
        ({"medium": "STORAGE"}, "medium"),
        ({"medium": "MARS"}, "medium"),
    ],
)
def test_what_is_not_ours_to_know_is_passed_over_with_a_reason(fields: dict[str, Any], reason: str) -> None:
    one = line()
    one.publish(stored((1,), **fields))
    assert not holds(one, (1,))
    assert one.residency.stats.passed_over == {reason: 1}


def test_salts_images_loras_and_odd_tokens_never_match_a_plain_prompt() -> None:
    one = line()
    plain = stored((1, 2))
    for i, fields in enumerate(
        (
            {"extra_keys": [["salt"], None]},
            {"cache_salt": "pepper"},
            {"extra_keys": [[["image", 3]], None]},
            {"lora_name": "adapter", "extra_keys": [["adapter"], ["adapter"]]},
            {"token_ids": [2**40 + n for n in range(2 * BLOCK)]},
            {"token_ids": [[n, n + 1] for n in range(2 * BLOCK)]},
            {"token_ids": [-1] * 2 * BLOCK},
            {"token_ids": [1]},
            {"token_ids": "words"},
        )
    ):
        one.publish({**plain, "block_hashes": [100 + i, 200 + i], **fields})
        lora = {"lora_name": "adapter"} if "lora_name" in fields else {}
        one.publish({**stored((1, 2, 3), 2), "block_hashes": [300 + i], "parent_block_hash": 200 + i, **lora})
    one.deliver()
    held = one.residency.held
    assert held.leading(None, prompt((1, 2, 3))) == Leading(0, 0)
    assert held.leading("adapter", prompt((1, 2, 3))) == Leading(3, 3)
    for salt in ("salt", "pepper"):
        assert held.leading(None, prompt((1, 2, 3)), label_of([salt])) == Leading(3, 3)
    assert held.leading(None, prompt((1, 2, 3)), label_of(["other"])) == Leading(0, 0)
    assert one.residency.stats.odd > 0


def test_what_is_nested_too_deeply_to_be_told_apart_is_like_nothing_else() -> None:
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    assert label_of([deep]) != label_of([deep])
    assert len(label_of([deep])) == 16


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://h:5557/", "tcp://h:5557?x=1", "tcp://a$b:5", "tcp://h", "ipc://", "ipc:///" + "x" * 200],
)
def test_an_endpoint_that_cannot_be_connected_to_is_no_source(endpoint: str) -> None:
    with pytest.raises(RemoteProtocolError, match="no endpoint"):
        checked([Source(rank=0, events=endpoint)])
    good = ("tcp://gpu-7.rack_1:5557", "tcp://[fe80::1]:1", "ipc:///run/x")
    assert len(checked([Source(rank=i, events=one) for i, one in enumerate(good)])) == 3


def test_a_block_of_a_billion_tokens_is_nobodys() -> None:
    with pytest.raises(RemoteProtocolError, match="blocks of"):
        checked([Source(rank=0, events="tcp://h:1", block_tokens=1 << 44)])


def test_lost_messages_are_counted_as_far_as_a_counter_goes() -> None:
    publisher = Publisher(
        Residency(Engine(dialect=vllm_events.DIALECT, block_tokens=4)), has_replay=False, now=0.0
    )
    for _ in range(3):
        publisher._surrender((1 << 63) - 1)
    assert publisher.stats.lost == MAX_LOST
