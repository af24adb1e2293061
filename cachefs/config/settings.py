"""The settings themselves: one model per section, with defaults and meanings."""

from __future__ import annotations

import os
import socket
from typing import Annotated, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cachefs.config.bandwidth import Bandwidth
from cachefs.config.units import (
    GIB,
    MIB,
    AbsolutePath,
    Count,
    Duration,
    Fraction,
    OptCount,
    OptDuration,
    OptPath,
    OptSize,
    OptText,
    Patterns,
    Size,
    Text,
    auto_movers,
    parse_list,
    parse_movers,
    parse_octal,
)
from cachefs.errors import ConfigError
from cachefs.model import checkpoints, names
from cachefs.model.bandwidth import BandwidthPlan

DEFAULTS = "@defaults"
"""In a pattern list: the built-in patterns, so that adding one needs no copy of all."""


def _has_valid_port(parts: SplitResult) -> bool:
    """No port, or one from 0 to 65,535."""
    try:
        return parts.port is None or parts.port >= 0
    except ValueError:
        return False


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="after")
    @classmethod
    def _expand_defaults(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, tuple) or DEFAULTS not in value or info.field_name is None:
            return value
        own = tuple(item for item in value if item != DEFAULTS)
        return (*cls.model_fields[info.field_name].default, *own)


class StoreSettings(_Section):
    """Where objects go, and how to speak to it."""

    url: Text
    """`s3://bucket/prefix` or `file:///directory`."""
    endpoint: OptText = None
    """S3 endpoint, `http(s)://host[:port]`; None: the AWS default of the region."""
    region: OptText = None
    """AWS region; None: as the AWS tools find it."""
    profile: OptText = None
    """Profile in the AWS credential files; None: the usual credential chain."""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    """How requests name the bucket; `auto`: `path` where `endpoint` is given."""
    checksum: Literal["auto", "crc64nvme", "none"] = "auto"
    """`auto`: CRC64NVME where the store takes it; probed once."""
    require: bool = True
    """Refuse to mount with an empty cache while the store cannot be used."""
    connect_timeout: Duration = 5.0
    """For a connection to the store."""
    read_timeout: Duration = 60.0
    """For an answer of the store."""
    max_connections: OptCount = None
    """HTTP connections per mover; None: as many as `flush.threads`."""

    @field_validator("url")
    @classmethod
    def _url_form(cls, url: str) -> str:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ValueError("holds credentials; use a profile or AWS_* variables instead")
        if parts.scheme == "s3" and parts.netloc and not (parts.query or parts.fragment):
            return url.rstrip("/")
        if parts.scheme == "file" and not parts.netloc and parts.path.startswith("/"):
            return url.rstrip("/") if parts.path.strip("/") else url
        raise ValueError(f"{url!r} is not of the form s3://bucket/prefix or file:///directory")

    @field_validator("endpoint")
    @classmethod
    def _endpoint_form(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        parts = urlsplit(endpoint)
        if "@" in parts.netloc:
            raise ValueError("holds credentials; use a profile or AWS_* variables instead")
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or not _has_valid_port(parts)
        ):
            raise ValueError(f"{endpoint!r} is not of the form http(s)://host[:port]")
        return endpoint.rstrip("/")


class CacheSettings(_Section):
    """Cache devices and what happens as they fill."""

    dirs: Annotated[tuple[AbsolutePath, ...], BeforeValidator(parse_list)] = ()
    """One directory per cache device, in any order; `load` fills in a default."""
    size: OptSize = Field(default=None, ge=MIB)
    """Bytes over all devices; None: 90 % of what is free at the first mount."""
    full: Literal["wait", "enospc"] = "wait"
    """A full cache of dirty data makes new writers wait, or fail."""
    full_timeout: Duration = Field(default=1800.0, gt=0)
    """How long a writer waits for room before it is told that there is none (ENOSPC)."""
    prefetch: bool = True
    """Fetch the rest of a checkpoint's directory once two of its files are being read."""
    measure: bool = True
    """Of several disks, write 48 MiB to each once, some seconds after the first mount, to find out
    which are slow."""
    whole_wait: Duration = 10.0
    """How long opening a large file of data may take until it is here, and is read at the speed of
    the disk; what would take longer, by how fast it comes, is read as it comes. 0: all."""
    preserve_limit: Size = GIB
    """Largest file copied to keep its bytes for an upload while it is rewritten."""
    high_watermark: Fraction = 0.9
    """Fill level, as a fraction of the size, at which eviction starts."""
    low_watermark: Fraction = 0.8
    """Fill level at which eviction stops."""
    meta_reserve: Size = 64 * MIB
    """Preallocated for the metadata database, so that a full disk cannot hurt it."""
    commit_patience: Duration = Field(default=0.02, ge=0)
    """How long a change of metadata waits for the disk, whose errors it is then told; after that it
    counts, and its record waits in memory until the disk takes it."""

    @model_validator(mode="after")
    def _watermarks(self) -> Self:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(
                f"low_watermark ({self.low_watermark:g}) must be below "
                f"high_watermark ({self.high_watermark:g})"
            )
        return self


