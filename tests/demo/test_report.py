"""The demo's report: sums, the ledger's balance, and the picture's shares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpurt.commands.demo import is_good
from dpurt.demo import report
from dpurt.demo.host import Result
from dpurt.demo.nodes import DeviceBytes, Outside
from dpurt.demo.plan import make_plan
from dpurt.demo.run import OUTCOMES, Crash, Outcome
from dpurt.replay.trace import Request

MIB = 1 << 20
PLAN = make_plan(
    [Request(timestamp_s=0.0, input_tokens=1024, output_tokens=1, blocks=(1, 2))],
    block_bytes=MIB, staging_share=0.1, speed=2.0,
)  # fmt: skip


def result(host: str, **fields: Any) -> Result:
    base: dict[str, Any] = {"requests": 2, "blocks": 10, "staging": 4, "nvme": 3, "missed": 3}
    return Result(host=host, **{**base, **fields})


def stats_of(**ledger: int) -> dict[str, Any]:
    return {
        "node": {"rss_bytes": 100 * MIB, "open_fds": 20},
        "storage": {"rebuilt": {}},
        "bdevs": {"flash": {"io": {"bytes_read": 5 * MIB, "bytes_written": 7 * MIB}}},
        "fabrics": {"shm": {"bytes_pulled": 1, "bytes_stored": 2}},
        "prefetch": {"total": ledger},
        "index": {"drops": {}},
        "intake": {"writes_lost": 0},
    }


def outcome(*hosts: Result, crash: Crash | None = None, exit_code: int = 0, **ledger: int) -> Outcome:
    outside = Outside(101 * MIB, 21, 5 * MIB, 7 * MIB, 0, 1.0)
    device = DeviceBytes(5 * MIB, 7 * MIB, 5 * MIB, 7 * MIB, 0)
    return Outcome("shm", "file", list(hosts), stats_of(**ledger), outside, device, exit_code, 1.0, crash)


def test_the_ledger_adds_up_only_when_every_plan_has_an_outcome() -> None:
    assert report.ledger_adds_up(stats_of(planned=5, timely=2, refused=2, open=1))
    assert not report.ledger_adds_up(stats_of(planned=5, timely=2, refused=2))
    assert not report.ledger_adds_up(stats_of(planned=5, timely=6))
    assert report.ledger_adds_up({"prefetch": {"enabled": 0}})
    assert list(report.ledger_of(stats_of(planned=1))) == ["planned", *OUTCOMES]


def test_the_text_says_when_the_ledger_does_not_add_up() -> None:
    hosts = (result("gpu-a"), result("gpu-b"))
    assert "DOES NOT ADD UP" in report.text(PLAN, outcome(*hosts, planned=5))
    assert "DOES NOT ADD UP" not in report.text(PLAN, outcome(*hosts, planned=5, early=5))


def test_json_sums_over_hosts_and_runs() -> None:
    one = outcome(
        result("gpu-a", verified_bytes=7), result("gpu-b", nvme=1, missed=5, wrong_bytes=1), planned=2, late=2
    )
    got: Any = report.as_json(PLAN, [one, one])
    assert got["requests"] == 8
    assert (got["verified_bytes"], got["wrong_bytes"]) == (14, 2)
    assert got["hits"] == {"staging": 16, "nvme": 8, "missed": 16}
    assert (got["ledger"]["planned"], got["ledger"]["late"]) == (4, 4)
    assert got["runs"][0]["hosts"]["gpu-b"]["missed"] == 5
    assert got["runs"][0]["ledger_adds_up"] is True
    assert json.loads(json.dumps(got)) == got


@pytest.mark.parametrize(
    ("run", "good"),
    [
        (outcome(result("a"), planned=1, late=1), True),
        (outcome(result("a"), planned=2, late=1), False),
        (outcome(result("a", wrong_bytes=1)), False),
        (outcome(result("a", checksum_errors=1)), False),
        (outcome(result("a", unreachable=1)), False),
        (outcome(result("a"), exit_code=1), False),
        (outcome(result("a", unreachable=1), crash=Crash("node", 1.0, 2.0, 0.5, {}, 3, 4, 0)), True),
        (outcome(result("a", unreachable=1), crash=Crash("bdev", 1.0, 2.0, 0.5, {}, 3, 4, 0)), False),
    ],
)
def test_a_run_is_good_without_wrong_bytes_lost_hosts_or_unbalanced_books(run: Outcome, good: bool) -> None:
    assert is_good(run) is good


def test_lookup_times_are_in_milliseconds_with_their_number() -> None:
    times = report.lookup_ms([result("a", lookup_s=[0.001, 0.003]), result("b", lookup_s=[0.002])])
    assert times["n"] == 3
    assert times["p50"] == 2.0
    assert report.lookup_ms([result("a")]) == {"n": 0, "p50": 0.0, "p99": 0.0}


def test_timeline_shares_are_of_the_blocks_in_each_slice_of_time() -> None:
    hosts = [
        result("a", timeline=[(0.0, 4, 1, 1, 2), (60.0, 2, 2, 0, 0)]),
        result("b", timeline=[(0.5, 4, 3, 0, 1)]),
    ]
    shares = report.timeline(hosts)
    assert shares.shape == (report.BUCKETS, 3)
    assert shares[0].tolist() == [0.5, 0.125, 0.375]
    assert shares[-1].tolist() == [1.0, 0.0, 0.0]
    assert not shares[1:-1].any()
    assert not report.timeline([]).any()
    sums = shares.sum(axis=1)
    assert np.all((sums == 0) | np.isclose(sums, 1))


def test_what_the_kernel_says_is_compared_with_tolerance() -> None:
    agrees = {name: ok for name, _, _, ok in report.compare_outside(outcome(result("a")))}
    assert all(agrees.values())
    device = DeviceBytes(500 * MIB, 500 * MIB, 510 * MIB, 490 * MIB, 0)
    other = Outcome("shm", "file", [], stats_of(), Outside(300 * MIB, 90, 0, 0, 0, 1.0), device, 0, 1.0, None)
    assert not any(ok for _, _, _, ok in report.compare_outside(other))
    assert f"DIFFER by {10 * MIB:,}" in report.text(PLAN, other)


def test_device_bytes_of_the_start_are_not_compared() -> None:
    start = DeviceBytes(node_read=70, node_written=2, kernel_read=10, kernel_written=3, own_calls=1)
    assert DeviceBytes(170, 12, 110, 13, 7) - start == DeviceBytes(100, 10, 100, 10, 6)


def test_the_table_says_how_many_of_the_hits_came_from_dram() -> None:
    [row] = [
        line for line in report.text(PLAN, outcome(result("gpu-a"))).splitlines() if line.startswith("all")
    ]
    assert "70.0%" in row
    assert f"{4 / 7:.1%}" in row


def test_the_picture_is_one_page_that_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "p.html"
    report.write_picture(path, PLAN, [outcome(result("a", timeline=[(1.0, 2, 1, 1, 0)]))])
    page = path.read_text()
    assert page.count("<svg") == 1
    assert "http" not in page
    assert "src=" not in page


def test_two_policies_are_compared_by_what_hosts_felt() -> None:
    lru = outcome(result("a", staging=1, nvme=9, load_s=[0.5, 0.1]), result("b", staging=0, nvme=0))
    lru = replace(lru, policy="lru")
    ours = outcome(result("a", staging=9, nvme=1, load_s=[0.1, 0.1]))
    text = report.comparison(lru, ours)
    assert ["lru", "dpurt"] == [line.split()[0] for line in text.splitlines()[1:]]
    assert "10.0%" in text
    assert "90.0%" in text
    got: Any = report.as_json(PLAN, [ours], lru)
    assert [row["policy"] for row in got["compared"]] == ["lru", "dpurt"]
    assert [row["waited_for_flash"] for row in got["compared"]] == [9, 1]
    assert got["compared"][0]["load_ms"]["p50"] == 300.0
    assert got["hits"]["nvme"] == 1, "the run beside is in no sum"
    assert got["lru"]["hits"]["nvme"] == 9


def test_without_a_run_beside_there_is_nothing_to_compare(tmp_path: Path) -> None:
    got: Any = report.as_json(PLAN, [outcome(result("a"))])
    assert (got["lru"], got["compared"]) == (None, [])
    path = tmp_path / "p.html"
    report.write_picture(path, PLAN, [outcome(result("a"))])
    assert "against lru" not in path.read_text()
    report.write_picture(path, PLAN, [outcome(result("a"))], replace(outcome(result("a")), policy="lru"))
    page = path.read_text()
    assert "against lru" in page
    assert page.count("<svg") == 2
