"""The demo: a node and two GPU-host processes replay a real request trace, and every byte is checked.

The trace gives arrival times and which prompts share which prefix, but no text: tokens are made up from the block ids, and a
block's "KV" is a pseudo-random stream seeded by its block key, so a host can check any byte it is handed against the identity
it asked for, without having stored it. Time and block bytes are scaled; `dpurt demo` prints the scales. No GPU takes part.
"""