class FlushSettings(_Section):
    """When and how dirty data is uploaded."""

    settle: Duration = 1.0
    """Wait after the last close of a file before its upload begins."""
    settle_max: Duration = 10.0
    """Longest wait from the first close, however often the file is closed again."""
    concurrency: Count = 16
    """Requests in flight over all movers."""
    movers: Annotated[Count, BeforeValidator(parse_movers)] = Field(default_factory=auto_movers)
    """Mover processes; `auto`: half the CPUs, 1 to 4."""
    threads: Count = 8
    """Threads per mover."""
    bandwidth_limit: Bandwidth = BandwidthPlan()
    """Bytes per second over all uploads: `200MiB`, `off`, or by local time of day, for example
    `08:00-18:00=50MiB,otherwise=off`."""
    pressure: Literal["off", "io", "cpu", "both"] = "off"
    """Fewer uploads at a time while tasks of this machine wait for I/O or for a CPU."""
    pressure_io: Fraction = 0.2
    """Share of the time in which some task waits for I/O, above which `pressure` holds back."""
    pressure_cpu: Fraction = 0.5
    """The same for a CPU."""
    spread: float = Field(default=0.0, ge=0, lt=1)
    """Part of the time between two checkpoints (learned) over which the upload of one is spread;
    0: as fast as possible. `wait`, `flush`, drains and a full cache make haste."""
    part_size: Size = Field(default=16 * MIB, ge=5 * MIB, le=5 * GIB)
    """Preferred part of a multipart upload; larger files get larger parts."""
    single_put_max: Size = Field(default=16 * MIB, le=5 * GIB)
    """Files up to this size go up in one request."""
    temp_hold: Duration = 3600.0
    """How long a file under a temporary name is held back before it counts as any other."""
    temp_patterns: Patterns = names.TEMP_PATTERNS
    """Names that frameworks give to unfinished files."""
    open_file_interval: Duration = 30.0
    """How often a file that stays open (a log) is uploaded as far as it has grown."""
    drain_timeout: OptDuration = None
    """Longest drain at unmount or SIGTERM; None: until everything is durable."""
    held: Literal["keep", "publish"] = "keep"
    """What becomes of files that were open for writing when the mount died: kept back until they
    are closed anew, or published as they are."""

    @model_validator(mode="after")
    def _settling(self) -> Self:
        if self.settle > self.settle_max:
            raise ValueError(
                f"settle ({self.settle:g}s) must not exceed settle_max ({self.settle_max:g}s)"
            )
        return self


class PacerSettings(_Section):
    """Request rates, per key prefix and second."""

    initial_rate: float = Field(default=30.0, gt=0)
    """Where the rate starts."""
    min_rate: float = Field(default=1.0, gt=0)
    """It never falls below this."""
    max_rate: float = Field(default=3500.0, gt=0)
    """It never rises above this."""
    decrease: Fraction = 0.5
    """Factor on the rate when the store throttles."""

    @model_validator(mode="after")
    def _rates(self) -> Self:
        if not self.min_rate <= self.initial_rate <= self.max_rate:
            raise ValueError("rates must satisfy min_rate <= initial_rate <= max_rate")
        return self


class OrderSettings(_Section):
    """In which order the bucket shows what was done here."""

    mode: Literal["safe", "strict"] = "safe"
    """`safe`: markers wait for data, data flows freely; `strict`: everything in order."""
    data: Patterns = names.DATA_PATTERNS
    """Names of data: waits for nothing."""
    barrier: Patterns = names.BARRIER_PATTERNS
    """Names of markers: wait for everything complete before them."""
    unordered: Patterns = names.UNORDERED_PATTERNS
    """Names that neither wait nor are waited for."""
    data_min_size: Size = Field(default=MIB, ge=1)
    """A new file of at least this size is data whatever its name."""


