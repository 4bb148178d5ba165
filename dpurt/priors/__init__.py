"""What the package knows beforehand: fitted models, shipped as data. See README.md here for where each comes from."""

from __future__ import annotations

import functools
from hashlib import blake2b
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np

from dpurt.core.return_model import Forest

__all__ = ["digest_of", "load_forest", "shipped_returns"]


@functools.cache
def shipped_returns() -> Forest:
    """The prior for the return of conversations that the package ships."""
    with as_file(files(__name__) / "returns.npz") as path:
        return load_forest(path)


def digest_of(prior: Forest | None) -> str:
    """Sixteen hexadecimal digits that tell priors apart; empty for none."""
    if prior is None:
        return ""
    digest = blake2b(f"{prior.base!r}{sorted(prior.stops)!r}".encode(), digest_size=8)
    for array in (prior.features, prior.thresholds, prior.leaves):
        digest.update(array.tobytes())
    return digest.hexdigest()


def load_forest(path: Path) -> Forest:
    """A prior as `dpurt.replay.fit_returns` writes it."""
    with np.load(path, allow_pickle=False) as file:
        return Forest(
            float(file["base"]),
            file["features"].astype(np.int64),
            file["thresholds"].astype(np.float64),
            file["leaves"].astype(np.float64),
            frozenset(file["stops"].tolist()),
        )
