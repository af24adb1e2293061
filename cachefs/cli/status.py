"""`cachefs status` and `cachefs ls`: how things stand."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from cachefs.cache.leftovers import Leftover, find
from cachefs.cli import output, target
from cachefs.errors import CachefsError, UsageError
from cachefs.observe.runfiles import memory_dirs

_SLOW_DISK = 1.0
"""Seconds from which a disk that takes no changes is mentioned."""
_MOST_EFFECTS = 10
"""Pending effects shown to people; JSON has all of them."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(
    path: Annotated[
        str | None, typer.Argument(help="A mountpoint or a path below one; none: every mount.")
    ] = None,
    json: Json = False,
) -> int:
    """Show how a mount or a path in it is doing."""
    if path is None:
        return _status_of_all(json)
    found = target.find(path)
    args = {} if found.is_mount else {"path": found.path}
    result = target.ask(found, "status", args)
    if json:
        output.print_json(result)
    else:
        parts = _mount_parts(result) if found.is_mount else _path_parts(result)
        output.show(*parts)
    return 0


def ls(
    path: Annotated[str, typer.Argument(help="A directory or file in a mount.")],
    json: Json = False,
) -> None:
    """List a directory with upload states."""
    found = target.find(path)
    result = target.ask(found, "ls", {"path": found.path})
    if json:
        output.print_json(result)
        return
    rows = [_ls_row(entry) for entry in sorted(result["entries"], key=lambda e: str(e["name"]))]
    if rows:
        columns = (">SIZE", "MODIFIED", "STATE", "SURVIVES", "NAME")
        output.show(output.table(columns, rows))


def _status_of_all(json: bool) -> int:
    mounts = target.find_all()
    if json:
        if len(mounts) != 1:
            names = ", ".join(mount.mountpoint for mount in mounts) or "none is mounted here"
            raise UsageError(f"status --json describes one mount: {names}", hint="name one")
        output.print_json(target.ask(mounts[0], "status", {}))
        return 0
    parts: list[RenderableType] = []
    code = 0
    for mount in mounts:
        try:
            parts += _mount_parts(target.ask(mount, "status", {}))
        except CachefsError as exc:  # one silent daemon must not hide the others
            parts.append(Text(output.printable(f"{exc}; {exc.hint}" if exc.hint else str(exc))))
            code = exc.exit_code
    output.show(*(parts or ["No cachefs mounts."]), *map(_left_over, find(memory_dirs())))
    return code


def _left_over(left: Leftover) -> Text:
    """What a daemon that was killed left in memory for a cache that is not in its place."""
    files = " ".join(map(str, left.files))
    return Text(
        output.printable(
            f"{output.size(left.nbytes)} in memory wait for the cache {left.directory}, which is "
            f"not there: mount its disk and start it again, or, if it is gone, `rm {files}`"
        )
    )


