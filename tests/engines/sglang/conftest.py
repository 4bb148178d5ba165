"""SGLang's real storage factory, cache controller and host pools, on CPU tensors, and a real `dpurt serve` on a file.

No GPU, so no model runs: what SGLang does between its host memory and its storage is all real, what it does on the device is not
here. It imports torchvision for models that see images; those take no part, and no torchvision fits torch's CPU build, so an
empty module stands in for it.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dpurt.demo.nodes import NodeProcess

sys.path.insert(0, str(Path(__file__).parent))  # for `pools`


def _stand_in_for_torchvision() -> None:
    from transformers.utils import is_torchvision_available, is_torchvision_v2_available

    is_torchvision_available()  # it remembers that there is none
    is_torchvision_v2_available()
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    package, transforms, functional = [types.ModuleType(name) for name in names]
    package.transforms, transforms.functional = transforms, functional  # type: ignore[attr-defined]
    mode = type("InterpolationMode", (), {"BICUBIC": None, "BILINEAR": None})
    transforms.InterpolationMode = functional.InterpolationMode = mode  # type: ignore[attr-defined]
    sys.modules.update(zip(names, (package, transforms, functional), strict=True))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _stand_in_for_torchvision()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # SGLang's, at import


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Starts a node for a space; it ends with the test."""
    from pools import space_table, topology

    nodes: list[NodeProcess] = []

    def start(space: str | None = None, **options: str) -> NodeProcess:
        path = topology(tmp_path, space=space or space_table(), **options)
        node = NodeProcess(path, tmp_path / "run", tmp_path / "node.log")
        nodes.append(node)
        node.start()
        return node

    yield start
    for node in nodes:
        node.__exit__()
