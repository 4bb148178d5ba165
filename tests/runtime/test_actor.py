"""The actor kernel: bounded inboxes, and a supervisor that restarts, backs off, gives up, and lets cancellation pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import structlog
import trio
import trio.testing

from dpurt.errors import ActorCrashed
from dpurt.runtime.actor import Actor, RestartPolicy, supervise

POLICY = RestartPolicy(max_restarts=3, within_s=60.0, backoff_s=1.0)


class Fragile(Actor[str]):
    """Fails on ``"bad"``; notes the rest, and when it was started."""

    name = "fragile"

    def __init__(self, inbox_size: int = 8) -> None:
        super().__init__(inbox_size)
        self.seen: list[str] = []
        self.starts: list[float] = []

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        self.starts.append(trio.current_time())
        await super().run(task_status)

    async def handle(self, message: str) -> None:
        if message == "bad":
            raise ValueError("bad message")
        self.seen.append(message)


async def test_messages_are_handled_in_order(autojump_clock: trio.testing.MockClock) -> None:
    actor = Fragile()
    async with trio.open_nursery() as nursery:
        await nursery.start(supervise, actor, POLICY)
        assert all(actor.tell(word) for word in "abc")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert actor.seen == ["a", "b", "c"]
    assert actor.told == 3


async def test_a_full_inbox_refuses_without_waiting_and_counts() -> None:
    actor = Fragile(2)
    assert [actor.tell("x") for _ in range(5)] == [True, True, False, False, False]
    assert (actor.told, actor.refused) == (2, 3)


async def test_a_failed_actor_loses_the_message_in_hand_and_keeps_its_inbox(
    autojump_clock: trio.testing.MockClock,
) -> None:
    actor = Fragile()
    async with trio.open_nursery() as nursery:
        await nursery.start(supervise, actor, POLICY)
        for word in ["a", "bad", "b"]:
            actor.tell(word)
        await trio.sleep(1.5)
        nursery.cancel_scope.cancel()
    assert actor.seen == ["a", "b"]
    assert actor.restarts == 1


async def test_the_pause_between_restarts_doubles(autojump_clock: trio.testing.MockClock) -> None:
    actor, began = Fragile(), trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(supervise, actor, POLICY)
        for _ in range(3):
            actor.tell("bad")
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    assert [start - began for start in actor.starts] == [0, 1, 3, 7]


async def test_past_the_limit_the_crash_is_raised_with_its_cause(
    autojump_clock: trio.testing.MockClock,
) -> None:
    actor = Fragile()
    for _ in range(4):
        actor.tell("bad")
    with pytest.raises(ActorCrashed) as caught:
        await supervise(actor, POLICY)
    assert (caught.value.actor, caught.value.restarts) == ("fragile", 3)
    assert isinstance(caught.value.__cause__, ValueError)
    assert len(actor.starts) == 4


async def test_failures_long_ago_do_not_count(autojump_clock: trio.testing.MockClock) -> None:
    actor = Fragile()
    async with trio.open_nursery() as nursery:
        await nursery.start(supervise, actor, POLICY)
        for _ in range(8):
            actor.tell("bad")
            await trio.sleep(61)
        nursery.cancel_scope.cancel()
    assert actor.restarts == 8


class NeverUp(Actor[None]):
    """Fails before it has started."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures
        self.runs = 0

    async def run(self, task_status: trio.TaskStatus[None]) -> None:
        self.runs += 1
        if self.runs <= self.failures:
            raise OSError("cannot bind")
        task_status.started()
        await trio.sleep_forever()


async def test_a_first_start_that_fails_is_raised_at_once() -> None:
    actor = NeverUp(1)
    with pytest.RaisesGroup(OSError):
        async with trio.open_nursery() as nursery:
            await nursery.start(supervise, actor, POLICY)
    assert actor.runs == 1


async def test_an_actor_that_ends_by_itself_is_not_restarted() -> None:
    class Short(Actor[None]):
        async def run(self, task_status: trio.TaskStatus[None]) -> None:
            task_status.started()

    actor = Short()
    await supervise(actor, POLICY)
    assert actor.restarts == 0


async def test_cancellation_passes_and_is_not_a_failure(autojump_clock: trio.testing.MockClock) -> None:
    actor = Fragile()
    with trio.move_on_after(5) as scope:
        await supervise(actor, POLICY)
    assert scope.cancelled_caught
    assert actor.restarts == 0


async def test_a_failure_in_an_actors_own_nursery_is_one_failure(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Nested(Actor[None]):
        name = "nested"
        fail: Callable[[], None]

        async def run(self, task_status: trio.TaskStatus[None]) -> None:
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(self._child)
                task_status.started()

        async def _child(self) -> None:
            await trio.sleep(1)
            raise KeyError("child")

    actor = Nested()
    with pytest.raises(ActorCrashed):
        await supervise(actor, RestartPolicy(max_restarts=1, within_s=60, backoff_s=1))
    assert actor.restarts == 1


async def test_each_failure_is_logged_under_the_agents_name(autojump_clock: trio.testing.MockClock) -> None:
    actor = Fragile()
    for _ in range(4):
        actor.tell("bad")
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logs:
        with pytest.raises(ActorCrashed):
            await supervise(actor, POLICY)
    assert [entry["event"] for entry in logs] == ["agent_failed"] * 4
    assert {entry["agent"] for entry in logs} == {"fragile"}
    assert "bad message" in logs[0]["error"]


async def test_an_actor_that_is_not_vital_gives_up_and_the_others_go_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Adviser(Fragile):
        has_given_up = False

        def give_up(self) -> None:
            self.has_given_up = True

    actor = Adviser()
    for _ in range(4):
        actor.tell("bad")
    await supervise(actor, RestartPolicy(max_restarts=3, within_s=60.0, backoff_s=1.0, is_vital=False))
    assert actor.has_given_up
    assert len(actor.starts) == 4
