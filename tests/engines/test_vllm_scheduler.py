"""The scheduler's side without vLLM: requests as it would show them, a client that answers as told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpurt.engines.vllm.counters import Tally, add, flat
from dpurt.engines.vllm.link import code_of, space_table
from dpurt.engines.vllm.scheduler import Asker, digest_of
from dpurt.engines.vllm.settings import Settings, TierSettings, access_from, settings_from
from dpurt.errors import ConfigError, NodeUnavailable, SpaceMismatch
from dpurt.testing.node import small_config
from dpurt.wire import messages as m

BT = 8


@dataclass
class FakeLink:
    """Answers lookups with `matched` blocks once `answers` is set."""

    matched: int = 0
    nvme: int = 0
    answers: threading.Event = field(default_factory=threading.Event)
    tally: Tally = field(default_factory=Tally)
    asked: list[bytes] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    hints: list[m.Hint] = field(default_factory=list)
    roles: set[str] = field(default_factory=lambda: {"worker"})
    state: str = "up"

    @property
    def client(self) -> FakeLink:
        return self

    @property
    def is_up(self) -> bool:
        return True

    def call(self, do: Callable[[Any], Any]) -> Any:
        self.answers.wait(5)
        return do(self)

    def lookup(self, space: str, request: str, tokens: bytes, **rest: Any) -> m.LookupReply:
        self.asked.append(tokens)
        self.priorities.append(rest["priority"])
        return m.LookupReply(
            id=1, matched_blocks=self.matched, matched_tokens=self.matched * BT, nvme=self.nvme
        )

    def hint(self, hint: m.Hint) -> None:
        self.hints.append(hint)

    def finish(self, request: str, reason: str = "") -> None:
        self.hint(m.Hint(request=request, kind="finish", reason=reason))


@pytest.fixture
def link() -> FakeLink:
    fake = FakeLink(matched=3)
    fake.answers.set()
    return fake


@pytest.fixture
def make(link: FakeLink) -> Iterator[Callable[..., Asker]]:
    made: list[Asker] = []

    def build(**settings: Any) -> Asker:
        made.append(Asker(link, Settings(space="s", **settings), BT))  # type: ignore[arg-type]
        return made[-1]

    yield build
    link.answers.set()
    for asker in made:
        asker.close()


def request(name: str = "r", count: int = 32, **fields: Any) -> Any:
    tokens = list(range(count))
    plain = {
        "request_id": name, "prompt_token_ids": tokens, "all_token_ids": tokens, "num_tokens": count,
        "num_prompt_tokens": count, "mm_features": [], "prompt_embeds": None, "pooling_params": None,
        "lora_request": None, "cache_salt": None, "kv_transfer_params": None, "priority": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**plain, **fields})


def decided(asker: Asker, one: Any, computed: int = 0) -> tuple[int | None, bool]:
    """What the scheduler is told in the end; it asks again as long as it is told to."""
    for _ in range(1000):
        answer = asker.loadable(one, computed)
        if answer[0] is not None:
            return answer
        asker.take_step([], is_idle=True)
    raise AssertionError("never decided")


def test_what_the_node_has_beyond_the_local_hit_is_loaded(make: Callable[..., Asker]) -> None:
    asker, one = make(), request()
    asker.arrived(one)
    assert decided(asker, one, computed=8) == (16, True)
    asker.allocated(one, [7, 6, 5, 4], 16)
    [order] = asker.take_step([], is_idle=True).loads
    assert (order.first, order.ids) == (1, (6, 5))


@pytest.mark.parametrize(
    ("priority", "hinted", "sent"),
    [(0, None, 0), (3, None, 3), (3, -7, -7), (10**9, None, m.MAX_PRIORITY), (4, "high", 4)],
)
def test_a_request_goes_to_the_node_with_its_priority(
    make: Callable[..., Asker], link: FakeLink, priority: int, hinted: object, sent: int
) -> None:
    params = None if hinted is None else {"dpurt": {"priority": hinted}}
    asker, one = make(), request(priority=priority, kv_transfer_params=params)
    asker.arrived(one)
    decided(asker, one)
    asker.allocated(one, [7, 6, 5, 4], 24)
    [order] = asker.take_step([], is_idle=True).loads
    assert (link.priorities, order.priority) == ([sent], sent)


def test_an_answer_that_is_late_is_a_miss_and_the_scheduler_never_waits_for_it(
    make: Callable[..., Asker], link: FakeLink
) -> None:
    link.answers.clear()
    asker, one = make(lookup_wait_ms=1, lookup_budget_ms=20), request()
    asker.arrived(one)
    assert asker.loadable(one, 0) == (None, False)
    assert decided(asker, one) == (0, False)
    counted = link.tally.take()
    assert counted is not None
    assert counted["lookups_late"] == 1
    assert counted["longest_call_s"] < 0.02


def test_salt_and_adapter_change_what_is_asked_for(
    make: Callable[..., Asker], link: FakeLink, tmp_path: Path
) -> None:
    (tmp_path / "adapter.bin").write_bytes(b"weights")
    lora = SimpleNamespace(lora_name="a", lora_path=str(tmp_path), load_inplace=False)
    asker = make(lookup_budget_ms=5000)
    for one in (request("1"), request("2", cache_salt="x"), request("3", lora_request=lora)):
        asker.arrived(one)
        decided(asker, one)
    assert len({tokens[: 4 * BT] for tokens in link.asked}) == 3
    assert len({tokens[4 * BT :] for tokens in link.asked}) == 1


def test_an_adapter_replaced_under_its_name_is_another(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    first = digest_of(tmp_path)
    (tmp_path / "a").write_bytes(b"2")
    assert digest_of(tmp_path) != first
    with pytest.raises(OSError, match="No such file"):
        digest_of(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mm_features": [1]}, "not_tokens"),
        ({"prompt_embeds": object()}, "not_tokens"),
        ({"pooling_params": object()}, "pooling"),
        ({"prompt_token_ids": [1 << 20] * BT}, "vocabulary"),
        ({"prompt_token_ids": [1] * (BT - 1)}, "short"),
    ],
)
def test_a_request_whose_kv_is_not_its_tokens_takes_no_part_and_is_counted(
    make: Callable[..., Asker], link: FakeLink, fields: dict[str, Any], reason: str
) -> None:
    asker, one = make(), request(**fields)
    asker.arrived(one)
    assert decided(asker, one) == (0, False)
    asker.allocated(one, [1, 2, 3, 4], 0)
    asker.computes(one, [1, 2, 3, 4], 32)
    assert not asker.take_step([], is_idle=False).saves
    assert asker.ended(one) == (False, None)
    counted = link.tally.take()
    assert counted is not None
    assert counted["skipped"] == {reason: 1}


def test_a_prompt_that_is_expected_is_waited_for_as_a_whole(
    make: Callable[..., Asker], link: FakeLink
) -> None:
    link.matched = 0
    asker = make(load="layers")
    one = request(kv_transfer_params={"dpurt": {"expect_ms": 700}})
    asker.arrived(one)
    assert decided(asker, one) == (32, True)
    asker.allocated(one, [1, 2, 3, 4], 32)
    [order] = asker.take_step([], is_idle=True).loads
    assert (order.expect_ms, order.by_layer, len(order.ids)) == (700, False, 4)


def test_a_request_that_ends_before_its_answer_leaves_no_scope_behind(
    make: Callable[..., Asker], link: FakeLink
) -> None:
    link.answers.clear()
    asker, one = make(), request()
    asker.arrived(one)
    asker.ended(one)
    link.answers.set()
    asker.close()
    for thread in [t for t in threading.enumerate() if t.name.startswith("dpurt-lookup")]:
        thread.join()
    assert [hint.kind for hint in link.hints] == ["finish"] * len(link.asked)


def test_a_match_that_could_not_be_loaded_is_not_believed_again(make: Callable[..., Asker]) -> None:
    asker, one = make(), request()
    asker.arrived(one)
    assert decided(asker, one) == (24, True)
    asker.allocated(one, [1, 2, 3, 4], 24)
    asker.moved(["r"], {1, 2, 3})
    assert decided(asker, one) == (0, False)
    asker.computes(one, [5, 6, 7, 8], 32)
    [save] = asker.take_step([], is_idle=False).saves
    assert (save.first, save.ids) == (0, (5, 6, 7, 8))


def test_hints_of_a_request_reach_the_node(make: Callable[..., Asker], link: FakeLink) -> None:
    asker = make()
    one = request(kv_transfer_params={"dpurt": {"pause_ms": 4000, "finish": "tool_use", "resume": "before"}})
    asker.arrived(one)
    decided(asker, one)
    asker.ended(one)
    [ending] = asker.take_step([], is_idle=True).endings
    assert (ending.pause_ms, ending.reason) == (4000, "tool_use")
    assert [(hint.request, hint.kind) for hint in link.hints] == [("before", "resume"), ("before", "finish")]


@pytest.mark.parametrize("hints", ["x", {"dpurt": 5}, {"dpurt": {"pause_ms": "soon", "expect_ms": -1}}])
def test_hints_that_make_no_sense_change_nothing(make: Callable[..., Asker], hints: object) -> None:
    asker, one = make(), request(kv_transfer_params=hints)
    asker.arrived(one)
    assert decided(asker, one) == (24, True)
    asker.ended(one)
    [ending] = asker.take_step([], is_idle=True).endings
    assert ending.pause_ms is None


def test_after_a_reset_nothing_stored_before_is_asked_for(make: Callable[..., Asker], link: FakeLink) -> None:
    asker = make()
    for name in ("1", "2"):
        one = request(name)
        asker.arrived(one)
        decided(asker, one)
        asker.forget_all()
    assert link.asked[0] != link.asked[1]


def test_settings_say_what_is_wrong_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"lookup_budget_ms"):
        settings_from({"space": "s", "lookup_budget_ms": "soon"}, Settings)
    with pytest.raises(ConfigError, match=r"topology"):
        access_from(settings_from({"space": "s"}, TierSettings))
    with pytest.raises(ConfigError, match=r"not set"):
        access_from(Settings(space="s", endpoint="tcp://h:1", tenant="t", salt_env="DPURT_NO_SUCH"))
    monkeypatch.setenv("DPURT_SALT", "secret")
    access = access_from(Settings(space="s", endpoint="tcp://h:1", tenant="t", salt_env="DPURT_SALT"))
    assert access.salt == b"secret"


def test_the_table_in_the_log_is_the_space_it_was_made_from(tmp_path: Path) -> None:
    import tomllib

    config = small_config(tmp_path)
    space = config.to_space("s")
    table = tomllib.loads(space_table("s", space))["space"]
    assert small_config(tmp_path, space=table).to_space("s") == space


def test_errors_are_counted_by_what_they_say() -> None:
    assert code_of(SpaceMismatch("tp_size", 1, 2)) == "mismatch_tp_size"
    assert code_of(NodeUnavailable("tcp://h:1", "no answer")) == "NodeUnavailable"


def test_counters_of_two_processes_add_up() -> None:
    one, other = Tally(), Tally()
    one.count(requests=2, longest_call_s=0.5, is_up=1)
    one.why("skipped", ["short", "short"])
    other.count(requests=1, longest_call_s=0.2)
    other.why("skipped", ["short", "pooling"])
    first, second = one.take(), other.take()
    assert first is not None
    assert second is not None
    total = add(add({}, first), second)
    assert (total["requests"], total["longest_call_s"]) == (3, 0.5)
    assert total["skipped"] == {"short": 3, "pooling": 1}
    assert flat(total)["skipped.short"] == 3
    assert one.take() is None
