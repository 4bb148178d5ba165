"""The fabric contract with the node in this machine and every host in the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dpurt.fabric.verbs import VerbsFabric
from dpurt.rdma.device import find
from dpurt.testing.fabric_contract import CASES, FabricTraits, Peers, run_case
from dpurt.testing.far_endpoint import dial

pytestmark = pytest.mark.vm

TRAITS = FabricTraits(checks_leases=True, has_views=False, crosses_processes=True)
ENDPOINTS = ("10.9.9.2", 7701)


@pytest.fixture(scope="module")
def endpoints(far) -> Iterator[Peers]:  # type: ignore[no-untyped-def]
    """A process in the far machine that makes endpoints when it is told to."""
    command = ("python3", "-m", "dpurt.testing.far_endpoint", ENDPOINTS[0], str(ENDPOINTS[1]))
    with far.running(*command, port=ENDPOINTS):
        yield Peers(dial(ENDPOINTS), far.launch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract_across_two_machines(case, endpoints):  # type: ignore[no-untyped-def]
    await run_case(case, lambda access: VerbsFabric(access, [find("rxe0")]), TRAITS, endpoints, 150.0)
