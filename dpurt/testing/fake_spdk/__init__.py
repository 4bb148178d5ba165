"""Honest fakes of what an SPDK target speaks, for fault tests: they reproduce measured behaviour, wrong turns included."""