class TierSettings(_Section):
    """Tiers between the cache devices and the store."""

    hot_newest: OptCount = None
    """Checkpoints that are kept in the cache; None: as long as there is room. Only what the warm
    tier, if there is one, and the store have whole is removed."""
    hot_every: OptCount = None
    """Checkpoints whose step is a multiple of this are kept in the cache while there is room."""
    hot_bytes: OptSize = None
    """Keep in the cache only as many of the newest checkpoints as have this size together."""
    hot_age: OptDuration = None
    """Keep in the cache only checkpoints that are younger."""
    warm: OptPath = None
    """Directory on a parallel or network filesystem that gets a plain copy of every file."""
    warm_policy: Literal["beside", "before"] = "beside"
    """`before`: while the directory works, content goes to the store only after it went there."""
    warm_newest: OptCount = None
    """Checkpoints that are kept there; None: all. Only what the store has too is removed."""
    warm_every: OptCount = None
    """Checkpoints whose step is a multiple of this are kept there for ever."""
    warm_bytes: OptSize = None
    """Keep there only as many of the newest checkpoints as have this size together."""
    warm_age: OptDuration = None
    """Keep there only checkpoints that are younger."""


class CheckpointSettings(_Section):
    """What counts as a checkpoint."""

    nodes: Count = 1
    """Nodes that save a checkpoint together: a marker waits for what all of them have of it."""
    patterns: Patterns = checkpoints.CHECKPOINT_PATTERNS
    """Directories and files that are checkpoints."""
    supersede: Literal["never", "unstarted"] = "never"
    """`unstarted`: skip a checkpoint not yet begun when a newer one is complete and no pointer
    names the older one any more."""


class MountSettings(_Section):
    """The filesystem as the kernel sees it."""

    passthrough: Literal["auto", "off"] = "auto"
    """`off`: the tracked lane serves everything."""
    small_files: Literal["auto", "off"] = "auto"
    """`off`: a handler makes each new file; else, in the tracked lane, many are made at once."""
    takeover: Literal["auto", "off"] = "auto"
    """`off`: the end of the daemon ends the mount."""
    takeover_timeout: Duration = 600.0
    """How long a mount without a daemon is kept before it is given up."""
    standby: Literal["auto", "off"] = "auto"
    """A daemon in reserve takes over in a fraction of the time; it costs about 60 MiB of memory."""
    passthrough_headroom: Fraction = 0.10
    """Fraction of a device's share of `cache.size` that must be free for a passthrough writer."""
    metadata_ttl: Duration = 60.0
    """What others do in the bucket is seen within this time; how long the kernel may remember names
    and attributes."""
    allow_other: bool = True
    """Other users may use the mount; permissions apply."""
    umask: Annotated[int, BeforeValidator(parse_octal), Field(ge=0, le=0o777)] = 0o022
    """Taken from 0666 and 0777 for objects whose metadata has no mode."""
    uid: int = Field(default_factory=os.getuid, ge=0)
    """Owner of objects whose metadata has none."""
    gid: int = Field(default_factory=os.getgid, ge=0)
    """Group of objects whose metadata has none."""


class MetricsSettings(_Section):
    """The Prometheus endpoint."""

    listen: str = "127.0.0.1:9469"
    """`host:port` (port 0: any free one, the same until the mount ends) or `off`."""

    @field_validator("listen")
    @classmethod
    def _listen_form(cls, listen: str) -> str:
        host, colon, port = listen.rpartition(":")
        if listen != "off" and not (colon and host and port.isdecimal() and int(port) < 65536):
            raise ValueError(f"{listen!r} is not host:port or off")
        return listen

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port to listen on; None when off."""
        host, _, port = self.listen.rpartition(":")
        return None if self.listen == "off" else (host.strip("[]"), int(port))


class NodeSettings(_Section):
    """This machine."""

    id: str = Field(default_factory=socket.gethostname, pattern=r"^[A-Za-z0-9._-]{1,128}$")
    """Name of this node in conflict copies, manifests and metrics."""


class LogSettings(_Section):
    """What the daemon writes about itself."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    format: Literal["text", "json"] = "text"
    """`text`: key=value lines; `json`: one object a line."""


class Settings(_Section):
    """All settings of one mount, resolved. Frozen; travels to the daemon as JSON."""

    store: StoreSettings
    cache: CacheSettings = Field(default_factory=CacheSettings)
    flush: FlushSettings = Field(default_factory=FlushSettings)
    pacer: PacerSettings = Field(default_factory=PacerSettings)
    order: OrderSettings = Field(default_factory=OrderSettings)
    tiers: TierSettings = Field(default_factory=TierSettings)
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    mount: MountSettings = Field(default_factory=MountSettings)
    metrics: MetricsSettings = Field(default_factory=MetricsSettings)
    node: NodeSettings = Field(default_factory=NodeSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    def to_json(self) -> str:
        """JSON that `from_json` reads back to an equal value."""
        return self.model_dump_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Settings:
        """Inverse of `to_json`. Raises ConfigError."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as exc:
            raise ConfigError(f"settings: {exc.errors()[0]['msg']}") from None
