"""The verbs fabric on Soft-RoCE: the contract every fabric keeps, and what only this one can get wrong."""

from __future__ import annotations

import pytest

from dpurt.fabric.verbs import VerbsFabric
from dpurt.rdma.device import find
from dpurt.testing.fabric_contract import CASES, FabricTraits, run_case

pytestmark = pytest.mark.vm

TRAITS = FabricTraits(checks_leases=True, has_views=False, crosses_processes=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case):
    await run_case(case, lambda access: VerbsFabric(access, find("rxe0")), TRAITS)
