"""SGLang uses dpurt without a patch: `DpurtStorage`, a HiCache storage backend loaded by configuration only.

`README.md` beside this file is the page for users. `identity` and `budget` are pure and know no SGLang; `pages` turns the host
pool's page addresses into buffers; `backend` alone imports SGLang.
"""
