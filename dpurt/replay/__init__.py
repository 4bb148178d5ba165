"""Replay: request traces driven through the prefetch core on a virtual clock, against modelled devices.

`trace` reads traces, `policies` names what can be compared, `engine` runs one policy over one trace, `hits`
is the untimed statistic others publish, `report` compares results, `cli` is the command. No Trio and no clock
in here but for measuring how long a replay took.
"""
