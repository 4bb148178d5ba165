"""Returns: when conversations come back, what that makes their blocks worth, and what is fetched for them."""

import itertools
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dpurt.core.arbiter import Budget
from dpurt.core.events import (
    Arrived,
    Consumed,
    Dropped,
    Finished,
    Owner,
    Paused,
    Resumed,
    SequenceGone,
    Staged,
    Stored,
)
from dpurt.core.return_model import (
    AGE_EDGES,
    NUM_AGES,
    NUM_FEATURES,
    Forest,
    ReturnModel,
    Running,
    Traits,
    running_kind,
    stop_code,
)
from dpurt.core.returns import DEAD, HEAD_LEAD, RUNNING, Returns, _Pairs, _Rows, _Slots

OWNER = Owner("space", "tenant")
AGENT = Traits(stop_code("tool_use"), 5.0, 2, 100, 3, 6.0, 7.0, 6.5)
CHAT = Traits(0, 10.0, 4, 20, 1)


def turn(returns, sequence, known, new, now, reason="", ran_s=1.0):
    """A whole request: matched blocks, new ones, its end."""
    returns.observe(Arrived(sequence, OWNER, tuple(known)), now)
    returns.observe(Consumed(sequence, 0, len(known)), now)
    returns.observe(Stored(sequence, tuple(new)), now)
    returns.observe(Finished(sequence, reason), now + ran_s)


def worth_of(returns, block, now):
    returns._worth_at = -math.inf  # as if a look were due
    handle = returns.came(block)
    returns.left(handle)
    return float(returns.worth(np.array([handle]), now)[0])


def learn(model, traits, gaps):
    """Conversations of these traits that came back after these gaps."""
    row, prior = model.row(traits), model.prior_hazards(traits)
    for gap in gaps:
        last = int(np.searchsorted(AGE_EDGES, gap, side="right")) - 1
        ages = np.arange(min(last, NUM_AGES - 1) + 1)
        seconds = np.minimum(AGE_EDGES[ages + 1], gap) - AGE_EDGES[ages]
        model.expose(np.full_like(ages, row), ages, prior[ages] * seconds)
        if last < NUM_AGES:
            model.returned(row, last)
    for _ in range(10):
        model.refit()


def within(model, traits, seconds):
    """P(return by this age)."""
    at_risk = np.clip(seconds - AGE_EDGES[:-1], 0, np.diff(AGE_EDGES))
    hazards = model.prior_hazards(traits) * model.factors(np.array([model.row(traits)]))[0]
    return float(-np.expm1(-(hazards * at_risk).sum()))


class TestReturnModel:
    def test_it_learns_when_conversations_return(self):
        model = ReturnModel()
        learn(model, CHAT, [100.0] * 150 + [math.inf] * 150)
        assert within(model, CHAT, 45.0) < 0.02
        assert within(model, CHAT, 128.0) == pytest.approx(0.5, abs=0.1)

    def test_traits_that_return_sooner_are_told_apart(self):
        model = ReturnModel()
        for _ in range(20):
            learn(model, CHAT, [100.0] * 5 + [math.inf] * 5)
            learn(model, CHAT._replace(depth=8), [5.0] * 5)
        assert within(model, CHAT._replace(depth=8), 6.0) > 4 * within(model, CHAT, 6.0)

    def test_few_events_change_little(self):
        model = ReturnModel()
        before = within(model, AGENT, 10.0)
        learn(model, AGENT, [3.0])
        assert within(model, AGENT, 10.0) < 3 * before

    def test_a_prior_speaks_for_the_stops_it_was_fitted_on_only(self):
        model = ReturnModel(stump(limit=8.0, below=-1.0, above=-6.0))
        assert within(model, AGENT, 8.0) > 0.9
        assert within(model, CHAT, 8.0) == pytest.approx(within(ReturnModel(), CHAT, 8.0))

    def test_experience_overrules_a_prior(self):
        model = ReturnModel(stump(limit=8.0, below=-1.0, above=-6.0))
        learn(model, AGENT, [math.inf] * 400)
        assert within(model, AGENT, 8.0) < 0.4


def stump(limit, below, above):
    """A forest of one tree that asks for the age only."""
    return Forest(
        0.0,
        np.array([[NUM_FEATURES - 1]]),
        np.array([[limit]]),
        np.array([[below, above]]),
        frozenset({stop_code("tool_use")}),
    )


