"""What a recording says happened: where blocks were when they were asked for, and how quickly the node acted on a hint.

Rates are over all block references of the recorded prompts, as in `dpurt.replay.report`, so that they can be held against a
replay's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpurt.replay.recording import Recording
from dpurt.wire import recording as r

__all__ = ["Recorded", "figures_of", "hint_to_read_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Block references by where the block was when its host asked; `recomputed` ones were not asked for."""

    references: int
    staging: int
    in_flight: int
    nvme: int
    gone: int

    @property
    def recomputed(self) -> int:
        """What hosts computed themselves."""
        return self.references - self.staging - self.in_flight - self.nvme - self.gone

    def share(self, count: int) -> float:
        """Of all references."""
        return count / max(1, self.references)


def figures_of(recording: Recording) -> Recorded:
    """Counts of a whole recording."""
    prompts: dict[int, int] = {}
    wheres = {"staging": 0, "in_flight": 0, "nvme": 0, "gone": 0}
    for line in recording.lines:
        if isinstance(line, r.ArrivedLine):
            prompts[line.sequence] = max(line.prompt_blocks, prompts.get(line.sequence, 0))
        elif isinstance(line, r.DemandedLine):
            wheres[line.where] += 1
    return Recorded(references=sum(prompts.values()), **wheres)


def hint_to_read_s(lines: Sequence[r.Line]) -> Iterator[float]:
    """From the moment the node heard of an arrival or a decode step to the moment the device was given a read it caused: the
    node's own time, queues included. Reads the device never began are left out."""
    heard: float | None = None
    of_job: dict[int, float] = {}
    of_block: dict[int, float] = {}
    for line in lines:
        match line:
            case r.ArrivedLine() | r.StepLine():
                heard = line.heard
            case r.Fetched() if heard is not None:
                of_job[line.job] = heard
            case r.Queued(_, block, _, int(job)) if job in of_job:
                of_block[block] = of_job.pop(job)
            case r.Completed(_, block, began) if block in of_block:
                since = of_block.pop(block)
                if began is not None:
                    yield began - since
            case r.Tick() | r.ConsumedLine() | r.StoredLine() | r.DemandedLine() | r.StagedLine():
                heard = None
            case r.FailedLine() | r.EvictedLine() | r.DroppedLine() | r.FinishedLine() | r.GoneLine():
                heard = None
            case _:
                pass
