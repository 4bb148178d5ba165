"""What storage hooks of engines share: blocks named by the engine's own digests, kept by a node.

A hook below an engine's cache (SGLang's `HiCacheStorage`, LMCache's L2 adapter) asks for blocks by full digests, one by one or
in batches, and knows no parents. `DigestStore` answers it from a node: never with an exception, always within a stated budget.
`settings` is how such a hook is told where its node is. No engine is imported here.
"""

from dpurt.engines.store.digest_store import Answer as Answer
from dpurt.engines.store.digest_store import Budgets as Budgets
from dpurt.engines.store.digest_store import DigestStore as DigestStore
from dpurt.engines.store.settings import Access as Access
from dpurt.engines.store.settings import HookSettings as HookSettings
from dpurt.engines.store.settings import NodeSettings as NodeSettings
from dpurt.engines.store.settings import access_from as access_from
from dpurt.engines.store.settings import settings_from as settings_from
