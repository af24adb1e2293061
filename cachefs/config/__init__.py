"""Settings: every knob, its default and its meaning. The only home of defaults.

Layers, later wins: built-in defaults, the TOML file, environment `CACHEFS_SECTION__KEY`,
`-o section.key=value`, explicit command line flags. A wrong key or value is a `ConfigError` whose
one line names the source, the key, the reason and, for an unknown key, the nearest real one.

Sizes are held in bytes, times in seconds; as text both carry units (`2GiB`, `500ms`). Lists given
as text are comma separated or JSON; the element `@defaults` of a pattern list stands for the
built-in patterns. Secrets are never settings: they come from the AWS credential chain.

Nothing here acts on a setting, and nothing elsewhere reads the environment for one.
"""

from cachefs.config.loading import load
from cachefs.config.settings import (
    CacheSettings,
    CheckpointSettings,
    FlushSettings,
    LogSettings,
    MetricsSettings,
    MountSettings,
    NodeSettings,
    OrderSettings,
    PacerSettings,
    Settings,
    StoreSettings,
    TierSettings,
)
from cachefs.config.units import parse_duration, parse_size

__all__ = [
    "CacheSettings",
    "CheckpointSettings",
    "FlushSettings",
    "LogSettings",
    "MetricsSettings",
    "MountSettings",
    "NodeSettings",
    "OrderSettings",
    "PacerSettings",
    "Settings",
    "StoreSettings",
    "TierSettings",
    "load",
    "parse_duration",
    "parse_size",
]
