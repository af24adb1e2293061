"""Merging the layers into `Settings`, and one-line errors for what is wrong in them."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cachefs.config.settings import Settings
from cachefs.errors import ConfigError

_ENV_PREFIX = "CACHEFS_"
_SECRET = re.compile(r"secret|password|token|access_?key|credential")

Entry: TypeAlias = tuple[str, str, object, str]
"""Section, key, raw value, and where it came from as shown to the user."""
Origins: TypeAlias = dict[tuple[str, str], str]


def load(
    config_file: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Settings:
    """Merge all layers and validate.

    `overrides` are the `section.key=value` texts of `-o`; `flags` maps `section.key` to the value
    of an explicit flag, None meaning not given. Raises ConfigError.
    """
    env = os.environ if environ is None else environ
    values: dict[str, dict[str, object]] = {}
    origins: Origins = {}
    for layer in (
        _from_file(config_file),
        _from_environ(env),
        _from_options(overrides),
        _from_flags(flags or {}),
    ):
        for section, key, value, origin in layer:
            values.setdefault(section, {})[key] = value
            origins[section, key] = origin
    try:
        settings = Settings.model_validate({"store": {}} | values)
    except ValidationError as exc:
        raise _config_error(exc, origins) from None
    return settings if settings.cache.dirs else _with_default_dir(settings, env)


def _from_file(config_file: str | os.PathLike[str] | None) -> Iterator[Entry]:
    if config_file is None:
        return
    name = os.fspath(config_file)
    try:
        document = tomllib.loads(Path(name).read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"config file {name}: {exc.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"config file {name}: not valid TOML: {exc}") from None
    for section, table in document.items():
        if section not in Settings.model_fields:
            raise ConfigError(f"{name}: `{section}`: unknown section{_suggest(section)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: `{section}`: is a section, so write [{section}]")
        for key, value in table.items():
            yield section, key, value, name


def _from_environ(environ: Mapping[str, str]) -> Iterator[Entry]:
    for name, value in environ.items():
        section, found, key = name.removeprefix(_ENV_PREFIX).partition("__")
        if name.startswith(_ENV_PREFIX) and found:
            origin = f"environment variable {name}"
            yield *_split(f"{section}.{key}".lower(), origin), value, origin


def _from_options(overrides: Sequence[str]) -> Iterator[Entry]:
    for text in overrides:
        name, found, value = text.partition("=")
        if not found:
            raise ConfigError(f"-o: `{name}`: expected section.key=value{_suggest_value(name)}")
        yield *_split(name.strip(), "-o"), value, "-o"


def _from_flags(flags: Mapping[str, object]) -> Iterator[Entry]:
    for name, value in flags.items():
        if value is not None:
            yield *_split(name, "command line"), value, "command line"


def _split(name: str, origin: str) -> tuple[str, str]:
    section, _, key = name.partition(".")
    if section not in Settings.model_fields or not key:
        raise ConfigError(f"{origin}: `{name}`: unknown key{_suggest(name)}")
    return section, key


def _config_error(exc: ValidationError, origins: Origins) -> ConfigError:
    """The first problem in full, and how many more there are. Values of unknown keys (which may be
    misplaced secrets) are never shown."""
    problems = exc.errors(include_url=False, include_input=False)
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    line = _describe(problems[0], origins)
    if len(problems) > 1:
        line += f" (and {len(problems) - 1} more)"
    return ConfigError(line)


def _describe(problem: ErrorDetails, origins: Origins) -> str:
    location = [str(part) for part in problem["loc"]]
    section, key = location[0], ".".join(location[1:2])
    origin = origins.get((section, key)) or next(
        (source for (part, _), source in origins.items() if part == section and not key), ""
    )
    name = f"{section}.{key}" if key else section
    return f"{origin or 'settings'}: `{name}`: {_reason(problem, name)}"


def _reason(problem: ErrorDetails, name: str) -> str:
    kind: str = problem["type"]
    context: dict[str, Any] = problem.get("ctx", {})
    if kind == "extra_forbidden" and _SECRET.search(name):
        return "credentials are not settings; use store.profile or the AWS_* variables"
    if kind == "extra_forbidden":
        return f"unknown key{_suggest(name)}"
    if kind == "missing":
        return "missing; give the store, for example s3://bucket/prefix or file:///directory"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"must be one of {context['expected']}".replace("'", "")
    message: str = problem["msg"]
    return message[:1].lower() + message[1:]


def _suggest_value(name: str) -> str:
    """As `_suggest`, for a name without a value: the section alone helps nobody."""
    if name in Settings.model_fields:
        return ""
    return _suggest(name).replace(f"`{name}`", f"`{name}=VALUE`")


def _suggest(name: str) -> str:
    """`; did you mean `x`?` for the nearest section or key, or nothing when none is near."""
    known = [
        f"{section}.{key}"
        for section, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        for key in field.annotation.model_fields
    ]
    key = name.rpartition(".")[2]
    same_key = [full for full in known if full.rpartition(".")[2] == key]
    near = same_key or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if "." not in name and not same_key:
        near = difflib.get_close_matches(name, list(Settings.model_fields), n=1) or near
    if not near:
        tails = {full.rpartition(".")[2]: full for full in known}
        near = [tails[tail] for tail in difflib.get_close_matches(key, list(tails), n=1)]
    return f"; did you mean `{near[0]}`?" if near else ""


def _with_default_dir(settings: Settings, environ: Mapping[str, str]) -> Settings:
    """One cache directory per store, so that mounts of different stores never share one."""
    if os.geteuid() == 0:
        base = Path("/var/cache")
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    identity = f"{settings.store.endpoint or ''} {settings.store.url}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", settings.store.url)[:80].strip("-")
    cache = settings.cache.model_copy(update={"dirs": (base / "cachefs" / f"{slug}-{digest}",)})
    return settings.model_copy(update={"cache": cache})