def steady(soon, later):
    """A rate for the first 11 s; after that one for responses that took up to 5 s and one for longer ones."""
    late, long = math.log(later[0]), math.log(later[1])
    return Forest(
        0.0,
        np.array([[NUM_FEATURES - 1, 0, 1]]),
        np.array([[11.0, math.inf, 5.0]]),
        np.array([[math.log(soon), 0.0, late, long]]),
        frozenset({stop_code("tool_use")}),
    )


def test_a_forest_adds_up_its_trees():
    features = np.array([[0, 1, 1], [1, 0, 0]])
    thresholds = np.array([[0.5, 10.0, 20.0], [15.0, math.inf, math.inf]])
    leaves = np.array([[1.0, 2.0, 3.0, 4.0], [0.1, 9.0, 0.2, 9.0]])
    forest = Forest(-1.0, features, thresholds, leaves, frozenset())
    rows = np.array([[0, 5, *[0] * 7], [0, 16, *[0] * 7], [1, 15, *[0] * 7], [1, 21, *[0] * 7]], float)
    assert forest.log_rates(rows) == pytest.approx([0.1, 1.2, 2.1, 3.2])


def test_a_forest_that_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="do not fit together"):
        Forest(0.0, np.zeros((1, 3), int), np.zeros((1, 3)), np.zeros((1, 3)), frozenset())
    with pytest.raises(ValueError, match="features 0 to"):
        Forest(0.0, np.full((1, 1), NUM_FEATURES), np.zeros((1, 1)), np.zeros((1, 2)), frozenset())


def test_running_learns_how_often_the_next_request_is_near():
    running = Running([(10.0, 1.0)], doubt_s=1.0)
    for _ in range(200):
        running.finished(1, 15.0)
        running.returned(1, 15.0, 2.0)  # the next comes at 17: near from 7 on
    near = running.probability(np.array([1, 1, 1]), np.array([1.5, 9.0, 14.0]))
    assert near[0] < 0.05
    assert near[1] > 0.95
    assert near[2] > 0.95


def test_what_is_wanted_in_a_full_staging_the_arbiter_does_not_refuse_for_its_room():
    """Each keeps a margin of its own above the worth of what leaves: the arbiter's is the smaller one."""
    assert Returns.MARGIN > 1.0 + Budget(bandwidth_bytes_per_s=1.0, staging_bytes=1).hysteresis


def test_running_adds_up_its_windows_by_weight():
    running = Running([(10.0, 1.0), (1000.0, 0.5)], doubt_s=1.0)
    for _ in range(200):
        running.finished(1, 15.0)
        running.returned(1, 15.0, 2.0)
    assert running.probability_of(1, 1.5) == pytest.approx(0.5, abs=0.05)
    assert running.probability_of(1, 14.0) == pytest.approx(1.5, abs=0.05)
    assert running.probability_of(1, 14.0) == running.probability(np.array([1]), np.array([14.0]))[0]


def test_requests_under_way_are_told_apart_by_stop_and_how_long_their_conversation_was_away():
    kinds = [running_kind(stop, gap) for stop in (0, 1) for gap in (-1.0, 3.0, 8.0, 20.0, 100.0)]
    assert len(set(kinds)) == len(kinds)
    assert running_kind(1, 3.0) == running_kind(1, 5.0)