def _mount_parts(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield output.facts(_mount_facts(found))
    checkpoints = found.get("checkpoints") or ()
    if checkpoints:
        columns = ("CHECKPOINT", "STATE", ">FILES", ">SIZE", "SURVIVES")
        yield output.table(columns, map(_checkpoint_row, checkpoints))
    effects = found.get("effects") or ()
    if effects:
        shown = effects[:_MOST_EFFECTS]
        yield output.table(("PENDING", "CHANGE", "STATE", "WAITS FOR"), map(_effect_row, shown))
    if len(effects) > _MOST_EFFECTS:
        yield Text(f"and {output.count(len(effects) - _MOST_EFFECTS, 'more pending change')}")
    errors = found.get("errors") or ()
    if errors:
        rows = [
            (output.printable(error["path"]), output.printable(error["error"])) for error in errors
        ]
        yield output.table(("FAILING", "ERROR"), rows)


def _mount_facts(found: Mapping[str, Any]) -> Iterator[tuple[str, str | Text]]:
    yield "mount", output.printable(found["mountpoint"])
    yield "store", output.printable(found["store"])
    if found.get("degraded"):
        yield "state", Text("degraded: the store is out of reach", style="bold red")
    yield "dirty", _dirty(found)
    if found["stalled_files"]:
        stalled = output.count(found["stalled_files"], "file")
        yield "stalled", Text(f"{stalled} refused by the store, kept here", style="bold red")
    yield "lane", _lane(found["lanes"])
    yield from _cache_facts(found["cache"])
    yield "daemon", _daemon(found)
    metrics = found.get("metrics")
    yield "metrics", f"http://{metrics}/metrics" if metrics else "off"


def _dirty(found: Mapping[str, Any]) -> Text:
    if not found["dirty_files"]:
        return Text("nothing: everything closed is in the store", style="green")
    oldest = output.duration(found["oldest_dirty_seconds"])
    text = f"{output.size(found['dirty_bytes'])} in {output.count(found['dirty_files'], 'file')}"
    text += f", oldest {oldest}"
    if found["uploading_bytes"]:
        text += f"; uploading {output.size(found['uploading_bytes'])}"
    return Text(text, style="yellow")


def _lane(lanes: Mapping[str, Any]) -> str:
    reason = output.printable(str(lanes.get("reason") or ""))
    name = "passthrough" if lanes["passthrough"] else "tracked"
    return f"{name} ({reason})" if reason else name


def _cache_facts(cache: Mapping[str, Any]) -> Iterator[tuple[str, str | Text]]:
    yield "cache", _filled(cache)
    if cache.get("waiting_writers"):
        waiting = output.count(cache["waiting_writers"], "writer")
        yield "", f"{waiting} waiting for room: what is here is not in the store yet, or in use"
    if cache.get("larger_files"):
        files = output.count(cache["larger_files"], "open file")
        moved = output.size(cache["offloaded_bytes"])
        yield (
            "",
            f"{files} larger than the room: written as fast as the store takes it, {moved} so far",
        )
    metadata = cache.get("metadata")
    if metadata and metadata["lag_seconds"] >= _SLOW_DISK:
        waiting = output.size(metadata["pending_bytes"])
        since = output.duration(metadata["lag_seconds"])
        why = f" ({metadata['error']})" if metadata["error"] else ""
        text = f"the disk takes no changes of metadata for {since}{why}: {waiting} wait in memory"
        yield "", Text(text, "bold red")
    coming = cache.get("next_checkpoint")
    if coming and not coming["fits"]:
        size, room = output.size(coming["expected_bytes"]), output.size(coming["room_bytes"])
        yield "", Text(f"the next checkpoint ({size}) will not fit: room for {room}", "bold red")
    for device in cache["devices"]:
        path = output.printable(device["path"])
        text = f"{path}: {device['kind']}, {_filled(device)}, survives {device['survives']}"
        if speed := device.get("write_bytes_per_second"):
            text += f", {output.size(speed)}/s"
        error = device.get("error")
        yield "", f"{text}; FAILED: {output.printable(error)}" if error else text


def _filled(space: Mapping[str, Any]) -> str:
    used, whole = space["used_bytes"], space["size_bytes"]
    if not whole:
        return output.size(used)
    return f"{output.size(used)} of {output.size(whole)} ({100 * used / whole:.0f} %)"


def _daemon(found: Mapping[str, Any]) -> str:
    text = f"pid {found['pid']} on {output.printable(found['node'])}, "
    text += f"up {output.duration(found['uptime_seconds'])}"
    takeovers = found["takeovers"]
    return f"{text}, {output.count(takeovers, 'takeover')}" if takeovers else text


def _checkpoint_row(point: Mapping[str, Any]) -> tuple[str | Text, ...]:
    name = "durable" if point["durable"] else "complete" if point["complete"] else "incomplete"
    return (
        output.printable(point["path"]),
        output.state(name),
        str(point["files"]),
        output.size(point["bytes"]),
        str(point["survives"]),
    )


def _effect_row(effect: Mapping[str, Any]) -> tuple[str | Text, ...]:
    waits_for = effect.get("waits_for") or ()
    if isinstance(waits_for, str):
        waits_for = (waits_for,)
    culprits = ", ".join(output.printable(str(path)) for path in waits_for[:3])
    if len(waits_for) > 3:
        culprits += f" and {len(waits_for) - 3} more"
    change = f"{effect['kind']} ({effect['class']})"
    return output.printable(effect["path"]), change, output.state(effect["state"]), culprits


def _path_parts(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    waits_for = ", ".join(output.printable(str(path)) for path in found.get("waits_for") or ())
    dirty = found.get("dirty_bytes") or 0
    whole = found.get("size")
    yield output.facts(
        (
            ("path", output.printable(found["path"])),
            ("state", output.state(found["state"])),
            ("survives", str(found.get("survives") or "")),
            ("lane", str(found.get("lane") or "")),
            ("size", "" if whole is None else output.size(whole)),
            ("dirty", output.size(dirty) if dirty else ""),
            ("url", output.printable(found.get("url") or "")),
            ("etag", output.printable(found.get("etag") or "")),
            ("waits for", waits_for),
            ("error", Text(output.printable(found.get("error") or ""), style="bold red")),
        )
    )


def _ls_row(entry: Mapping[str, Any]) -> tuple[str | Text, ...]:
    is_dir = entry["type"] == "dir"
    mtime = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["mtime"]))
    return (
        "" if is_dir else output.size(entry["size"]),
        mtime,
        output.state(entry["state"] or ""),
        str(entry["survives"] or ""),
        output.printable(entry["name"]) + ("/" if is_dir else ""),
    )
