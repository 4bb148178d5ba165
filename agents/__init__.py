"""The node's agents, one per duty: gateway, index, prefetch, staging, storage, fabric, metrics."""