class TestWorth:
    def test_a_block_of_two_conversations_is_worth_both(self):
        returns = Returns()
        turn(returns, 1, [], [1, 2, 3], 0.0)
        turn(returns, 2, [1], [4, 5], 0.0)
        own = worth_of(returns, 2, 5.0)
        assert own > 0
        assert worth_of(returns, 1, 5.0) > 1.9 * own

    def test_of_two_as_likely_to_return_soon_the_one_that_returns_later_is_worth_more(self):
        returns = Returns(steady(soon=0.02, later=(1e-6, 0.02)))
        turn(returns, 1, [], [1, 2, 3], 0.0, "tool_use", ran_s=1.0)  # idle for good after the first seconds
        turn(returns, 2, [], [4, 5, 6], 0.0, "tool_use", ran_s=9.0)
        assert worth_of(returns, 4, 10.0) > 1.3 * worth_of(returns, 1, 2.0)

    def test_heads_are_worth_more_than_tails_and_a_tail_as_often_as_it_was_seen_again(self):
        returns = Returns()
        turn(returns, 1, [], [1, 2, 3, 4], 0.0)
        worths = [worth_of(returns, block, 5.0) for block in (1, 2, 3, 4)]
        assert worths == sorted(worths, reverse=True)
        assert worths[2] > worths[0] * (1 - HEAD_LEAD)
        assert worths[3] == pytest.approx(worths[2] / 2, rel=0.01)
        for sequence in range(2, 40):  # its last block is never seen again
            turn(returns, sequence, [1, 2, 3], [100 + sequence], 10.0 * sequence)
        fresh = [worth_of(returns, block, 400.0) for block in (3, 139)]
        assert fresh[1] < 0.15 * fresh[0]

    def test_what_an_arrived_request_has_not_read_yet_is_worth_a_use(self):
        returns = Returns()
        turn(returns, 1, [], [1, 2, 3, 4], 0.0)
        returns.observe(Arrived(2, OWNER, (1, 2, 3)), 30.0)
        assert all(worth_of(returns, block, 30.0) >= 1 for block in (1, 2, 3))
        returns.observe(Consumed(2, 0, 2), 31.0)
        assert worth_of(returns, 2, 31.0) < 0.5
        assert worth_of(returns, 3, 31.0) >= 1
        returns.observe(SequenceGone(2), 32.0)
        assert worth_of(returns, 3, 32.0) < 0.5

    def test_unknown_dropped_and_abandoned_blocks_are_worth_nothing(self):
        returns = Returns()
        turn(returns, 1, [], [1, 2, 3], 0.0)
        returns.observe(Dropped(2), 5.0)
        assert worth_of(returns, 2, 5.0) == worth_of(returns, 99, 5.0) == 0
        assert worth_of(returns, 1, 5.0) > 0
        assert worth_of(returns, 1, 2 * AGE_EDGES[-1]) == 0

    def test_a_branch_on_which_conversations_begin_is_worth_something(self):
        returns = Returns()
        for sequence in range(50):
            turn(returns, sequence, [1] if sequence else [], [10 * sequence + 2], float(sequence))
        for sequence in range(50):
            returns._end(returns._streams[returns._rows.latest[returns._rows.of[10 * sequence + 2]].slot])
        assert worth_of(returns, 1, 60.0) > 0.3
        assert worth_of(returns, 1, 6000.0) < 0.01


class TestStreams:
    def depth_after(self, known):
        returns = Returns()
        turn(returns, 1, [], range(1, 21), 0.0)
        returns.observe(Arrived(2, OWNER, tuple(known)), 5.0)
        return returns._of_sequence[2].depth

    def test_a_request_that_matched_all_but_the_last_two_blocks_or_half_continues(self):
        assert self.depth_after(range(1, 21)) == 2
        assert self.depth_after(range(1, 19)) == 2
        assert self.depth_after(range(1, 11)) == 2
        assert self.depth_after(range(1, 10)) == 1

    def test_the_root_alone_is_everybodys(self):
        returns = Returns()
        turn(returns, 1, [], [1, 2, 3], 0.0)
        returns.observe(Arrived(2, OWNER, (1,)), 5.0)
        assert returns._of_sequence[2].depth == 1

    def test_a_request_that_overtakes_the_end_of_its_predecessor_continues_it(self):
        returns = Returns()
        returns.observe(Arrived(1, OWNER, ()), 0.0)
        returns.observe(Stored(1, (1, 2, 3)), 1.0)
        returns.observe(Arrived(2, OWNER, (1, 2, 3)), 2.0)
        assert returns._of_sequence[2].depth == 2
        returns.observe(Finished(1), 3.0)
        assert list(returns._of_sequence) == [2]

    def test_a_pause_is_an_idle_time_and_a_resumption_its_end(self):
        returns = Returns()
        for sequence in range(50):  # learn that tools answer at once
            turn(
                returns, sequence, range(1, 4) if sequence else [], [4 + sequence], 4.0 * sequence, "tool_use"
            )
        returns.observe(Arrived(99, OWNER, (1, 2, 3)), 300.0)
        returns.observe(Consumed(99, 0, 3), 300.0)
        before = worth_of(returns, 2, 310.0)
        returns.observe(Paused(99), 310.0)
        assert worth_of(returns, 2, 310.0) > before + 0.2
        returns.observe(Resumed(99), 320.0)
        assert worth_of(returns, 2, 330.0) == pytest.approx(before, abs=0.05)

    def test_a_return_after_the_last_age_that_is_told_apart_teaches_that_it_took_so_long(self):
        returns = Returns()
        turn(returns, 1, [], [1, 2, 3, 4], 0.0)
        turn(returns, 2, [1, 2, 3, 4], [5], 3700.0)  # nobody looked in between
        assert len(returns._streams) == 1
        assert returns._model._risk.sum() > 0
        assert returns._model._events.sum() == 0

    def test_streams_rows_and_pairs_are_bounded(self):
        returns = Returns(max_streams=64)
        for i in range(3000):
            turn(returns, i, [], (2 * i, 2 * i + 1), float(i))
            returns.predict(i + 0.5)
        assert len(returns._streams) <= 64
        assert returns._pairs.num_more < 4096
        assert len(returns._rows.of) < 4096

    def test_requests_that_never_end_make_room_for_others(self):
        returns = Returns(max_streams=64)
        for i in range(1000):
            returns.observe(Arrived(i, OWNER, (i,)), float(i))
        assert len(returns._of_sequence) == len(returns._streams) <= 64


