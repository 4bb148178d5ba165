"""These tests need the test VM (tests/vm/run), and change the kernel they run on.

Outside it they are not collected, so they are no skips either, and one named on the command line fails untouched.
"""

from __future__ import annotations

import os

import pytest

IN_VM = os.environ.get("DPURT_VM") == "1"
collect_ignore_glob = [] if IN_VM else ["test_*.py"]


def pytest_runtest_setup() -> None:
    if not IN_VM:
        pytest.fail("runs in the test VM only: use tests/vm/run", pytrace=False)
