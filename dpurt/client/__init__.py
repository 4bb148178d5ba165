"""What a GPU host uses to talk to a node: `connect` (Trio) and `BlockingClient` (a thread hosts the loop).

The node is advice, not a dependency: when it is down every call ends within its budget with `NodeUnavailable` or
`DeadlineExceeded`, and the engine recomputes.
"""

from dpurt.client.blocking import BlockingClient as BlockingClient
from dpurt.client.mirror import IndexMirror as IndexMirror
from dpurt.client.trio_client import Client as Client
from dpurt.client.trio_client import LoadedBlock as LoadedBlock
from dpurt.client.trio_client import connect as connect
