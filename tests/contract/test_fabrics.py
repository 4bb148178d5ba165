"""The Fabric contract, run on every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dpurt.fabric import AccessCheck, Fabric
from dpurt.fabric.memory import MemoryFabric
from dpurt.fabric.shm import ShmFabric
from dpurt.fabric.tcp import TcpFabric
from dpurt.testing.fabric_contract import CASES, FabricTraits, check_fabric, run_case

TRAITS = {
    "memory": FabricTraits(checks_leases=True, has_views=True, crosses_processes=False),
    "shm": FabricTraits(checks_leases=False, has_views=True, crosses_processes=True),
    "tcp": FabricTraits(checks_leases=True, has_views=False, crosses_processes=True),
}


@pytest.fixture
def private_dir() -> Iterator[Path]:
    with TemporaryDirectory(prefix="dpurt-") as path:  # mode 0700, and short enough for a socket
        yield Path(path)


@pytest.fixture(params=TRAITS)
def make_fabric(request: pytest.FixtureRequest, private_dir: Path) -> Callable[[AccessCheck], Fabric]:
    numbers = count()
    makers: dict[str, Callable[[AccessCheck], Fabric]] = {
        "memory": MemoryFabric,
        "shm": lambda access: ShmFabric(access, private_dir / f"fabric{next(numbers)}"),
        "tcp": TcpFabric,
    }
    maker = makers[request.param]
    return maker


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case, make_fabric, request):  # type: ignore[no-untyped-def]
    await run_case(case, make_fabric, TRAITS[request.node.callspec.params["make_fabric"]])


class Corrupting(MemoryFabric):
    """Forgets the last byte of every pull."""

    async def transfer(self, link, op, pieces, deadline):  # type: ignore[no-untyped-def]
        shorter = [replace(piece, local=piece.local[:-1]) for piece in pieces] if op == "pull" else pieces
        await super().transfer(link, op, shorter, deadline)


async def test_the_suite_as_one_call_notices_a_fabric_that_loses_a_byte():  # type: ignore[no-untyped-def]
    with pytest.RaisesGroup(AssertionError, flatten_subgroups=True):
        await check_fabric(Corrupting, TRAITS["memory"])
