"""What all tests share: with DPURT_NO_SKIP=1 a skip is a failure, so that CI cannot be green for want of a
package. Tests marked `spdk` are not even chosen without DPURT_SPDK_TGT: no CI can be asked for a real target; those
marked `smollm2` not without DPURT_SMOLLM2: they want 93 MB of weights and minutes.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

OPTIONAL = {"spdk": "DPURT_SPDK_TGT", "smollm2": "DPURT_SMOLLM2"}
NO_SKIP = os.environ.get("DPURT_NO_SKIP") == "1"


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if NO_SKIP and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, and DPURT_NO_SKIP=1 forbids that: {reason}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, variable in OPTIONAL.items():
        left_out = [item for item in items if item.get_closest_marker(marker)]
        if left_out and not os.environ.get(variable):
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _forbid_skip(report)
    return report
