"""Longest-prefix match: our token index beside Dynamo's block hash and `RadixTree`.

Question: which blocks of a prompt of 131,072 tokens are known, and where is each? Each side is asked in the
form its API takes: Dynamo a Python list of token ids (its hash) and a list of hashes (its tree), ours the
token bytes as they come off the wire. Dynamo answers with a length per worker; ours with a location for every
block.

Known are many long prompts (*trunks*), which branches leave at 320 places, so that a match crosses them all.
Both sides store the same blocks in the same order, the order of arrival at a node that serves many sessions
at once: a piece of one trunk, then its branches, then a piece of the next trunk. No trunk is ever stored in
one go. Each timed call asks for the next trunk in turn; the *same prompt* figures ask for one again and
again, which keeps its part of both trees in the CPU's caches.
"""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpurt.bench.result import BenchResult, Figure, Pairs, interleave
from dpurt.core.identity import ROOT_KEY
from dpurt.core.prefix_index import PrefixIndex

if TYPE_CHECKING:
    import numpy.typing as npt

Trunks = list["npt.NDArray[np.int32]"]
SUMMARY = "longest-prefix match of 131,072 tokens among 10^6 blocks, beside Dynamo's RadixTree"
BLOCK_TOKENS = 16
PROMPT_TOKENS = 131_072
VOCABULARY = 128_000
POINTS = 320
BLOCKS_PER_PROMPT = 40_000  # a trunk with its branches
BRANCHES = 2
PEER = "ai-dynamo-runtime"


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks stored in one go below block number `parent` (-1: none): int32 tokens, and their first block's number."""

    parent: int
    first: int
    tokens: npt.NDArray[np.int32]

    @property
    def num_blocks(self) -> int:
        return len(self.tokens) // BLOCK_TOKENS


