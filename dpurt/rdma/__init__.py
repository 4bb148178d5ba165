"""RDMA verbs, below everything that moves bytes with them: the verbs fabric and the NVMe/RDMA initiator.

    binding    pyverbs, imported when first used; why there is none, in words
    device     which device, port and GID; what the device allows
    qp         the bookkeeping of one reliable-connected queue pair (pure)
    endpoint   an opened device on Trio: completions by events, queue pairs, registered memory, windows

Nothing here knows what the bytes are for. pyverbs comes with Debian's and Ubuntu's `python3-pyverbs`, or PyPI's `pyverbs`
over the system's libibverbs; without it (or without a device) everything still imports, and `device.why_off()` tells why.
"""