class TestPredictions:
    def known(self):
        returns = Returns()
        turn(returns, 1, [], [1, 2, 3, 4], 0.0)
        return returns

    def test_absent_blocks_of_idle_conversations_are_predicted_heads_first(self):
        returns = self.known()
        handle = returns.came(2)
        assert returns.predict(0.4) == []
        said = returns.predict(returns.next_wakeup())
        assert [(p.block, p.sequence, p.owner) for p in said] == [
            (1, None, OWNER),
            (3, None, OWNER),
            (4, None, OWNER),
        ]
        assert all(0 < p.worth < p.probability <= 1 for p in said)
        returns.left(handle)
        assert 2 in [p.block for p in returns.predict(returns.next_wakeup())]

    def test_nothing_is_fetched_that_is_not_worth_more_than_what_would_leave(self):
        returns = self.known()
        turn(returns, 2, [], [11, 12, 13, 14], 0.0)
        handles = [returns.came(block) for block in (11, 12, 13, 14)]
        returns.worth(np.array(handles), 1.0)  # a policy asks when staging is full
        said = returns.predict(returns.next_wakeup())
        assert [p.block for p in said] == [1]  # for 14, which as a tail is worth half

    def test_a_look_asks_for_no_more_than_some_times_what_landed_since_the_last(self):
        returns = Returns()
        turn(returns, 1, [], range(1000), 0.0)
        assert len(returns.predict(returns.next_wakeup())) == Returns.MIN_REACH
        for block in range(100):  # of which those asked for count
            returns.observe(Staged(block, block), 1.0)
        assert len(returns.predict(returns.next_wakeup())) == Returns.GROWTH * Returns.MIN_REACH + 8

    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("is_full", [False, True])
    def test_a_look_finds_what_sorting_all_would_wherever_the_last_one_ended(self, seed, is_full):
        random = np.random.default_rng(seed)
        returns, count = Returns(), 400
        rows = [returns.came(block) for block in range(count)]
        for row in random.permutation(rows)[: int(random.integers(count))].tolist():
            returns.left(row)
        known = returns._rows
        known.worth[:count] = random.choice([0.0, 0.0005, 0.01, 0.011, 0.2, 0.3], count) * random.choice(
            [1.0, 0.99], count
        )
        known.ahead[:count] = random.random(count) < 0.02
        known.exists[:count] = random.random(count) < 0.95
        for level in (0.0, 0.004, 0.01, 0.2, 5.0, math.inf):
            returns._level = level
            returns._reach = int(random.choice([8, 64, 1000]))
            assert returns._wanted(is_full).tolist() == wanted_of(returns, count, is_full)

    def test_nobody_to_return_needs_no_waking(self):
        returns = Returns()
        assert returns.next_wakeup() is None
        returns.observe(Arrived(1, OWNER, (1, 2)), 0.0)
        returns.observe(SequenceGone(1), 0.5)
        assert returns.predict(returns.next_wakeup()) == []
        assert returns.next_wakeup() is None


def wanted_of(returns, count, is_full):
    """What a look should ask for, by sorting all rows."""
    worths = returns._worths(np.arange(count)).tolist()
    absent = [row for row in range(count) if not returns._rows.resident[row]]
    best = sorted((row for row in absent if worths[row] > 0.001), key=lambda row: -worths[row])[
        : returns._reach
    ]
    if not is_full:
        return best
    prices = sorted(returns.MARGIN * worths[row] for row in range(count) if returns._rows.resident[row])
    prices += [0.0] * count  # free places
    paid = itertools.takewhile(lambda pair: worths[pair[0]] > pair[1], zip(best, prices, strict=False))
    return [row for row, _ in paid]


@pytest.mark.parametrize("wrong", [{"window_s": 0.0}, {"max_streams": 1}])
def test_senseless_settings_are_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        Returns(**wrong)