def workload(num_blocks: int, seed: int) -> tuple[Trunks, list[Chain]]:
    """Trunks, and the chains that build them with their branches, in order of arrival; about `num_blocks` in all."""
    rng = np.random.default_rng(seed)
    prompts = max(1, num_blocks // BLOCKS_PER_PROMPT)
    trunks = [rng.integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32) for _ in range(prompts)]
    in_branch = max(1, (num_blocks // prompts - PROMPT_TOKENS // BLOCK_TOKENS) // (POINTS * BRANCHES))
    cuts = np.linspace(0, PROMPT_TOKENS // BLOCK_TOKENS, POINTS + 1).astype(int) * BLOCK_TOKENS
    chains: list[Chain] = []
    ends = [-1] * prompts
    for start, stop in itertools.pairwise(cuts.tolist()):
        for turn, trunk in enumerate(trunks):
            ends[turn] = _append(chains, ends[turn], trunk[start:stop])
            for _ in range(BRANCHES):
                tokens = rng.integers(0, VOCABULARY, in_branch * BLOCK_TOKENS, dtype=np.int32)
                _append(chains, ends[turn], tokens)
    return trunks, chains


def _append(chains: list[Chain], parent: int, tokens: npt.NDArray[np.int32]) -> int:
    """Add a chain; the number of its last block."""
    first = chains[-1].first + chains[-1].num_blocks if chains else 0
    chains.append(Chain(parent, first, tokens))
    return first + chains[-1].num_blocks - 1


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def build_ours(chains: list[Chain]) -> tuple[PrefixIndex, float, float]:
    """The index, seconds spent in inserts, and resident bytes it took a block. Every block has a slot."""
    rng = np.random.default_rng(99)
    total = sum(chain.num_blocks for chain in chains)
    keys = [rng.bytes(16) for _ in range(total)]
    gc.collect()
    before, spent = _resident_bytes(), 0.0
    index = PrefixIndex(4 * BLOCK_TOKENS)
    for chain in chains:
        parent = keys[chain.parent] if chain.parent >= 0 else ROOT_KEY
        tokens, mine = chain.tokens.tobytes(), keys[chain.first : chain.first + chain.num_blocks]
        start = time.perf_counter()
        ids = index.insert_after(parent, tokens, mine, 0.0)
        spent += time.perf_counter() - start
        index.set_slots(ids, 0, range(chain.first, chain.first + len(ids)))
    gc.collect()
    return index, spent, (_resident_bytes() - before) / total


def build_peer(chains: list[Chain], tree: Any, block_hash: Callable[..., list[int]]) -> None:
    """The same blocks, in the same order, as one worker's stored events: the fewest its find has to follow."""
    for event_id, chain in enumerate(chains):
        hashes = block_hash(chain.tokens.tolist(), BLOCK_TOKENS)
        blocks = [{"block_hash": chain.first + i + 1, "tokens_hash": h} for i, h in enumerate(hashes)]
        parent = chain.parent + 1 if chain.parent >= 0 else None
        stored = {"stored": {"parent_hash": parent, "blocks": blocks}}
        tree.apply_event(0, json.dumps({"event_id": event_id, "data": stored, "dp_rank": 0}).encode())


class _Ours:
    """Our side of a timed call, from wire bytes to the answer."""

    def __init__(self, index: PrefixIndex, prompts: list[bytes]) -> None:
        self._index = index
        self._prompts = itertools.cycle(prompts)

    def locate(self) -> int:
        """A location for each block."""
        ids = self._index.match(next(self._prompts))
        return len(self._index.locations(ids).slot)

    def match(self) -> int:
        """Only which blocks: what the peer's find answers, and no more."""
        return len(self._index.match(next(self._prompts)))


class _Peer:
    """Dynamo's side: hash and find, or one of them."""

    def __init__(self, tree: Any, block_hash: Callable[..., list[int]], prompts: list[list[int]]) -> None:
        self._tree = tree
        self._block_hash = block_hash
        self._tokens = itertools.cycle(prompts)
        self._hashes = itertools.cycle([block_hash(tokens, BLOCK_TOKENS) for tokens in prompts])

    def both(self) -> int:
        return self._length(self._block_hash(next(self._tokens), BLOCK_TOKENS))

    def find(self) -> int:
        return self._length(next(self._hashes))

    def hash(self) -> int:
        return len(self._block_hash(next(self._tokens), BLOCK_TOKENS))

    def _length(self, hashes: list[int]) -> int:
        scores: dict[tuple[int, int], int] = self._tree.find_matches(hashes).scores
        return max(scores.values())


def _compare(
    name: str, ours: Callable[[], int], peer: Callable[[], int], pairs: int, times: float | None
) -> Figure:
    blocks = PROMPT_TOKENS // BLOCK_TOKENS
    if ours() != blocks or peer() != blocks:
        raise RuntimeError(f"{name}: the two sides do not both match all {blocks} blocks")
    measured: Pairs = interleave(ours, peer, pairs)
    return Figure(
        name=name,
        value=measured.ours_s * 1e6,
        unit="us",
        peer=PEER,
        peer_value=measured.peer_s * 1e6,
        ratio=measured.ratio,
        target=None if times is None else f">= {times:g}x",
        holds=None if times is None else measured.ratio >= times,
    )


def _against_peer(index: PrefixIndex, trunks: Trunks, chains: list[Chain], pairs: int) -> list[Figure]:
    from dynamo._core import RadixTree, compute_block_hash_for_seq

    tree = RadixTree()
    build_peer(chains, tree, compute_block_hash_for_seq)
    figures = []
    for label, asked, goal in (("", trunks, 10.0), (", same prompt", trunks[:1], None)):
        ours = _Ours(index, [trunk.tobytes() for trunk in asked])
        peer = _Peer(tree, compute_block_hash_for_seq, [trunk.tolist() for trunk in asked])
        for part, call, times in (
            ("hash + find", peer.both, goal),
            ("find alone", peer.find, None),
            ("hash alone", peer.hash, None),
        ):
            figures.append(_compare(f"match and locate vs {part}{label}", ours.locate, call, pairs, times))
        figures.append(_compare(f"match alone vs find alone{label}", ours.match, peer.find, pairs, None))
    return figures


def _own_figures(index: PrefixIndex, spent: float, block_bytes: float) -> list[Figure]:
    limit = 4 * BLOCK_TOKENS + 256
    return [
        Figure(
            name="memory per block, all in",
            value=block_bytes,
            unit="B",
            target=f"<= {limit} (4 a token + 256)",
            holds=block_bytes <= limit,
        ),
        Figure(name="insert rate", value=len(index) / spent, unit="blocks/s"),
    ]


def _peer_version() -> str | None:
    try:
        return importlib.metadata.version(PEER)
    except importlib.metadata.PackageNotFoundError:
        return None


def run(quick: bool) -> BenchResult:
    """10^6 blocks (10^5 when quick), 41 pairs a figure (9)."""
    trunks, chains = workload(100_000 if quick else 1_000_000, seed=1)
    index, spent, block_bytes = build_ours(chains)
    peer_version = _peer_version()
    conditions: dict[str, object] = {
        "prompt_tokens": PROMPT_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "resident_blocks": len(index),
        "branch_points_on_the_path": POINTS,
        "branches_at_each": BRANCHES,
        "prompts_in_turn": len(trunks),
        "strands": index.stats().strands,
        "ours_takes": "bytes of int32 tokens, as received; returns a location for every block",
        "peer_takes": "list of ints (hash), list of hashes (find); returns a length per worker",
        "versions": {"python": platform.python_version(), "numpy": np.__version__, PEER: peer_version},
        "pairs": 9 if quick else 41,
        "target": "of the pair hash + find, which is what a lookup costs with the peer; apart they are shown without one: "
        "a bare memcmp of the prompt takes about a tenth of the peer's find, and ours also gathers every location",
    }
    figures = _own_figures(index, spent, block_bytes)
    if peer_version is None:
        conditions["peer_missing"] = f"pip install {PEER}"
        target = Figure(
            name="match and locate vs hash + find", value="not run", unit="us", peer=PEER, target=">= 10x"
        )
        return BenchResult(name="index", conditions=conditions, figures=[target, *figures])
    compared = _against_peer(index, trunks, chains, 9 if quick else 41)
    return BenchResult(name="index", conditions=conditions, figures=compared + figures)
