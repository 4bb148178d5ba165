"""The committed slice of a real trace."""

from pathlib import Path

import pytest

from dpurt.replay.trace import read_mooncake

SLICE = Path(__file__).parents[2] / "bench" / "traces" / "mooncake_conversation_1600.jsonl.gz"


@pytest.fixture(scope="session")
def conversation():
    return list(read_mooncake(SLICE))
