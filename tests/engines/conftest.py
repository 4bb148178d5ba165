"""Tests in the folders here drive real engines and run in the engines' own environments: `make test-engines`.

`tests/engines/run` names the engine in DPURT_ENGINE; without it the folders are not even collected.
"""

import os

collect_ignore = [name for name in ("vllm", "sglang", "lmcache") if name != os.environ.get("DPURT_ENGINE")]
