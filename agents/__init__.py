"""The node's agents, one per duty (gateway, index, storage, staging, prefetch, placement, fabric, engines, routing, metrics,
recorder, shadow), and what they share.
"""
