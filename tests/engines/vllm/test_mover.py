"""The worker's side with KV tensors of our own and a real node: whose memory is touched, until when."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dpurt.core.identity import Space
from dpurt.engines.vllm.link import Link, release, shared_link
from dpurt.engines.vllm.pages import Pages, UnsupportedLayout
from dpurt.engines.vllm.plan import Ending, Order, Step
from dpurt.engines.vllm.settings import Settings, access_from
from dpurt.engines.vllm.worker import Mover, Results

Make = Callable[..., Any]
NUM_BLOCKS = 64
TOKENS = np.arange(NUM_BLOCKS * 32, dtype="<i4").tobytes()


class Rig:
    """A worker: KV of 30 layers, filled with what nothing else is."""

    def __init__(self, node: Any, **settings: Any) -> None:
        self.caches = {f"model.layers.{i}.attn": torch.randn(NUM_BLOCKS, 3, 32, 128) for i in range(30)}
        heads = dict.fromkeys(self.caches, (3, 64))
        self.pages = Pages(self.caches, NUM_BLOCKS, heads, dict.fromkeys(self.caches), 32)
        chosen = Settings(space="smollm2", topology=str(node.topology), **settings)
        access = access_from(chosen)
        space = Space(
            model="SmolLM2-135M", revision="1", kv_dtype="float32", geometry=self.pages.geometry,
            tenant=access.tenant, salt=access.salt,
        )  # fmt: skip
        self.link: Link = shared_link(chosen, access, space)
        self.mover = Mover(self.link, chosen, self.pages, 0)

    def close(self) -> None:
        self.mover.close()
        release(self.link)

    def step(self, **orders: Any) -> Step:
        step = Step(is_idle=True, **orders)
        self.mover.preempt(step)
        self.mover.start_loads(step)
        self.mover.start_saves(step)
        return step

    def results(self, until: Callable[[Results], bool], within_s: float = 20.0) -> Results:
        deadline = time.monotonic() + within_s
        read, loaded, failed = set[str](), set[str](), set[int]()
        while time.monotonic() < deadline:
            more = self.mover.take_results(is_idle=True)
            read, loaded, failed = read | more.read, loaded | more.loaded, failed | more.failed_blocks
            if until(Results(read, loaded, failed)):
                return Results(read, loaded, failed)
        raise AssertionError("nothing came")

    def store(self, count: int) -> None:
        """Blocks [0, count) of the prompt, from the engine's blocks of the same numbers."""
        order = Order("writer", 0, tuple(range(count)), TOKENS[: count * 128])
        self.step(saves=[order], endings=[Ending("writer", "end_turn", True)])
        self.results(lambda r: "writer" in r.read)
        self.mover._saver.submit(bool).result()

    def copy(self) -> list[torch.Tensor]:
        return [cache.clone() for cache in self.caches.values()]


@pytest.fixture
def make_rig(make_node: Make) -> Iterator[Make]:
    rigs: list[Rig] = []

    def make(**settings: Any) -> tuple[Rig, Any]:
        node = make_node()
        rigs.append(Rig(node, **settings))
        return rigs[-1], node

    yield make
    for rig in rigs:
        rig.close()


def load(ids: range, **fields: Any) -> Order:
    return Order("reader", 0, tuple(ids), TOKENS[: len(ids) * 128], **fields)


def test_bytes_come_back_where_they_are_wanted_and_nowhere_else(make_rig: Make) -> None:
    rig, _ = make_rig()
    before = rig.copy()
    rig.store(20)
    rig.step(loads=[load(range(40, 60))])
    assert rig.results(lambda r: bool(r.loaded)).failed_blocks == set()
    for cache, old in zip(rig.caches.values(), before, strict=True):
        assert torch.equal(cache[40:60], old[:20])
        assert torch.equal(cache[:40], old[:40])
        assert torch.equal(cache[60:], old[60:])


def test_a_load_by_layer_brings_each_part_before_it_is_read(make_rig: Make) -> None:
    rig, _ = make_rig()
    rig.store(20)
    step = Step(loads=[load(range(40, 60), by_layer=True)])
    rig.mover.start_loads(step)
    for part, cache in enumerate(rig.caches.values()):
        rig.mover.wait_for_part(part)
        assert torch.equal(cache[40:60], cache[:20])


def test_blocks_that_are_not_there_are_named_from_the_first_on(make_rig: Make) -> None:
    rig, _ = make_rig()
    rig.store(10)
    rig.step(loads=[load(range(30, 50))])
    assert rig.results(lambda r: bool(r.loaded)).failed_blocks == set(range(40, 50))


