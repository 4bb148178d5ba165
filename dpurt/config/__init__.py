"""Configuration: one TOML file, a *topology*, describes a node: devices, tenants, spaces, hosts, links,
limits.

`load_config("laptop")` or `load_config("my/node.toml")` gives a checked, frozen `Config`. `schema` holds the
tables and the questions a node asks of them, `reading` turns a file into them with errors that name file and
place, `rules` holds what must hold between tables. Environment variables override nothing (a tenant's
`salt_env` names one on purpose).
"""

from dpurt.config.reading import TOPOLOGIES, config_from, load_config, ready_topologies
from dpurt.config.schema import (
    BdevConfig,
    Config,
    CurveConfig,
    EnvelopeConfig,
    FabricConfig,
    FileBdevConfig,
    GatewayConfig,
    GeometryConfig,
    HostConfig,
    LayerGroupConfig,
    LinkConfig,
    MemoryBdevConfig,
    MetricsConfig,
    ModelledBdevConfig,
    NodeConfig,
    NvmeRdmaBdevConfig,
    NvmeTcpBdevConfig,
    PlacementConfig,
    PrefetchConfig,
    ProfileConfig,
    RailConfig,
    SpaceConfig,
    SpdkBdevConfig,
    StagingConfig,
    TenantConfig,
    VerbsConfig,
    VhostUserBdevConfig,
)

__all__ = [
    "TOPOLOGIES",
    "BdevConfig",
    "Config",
    "CurveConfig",
    "EnvelopeConfig",
    "FabricConfig",
    "VerbsConfig",
    "FileBdevConfig",
    "GatewayConfig",
    "GeometryConfig",
    "HostConfig",
    "LayerGroupConfig",
    "LinkConfig",
    "MemoryBdevConfig",
    "MetricsConfig",
    "ModelledBdevConfig",
    "NodeConfig",
    "NvmeRdmaBdevConfig",
    "NvmeTcpBdevConfig",
    "PlacementConfig",
    "PrefetchConfig",
    "ProfileConfig",
    "RailConfig",
    "SpaceConfig",
    "SpdkBdevConfig",
    "StagingConfig",
    "TenantConfig",
    "VhostUserBdevConfig",
    "config_from",
    "load_config",
    "ready_topologies",
]
