"""LMCache uses dpurt without a patch: `DpurtL2Adapter`, an L2 adapter plug-in of its multi-process server.

`README.md` beside this file is the page for users. `identity` is pure and knows no LMCache; `tasks` is the event-descriptor
bookkeeping; `adapter` alone imports LMCache.
"""
