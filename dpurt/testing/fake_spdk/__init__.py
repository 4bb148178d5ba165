"""Honest fakes of an SPDK target, for fault tests only: what a real one does on demand of nobody."""
