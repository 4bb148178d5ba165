"""A fake SPDK target, for fault tests only: what a real one does wrong or late, on demand.

`state` is what the target holds (bdevs with their bytes and injected faults, exports); `methods` the RPC methods on it;
`rpc_server` serves them on a Unix socket. Data paths share the same `FakeTarget`. A pass on this fake proves our side of
the conversation only, never that a real target agrees.
"""
