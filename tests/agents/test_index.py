"""The index agent: drops told to all, expiry, epochs, and the reason for every miss."""

from __future__ import annotations

import trio
import trio.testing

from dpurt.bdev.memory import MemoryBdev
from dpurt.core.events import Dropped, Evicted
from dpurt.core.identity import ROOT_KEY, digest_key
from dpurt.testing.agents import Agents, capacity, running_agents, small_space
from dpurt.testing.node_steps import push_out, tokens
from dpurt.wire import messages as m


async def explain(agents: Agents, *blocks: int) -> list[m.Reason]:
    return await agents.index.explain(agents.state, tokens(*blocks), None, 0, [])


async def test_dropping_a_block_frees_slots_and_extents_of_all_below_it() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        await agents.store(0, 1, 2)
        await agents.until_written()
        live = agents.storage.store.stores[0].stats().log.live_records
        middle = agents.state.block_id(agents.handles(0, 1)[1])
        refs = agents.refs(0, 1, 2)
        agents.index.drop(agents.state, middle, "lost", trio.current_time())
        assert agents.storage.store.stores[0].stats().log.live_records == live - 2
        assert [agents.pool.find(ref) is None for ref in refs] == [False, True, True]
        assert [event.block for event in agents.events if isinstance(event, Dropped)] == refs[1:]
        assert [reason.reason for reason in (await explain(agents, 0, 1, 2, 3))] == [
            "present", "lost", "parent_lost", "never_stored",
        ]  # fmt: skip
        assert (await explain(agents, 0, 1, 2))[2].detail == "its prefix was lost"


async def test_an_eviction_is_a_loss_only_without_a_copy_on_flash() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        await agents.store(0, 1)
        await agents.until_written()
        second = agents.state.block_id(agents.handles(0, 1)[1])
        agents.storage.store.forget(agents.state.extent_of(second, 0))
        agents.state.index.clear_extent(second, 0)
        push_out(agents.staging)
        assert len([event for event in agents.events if isinstance(event, Evicted)]) == 2
        assert [reason.reason for reason in (await explain(agents, 0, 1))] == ["present", "evicted"]
        assert (await explain(agents, 0))[0].detail == "in nvme"


async def test_blocks_expire_a_time_to_live_after_their_last_use(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(MemoryBdev(capacity(8)), ttl_s=10.0) as agents:
        await agents.store(0, 1)
        await agents.store(5)
        await trio.sleep(8)
        ids = agents.index.match(agents.state, tokens(0, 1), None)
        agents.index.touch(agents.state, ids, trio.current_time())
        await trio.sleep(4)
        assert (len(agents.handles(0, 1)), len(agents.handles(5))) == (2, 0)
        assert (await explain(agents, 5))[0].reason == "expired"
        await trio.sleep(8)
        assert not agents.handles(0, 1)
        agents.assert_nothing_held()


async def test_a_prefix_lives_as_long_as_what_was_stored_behind_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(MemoryBdev(capacity(8)), ttl_s=10.0) as agents:
        await agents.store(0)
        await trio.sleep(8)
        await agents.store(0, 1, first=1)
        await trio.sleep(8)
        assert len(agents.handles(0, 1)) == 2
        await trio.sleep(4)
        assert not agents.handles(0, 1)


async def test_a_block_that_is_back_has_no_reason_to_be_gone() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        await agents.store(0)
        await agents.until_written()
        agents.index.drop(
            agents.state, agents.state.block_id(agents.handles(0)[0]), "lost", trio.current_time()
        )
        assert (await explain(agents, 0))[0].reason == "lost"
        await agents.store(0)
        assert (await explain(agents, 0))[0].reason == "present"


async def test_a_refused_load_is_told_beside_the_block_that_is_present(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        await agents.store(0)
        handles = agents.state.index.handles(agents.state.index.match(tokens(0)))
        agents.index.note_refusal(agents.state, handles, 0, "late", "deadline")
        agents.index.note_refusal(agents.state, handles, 7, "late", "beyond what is known")
        await trio.sleep(3)
        [reason] = await explain(agents, 0)
        assert reason.reason == "present"
        assert reason.detail.endswith("3.0 s ago it was refused: late deadline")


async def test_refs_of_a_retired_epoch_find_nothing() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        await agents.store(0)
        old, [ref] = agents.state, agents.refs(0)
        agents.index.bury(old, old.index.match(tokens(0)))
        agents.add_epoch(small_space(epoch=1))
        assert agents.staging.where(ref) == "gone"
        assert [reason.reason for reason in (await explain(agents, 0, 1))] == ["epoch", "never_stored"]
        agents.index.slot_evicted(ref, trio.current_time(), "by a test")
        agents.index.forget_retired(old)
        assert agents.staging.where(ref) == "gone"
        assert agents.index.drops == {}


async def test_a_chain_of_keys_starts_at_the_parent_of_its_first_block() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        state, prompt = agents.state, tokens(0, 1, 2)
        whole = agents.index.chain(state, prompt, None, 0, 3)
        assert whole is not None
        assert whole[0] == ROOT_KEY
        assert agents.index.chain(state, prompt, None, 1, 2) == whole[1:]
        await agents.store(0, 1)
        assert agents.index.chain(state, prompt, None, 2, 1) == whole[2:], "known keys are not computed again"
        assert agents.index.chain(state, prompt, None, 1, 3) is None
        digests = [b"1" * 8, b"2" * 8]
        keys = [digest_key(state.fingerprint, digest) for digest in digests]
        assert agents.index.chain(state, None, digests, 0, 2) == [ROOT_KEY, *keys]
        assert agents.index.chain(state, None, digests, 1, 1) == keys
        assert agents.index.chain(state, None, digests, 1, 2) is None


async def test_tokens_below_a_chain_of_digests_do_not_fit_and_are_refused() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        state = agents.state
        ids = agents.index.enter(state, ROOT_KEY, [b"k" * 16], 0, None, 0.0)
        assert ids is not None
        assert agents.index.enter(state, b"k" * 16, [b"l" * 16], 1, tokens(0, 1), 0.0) is None
        assert agents.index.enter(state, b"x" * 16, [b"l" * 16], 1, None, 0.0) is None


async def test_records_that_stay_empty_go_when_the_store_of_them_ends() -> None:
    async with running_agents(MemoryBdev(capacity(8))) as agents:
        state = agents.state
        ids = agents.index.enter(state, ROOT_KEY, [b"k" * 16, b"l" * 16], 0, None, 0.0)
        assert ids is not None
        with agents.index.pinned(state, ids):
            assert len(state.index) == 2
        assert len(state.index) == 0
