"""vLLM's own offloading, made to run where the device is the CPU: its stock worker accepts GPUs only.

Everything but the copy between the KV tensors and the host region (here memcpy, there a DMA) is vLLM's: scheduler, tiering, events.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = []
        for each in caches.tensors:
            device = each.tensor.view(torch.int8).view(-1, each.page_size_bytes)
            self._pairs.append((device, region.create_next_worker_view(each.page_size_bytes)))
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pairs:
            host[torch.from_numpy(dst_spec.block_ids).long()] = device[
                torch.from_numpy(src_spec.block_ids).long()
            ]
        return self._finish(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for device, host in self._pairs:
            device[torch.from_numpy(dst_spec.block_ids).long()] = host[
                torch.from_numpy(src_spec.block_ids).long()
            ]
        return self._finish(job_id)

    def _finish(self, job_id: int) -> bool:
        self._done.append(TransferResult(job_id, success=True))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every transfer has ended when its submission returns."""

    def shutdown(self) -> None:
        self._pairs.clear()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id, num_chunks=self.num_chunks, rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
        )  # fmt: skip
        return CopyingWorker(kv_caches, region)