class Machine(RuleBasedStateMachine):
    """Random conversations, against sums over live streams made one by one."""

    SEQUENCES = st.integers(0, 5)
    CHAINS = st.sampled_from(
        [(1, 2, 3), (1, 2, 3, 4), (1, 5, 6), (1,), (7, 8), (), (1, 2, 3, 4, 9, 10, 11, 12, 13, 14)]
    )

    def __init__(self):
        super().__init__()
        self.returns = Returns(max_streams=64)
        self.now = 0.0
        self.resident = dict.fromkeys(range(20), 0)
        self.handles = {}

    @rule(sequence=SEQUENCES, chain=CHAINS)
    def arrive(self, sequence, chain):
        self.returns.observe(Arrived(sequence, OWNER, chain), self.now)

    @rule(sequence=SEQUENCES, block=st.integers(15, 19))
    def store(self, sequence, block):
        self.returns.observe(Stored(sequence, (block,)), self.now)

    @rule(sequence=SEQUENCES, first=st.integers(0, 5), count=st.integers(0, 4))
    def consume(self, sequence, first, count):
        self.returns.observe(Consumed(sequence, first, count), self.now)

    @rule(sequence=SEQUENCES, reason=st.sampled_from(["", "tool_use", "end_turn", "length"]))
    def finish(self, sequence, reason):
        self.returns.observe(Finished(sequence, reason), self.now)

    @rule(sequence=SEQUENCES, kind=st.sampled_from([Paused, Resumed, SequenceGone]))
    def change(self, sequence, kind):
        self.returns.observe(kind(sequence), self.now)

    @rule(block=st.integers(0, 19))
    def come(self, block):
        self.resident[block] += 1
        self.handles[block] = self.returns.came(block)

    @precondition(lambda self: any(self.resident.values()))
    @rule(data=st.data())
    def leave(self, data):
        block = data.draw(st.sampled_from([block for block, count in self.resident.items() if count]))
        self.resident[block] -= 1
        self.returns.left(self.handles[block])

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0, 500.0, 4000.0]))
    def wait(self, seconds):
        self.now += seconds
        for prediction in self.returns.predict(self.now):
            assert not self.resident.get(prediction.block, 0)
            assert 0 < prediction.probability <= 1

    @rule()
    def weed(self):
        self.returns._weed()

    @invariant()
    def worths_are_sums_over_live_streams(self):
        returns = self.returns
        returns._worth_at = -math.inf
        worths = returns.worth(np.arange(len(returns._rows)), self.now)
        chances = returns._slots.chance
        for block in range(20):
            row = returns._rows.of.get(block)
            found = least = most = 0.0
            if row is not None:
                found = worths[row]
                held = [s for s in returns._streams.values() if row in s.rows]
                ahead = sum(row in s.rows[s.cursor : s.matched] for s in returns._of_sequence.values())
                assert returns._rows.ahead[row] == ahead
                most = sum(chances[s.slot] * s.rows.count(row) for s in held) + ahead
                most += returns._rows.popular[row]
                least = ahead
            assert least - 1e-9 <= found <= most + 1e-9
            assert (0 if row is None else returns._rows.resident[row]) == self.resident[block]

    @invariant()
    def streams_add_up(self):
        returns = self.returns
        assert all(returns._streams[s.slot] is s for s in returns._of_sequence.values())
        assert returns._live_pairs == sum(len(s.rows) for s in returns._streams.values())
        assert int((returns._slots.state != 0).sum()) == len(returns._streams)
        assert np.all(np.diff(returns._slots.risk, axis=0) >= 0)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(5))
def test_pairs_add_up_in_the_order_in_which_they_came_to_the_last_bit(seed):
    random = np.random.default_rng(seed)
    slots, rows = _Slots(51), _Rows(50)
    pairs, all_pairs = _Pairs(rows, slots), []
    for block in range(30):
        rows.get(block)
    for slot in range(50):
        slots.state[slot], slots.chance[slot] = RUNNING, random.random()
        chain, weights = random.integers(0, 30, 12), random.random(12)  # with blocks that are in it twice
        pairs.add(chain, slot, weights)
        all_pairs += [
            (row, slot, weight) for row, weight in zip(chain.tolist(), weights.tolist(), strict=True)
        ]
        for ended in random.integers(0, slot + 1, 2).tolist():
            slots.state[ended], slots.chance[ended] = DEAD, 0.0
        if slot % 7 == 0:
            pairs.weed()
        pairs.add_up()
        expected = [0.0] * 30
        for row, of_slot, weight in all_pairs:
            expected[row] += float(slots.chance[of_slot]) * weight
        assert rows.worth[:30].tolist() == expected
