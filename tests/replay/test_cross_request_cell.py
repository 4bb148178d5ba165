"""The cells of `dpurt bench cross_request`: a process each, the same figures as here."""

from pathlib import Path

import pytest

from dpurt.bench.cross_request_cell import Cell, answers, computed
from dpurt.errors import ConfigError


def cell(file: Path, policy: str) -> Cell:
    return Cell(str(file), None, policy, 0.5, 14.0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations that take turns."""
    line = '{{"timestamp": {}, "input_length": {}, "output_length": 10, "hash_ids": {}}}\n'
    path = tmp_path / "trace.jsonl"
    turns = (
        (number, list(range(10 * (number % 2), 10 * (number % 2) + 1 + number // 2))) for number in range(8)
    )
    path.write_text("".join(line.format(9000 * n, 512 * len(ids), ids) for n, ids in turns))
    return path


def test_cells_in_processes_come_to_what_they_come_to_here(trace):
    cells = [cell(trace, policy) for policy in ("lru", "oracle")]
    found = answers(cells)
    assert found == {asked: computed(asked) for asked in cells}
    assert found[cells[1]].hits > found[cells[0]].hits > 0


def test_a_process_that_fails_is_named(tmp_path):
    with pytest.raises(ConfigError, match="the process of lru ended with code 1"):
        answers([cell(tmp_path / "absent.jsonl", "lru")])
