"""What an interpreter costs on an RDMA link: a bare loop over pyverbs, for `dpurt.bench.verbs` to show beside perftest and ours.

No Trio, no permission, no events, one process that does nothing else: post until so many are under way, poll, post. Requests are
made beforehand. A fabric in Python, which has all of that to do besides, cannot be expected to be faster at one work a block.
"""

from __future__ import annotations

import json
import mmap
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from dpurt.rdma.binding import verbs
from dpurt.rdma.device import RdmaDevice, find
from dpurt.rdma.memory import Access, address_of
from dpurt.rdma.queue_pair import ACK_TIMEOUT, RETRIES, RNR_TIMER, Opcode

__all__ = ["BareLoop"]

REGION_BYTES = 64 << 20
_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
_MAX_DEPTH = 64
_MIB = 1 << 20


class _End:
    """One of two: a queue pair and registered memory."""

    def __init__(self, device: RdmaDevice) -> None:
        v = verbs()
        self._device = device
        self.memory = memoryview(mmap.mmap(-1, REGION_BYTES))
        self.address = address_of(self.memory)
        context = v.Context(name=device.name)
        domain = v.PD(context)
        self.cq = v.CQ(context, 4 * _MAX_DEPTH)
        self.mr = v.MR(domain, REGION_BYTES, int(_ACCESS), self.address)
        cap = v.QPCap(max_send_wr=_MAX_DEPTH, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        self.qp = v.QP(domain, v.QPInitAttr(qp_type=v.enums.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap))
        self._owned = [context, domain, self.cq, self.mr, self.qp]
        self.name = [self.qp.qp_num, device.gid, self.address, self.mr.rkey]

    def close(self) -> None:
        while self._owned:
            self._owned.pop().close()

    def connect(self, number: int, gid: str) -> None:
        v, device = verbs(), self._device
        route = v.GlobalRoute(dgid=v.GID(gid), hop_limit=64, sgid_index=device.gid_index)
        attr = v.QPAttr(port_num=device.port)
        attr.qp_access_flags = int(_ACCESS)
        attr.ah_attr = v.AHAttr(port_num=device.port, is_global=1, gr=route)
        attr.path_mtu = (device.mtu // 128).bit_length() - 1
        attr.dest_qp_num = number
        attr.rq_psn = attr.sq_psn = 0
        attr.max_rd_atomic = attr.max_dest_rd_atomic = device.limits.max_rd_atomic
        attr.min_rnr_timer, attr.timeout = RNR_TIMER, ACK_TIMEOUT
        attr.retry_cnt = attr.rnr_retry = RETRIES
        self.qp.to_rts(attr)


class BareLoop:
    """The end that moves: READs from the other's memory, and WRITEs into it. Made by `open`."""

    def __init__(self, end: _End, remote_address: int, rkey: int) -> None:
        self._end = end
        self._remote = remote_address, rkey

    @classmethod
    @contextmanager
    def open(cls, device: RdmaDevice) -> Iterator[BareLoop]:
        """With the other end in a process of its own."""
        command = [sys.executable, "-m", "dpurt.bench.verbs_floor", device.name, device.address]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                number, gid, *remote = json.loads(process.stdout.readline())
                with closing(_End(device)) as end:
                    print(json.dumps(end.name), file=process.stdin, flush=True)
                    if process.stdout.readline() != "connected\n":
                        raise RuntimeError("the other end of the bare loop did not connect")
                    end.connect(number, gid)
                    yield cls(end, *remote)
            finally:
                process.kill()

    def run(self, opcode: Opcode, size: int, depth: int, count: int) -> float:
        """MiB/s of `count` blocks with so many under way."""
        requests = [self._request(opcode, size, number) for number in range(count)]
        post, poll = self._end.qp.post_send, self._end.cq.poll
        posted = done = 0
        start = time.perf_counter()
        while done < count:
            while posted < count and posted - done < depth:
                post(requests[posted])
                posted += 1
            ended, completions = poll(depth)
            done += ended
            if any(completion.status for completion in completions):
                raise RuntimeError("the bare loop's queue pair failed")
        seconds = time.perf_counter() - start
        for request in requests:
            request.close()
        return count * size / seconds / _MIB

    def _request(self, opcode: Opcode, size: int, number: int) -> Any:
        v = verbs()
        at = number % (REGION_BYTES // size) * size
        element = v.SGE(self._end.address + at, size, self._end.mr.lkey)
        request = v.SendWR(opcode=int(opcode), num_sge=1, sg=[element])  # signalled
        element.close()
        address, rkey = self._remote
        request.set_wr_rdma(rkey, address + at)
        return request


def _other_end(device: RdmaDevice) -> None:
    """What its process does, until it is killed."""
    end = _End(device)
    print(json.dumps(end.name), flush=True)
    number, gid, *_ = json.loads(sys.stdin.readline())
    end.connect(number, gid)
    print("connected", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _other_end(find(*sys.argv[1:]))
