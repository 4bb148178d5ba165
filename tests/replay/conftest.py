"""The committed slices of real traces."""

from pathlib import Path

import pytest

from dpurt.replay.trace import read_mooncake

TRACES = Path(__file__).parents[2] / "bench" / "traces"
SLICE = TRACES / "mooncake_conversation_1600.jsonl.gz"


@pytest.fixture(scope="session")
def conversation():
    return list(read_mooncake(SLICE))