def test_after_a_wait_was_given_up_no_byte_is_written(make_rig: Make) -> None:
    rig, node = make_rig(layer_wait_s=0.3)
    rig.store(20)
    before = rig.copy()
    node.freeze()
    began = time.monotonic()
    rig.mover.start_loads(Step(loads=[load(range(40, 60), by_layer=True)]))
    for part in range(30):
        rig.mover.wait_for_part(part)
    assert time.monotonic() - began < 1.0
    assert rig.mover.take_results(is_idle=False).failed_blocks == set(range(40, 60))
    node.thaw()
    time.sleep(0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, rig.copy(), strict=True))


def test_a_preempted_save_stores_nothing_that_was_read_afterwards(
    make_rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, _ = make_rig(save_buffer_bytes=10 * 30 * 49152)  # ten blocks at a time
    reading, go_on = threading.Event(), threading.Event()
    gather = rig.pages.gather

    def slowly(ids: Any, into: Any) -> None:
        reading.set()
        go_on.wait(10)
        gather(ids, into)

    monkeypatch.setattr(rig.pages, "gather", slowly)
    truth = rig.copy()
    rig.step(saves=[Order("writer", 0, tuple(range(30)), TOKENS[: 30 * 128])])
    reading.wait(10)
    threading.Timer(0.1, go_on.set).start()
    rig.mover.preempt(Step(preempted=("writer",)))  # returns when the batch at hand was read
    for cache in rig.caches.values():
        cache[:30] = 0.0  # the engine gives the blocks to somebody else
    rig.step(endings=[Ending("writer", "end_turn", False)])
    rig.mover._saver.submit(bool).result()
    rig.step(loads=[load(range(30, 60))])
    failed = rig.results(lambda r: bool(r.loaded)).failed_blocks
    assert failed == set(range(40, 60))
    for cache, old in zip(rig.caches.values(), truth, strict=True):
        assert torch.equal(cache[30:40], old[:10])


def test_stores_are_given_up_while_the_node_is_away_and_blocks_are_not_held_for_it(make_rig: Make) -> None:
    rig, node = make_rig(save_timeout_s=0.5)
    rig.store(2)
    node.freeze()
    began = time.monotonic()
    for i in range(10):
        order = Order(f"w{i}", 0, tuple(range(10, 20)), TOKENS[1280 * i : 1280 * (i + 1)])
        rig.step(saves=[order], endings=[Ending(f"w{i}", "end_turn", True)])
    rig.results(lambda r: len(r.read) == 10)
    assert time.monotonic() - began < 5.0
    node.thaw()


@pytest.mark.parametrize(
    ("shape", "stride", "packing"),
    [
        ((8, 3, 32, 128), None, "1:(1.3)x(2.32)x(3.128)"),
        ((2, 8, 16, 4, 64), None, "2:(1.16)x(2.4)x(3.64)"),
        ((16, 16, 4, 64), None, "1:(1.16)x(2.4)x(3.64):2"),
        ((8, 4, 16, 64), (4 * 16 * 64, 64, 4 * 64, 1), "1:(2.16)x(1.4)x(3.64)"),
    ],
)
def test_each_layout_has_its_own_name_and_comes_back(
    shape: tuple[int, ...], stride: tuple[int, ...] | None, packing: str
) -> None:
    cache = torch.randn(shape)
    if stride:
        cache = torch.as_strided(cache.clone(), shape, stride)
    pages = Pages({"layers.0": cache}, 8, {"layers.0": (4, 64)}, {"layers.0": None}, 16)
    [group] = pages.geometry.groups
    assert group.packing == packing
    before = cache.clone()
    room = np.empty((2, group.part_bytes), np.uint8)
    pages.gather([1, 2], room)
    pages.scatter([5, 6], [room[0], room[1]], 0)
    moved = torch.equal
    dimension = 1 if shape[0] == 2 else 0
    split = shape[dimension] // 8
    for source, target in ((1, 5), (2, 6)):
        for i in range(split):
            assert moved(
                cache.select(dimension, target * split + i), before.select(dimension, source * split + i)
            )


def test_memory_that_is_not_a_row_a_block_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="no dimension of 8 blocks"):
        Pages({"layers.0": torch.zeros(3, 4)}, 8, {"layers.0": (1, 1)}, {"layers.0": None}, 16)
