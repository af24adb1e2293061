"""Brings objects of the store into cache files, as far as readers need them.

A `Fill` is a cache file that is to hold one version of one object. `Filler.ensure` returns when a
range of it is there; chunks are fetched by parallel ranged GETs, each for several that adjoin once
enough are under way. They are given out through the injected `Fetch`, so that bytes never pass
through this process. Readers of one fill share chunks, each goes on as soon as its own range has
arrived, and who reads in sequence has chunks fetched ahead of it, more of them the longer it goes
on.

Invariants, for the trio thread alone:
 - a chunk has at most one job, and only extents not `present` are fetched, so local changes
   (`claim`) are never overwritten by the object's bytes;
 - `present` grows only after the bytes are in the cache file. It says nothing about power cuts: who
   stores it durably must fsync the file first;
 - jobs run in the filler's own nursery: a reader that gives up takes no chunk from the others;
 - one version: every GET carries the etag. When the store says that the object has changed, this
   call and all later ones raise ESTALE, and what is present stays readable.
"""

from __future__ import annotations

import copy
import errno
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import trio

from cachefs.errors import NotFound, PreconditionFailed
from cachefs.failpoints import Point, reach
from cachefs.model.extents import ExtentSet

CHUNK = 8 << 20
"""Bytes that are fetched at least."""
RUN = 8
"""Chunks of one ranged GET at most."""
MAX_IN_FLIGHT = 16
"""Requests of one fill under way at a time."""

_FEWEST = 2  # chunks of a request, where so many are wanted
_LONG, _PARTS = 4, 16  # chunks of a request at most, unless that is less than a part of the object
_UNSEEN, _OF = 4, 32  # chunks of a long file between two reads that are seen; one in so many
_AHEAD = 6  # requests ahead of who waits for a whole object, once the first part of it is there
_PARALLEL = 4  # requests that are wanted under way before they get longer
_READ = 1 << 20  # bytes that are read at once
_STREAMS = 8  # sequential readers of one fill that are told apart


class Fetch(Protocol):
    """Fetches bytes [start, end) of an object into the same place of a file; returns their number
    and, if that is known, their CRC64NVME.

    Pacing and retrying are its own affair. Raises StoreError or OSError.
    """

    def __call__(
        self, key: str, path: str, start: int, end: int, if_match: str | None
    ) -> Awaitable[tuple[int, int | None]]: ...


class NoRoom(OSError):
    """What is to be fetched has no room in the cache, and gets none soon."""


class Room(Protocol):
    """Gives room for what is fetched into the file of a fill."""

    def left(self, fill: Fill) -> int:
        """Bytes that can be promised at once."""
        ...

    def promise(self, fill: Fill, nbytes: int) -> None:
        """Set so many of them aside."""
        ...

    async def wait(self, fill: Fill, nbytes: int) -> None:
        """Return when so many are set aside. Raises NoRoom."""
        ...

    def settle(self, fill: Fill, nbytes: int) -> None:
        """The fetch that they were set aside for is over."""
        ...


class _Unbounded:
    """Room for everything."""

    def left(self, fill: Fill) -> int:
        return fill.size

    def promise(self, fill: Fill, nbytes: int) -> None:
        pass

    async def wait(self, fill: Fill, nbytes: int) -> None:
        pass

    def settle(self, fill: Fill, nbytes: int) -> None:
        pass


@dataclass(slots=True)
class _Stream:
    """One sequential reader: where it will read next, and how many chunks to fetch ahead of it."""

    position: int
    window: int


@dataclass(slots=True, eq=False)
class _Job:
    """One chunk on its way, or several that adjoin."""

    start: int
    end: int
    chunks: range
    wanted: int
    """Bytes that lack."""
    promised: bool = False
    """There is room for them."""
    done: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class Fill:
    """A cache file that is to hold the object `key` in the version `etag`.

    `path` must exist. `size` is the object's; bytes of the file beyond it are nobody's here.
    `present` says which extents of the file need no fetching.
    """

    path: str
    key: str
    etag: str | None
    size: int
    present: ExtentSet
    stale: bool = False
    crc64: int | None = None
    """CRC64NVME of the whole object, where it is known."""
    failures: int = 0
    """Times that what was fetched did not have it."""
    served: bool = False
    """Somebody may have read bytes of it before all were there to be compared."""
    checking: trio.Lock = field(default_factory=trio.Lock, repr=False)
    """Held while what was fetched is compared."""
    whole: bool = False
    """It is waited for as a whole: what is on its way keeps no other reader waiting."""
    owner: object = None
    """Whose cache file it is, for `Room`."""
    trims: int = 0
    """Counts up when bytes leave the cache file again."""
    _jobs: dict[int, _Job] = field(default_factory=dict, repr=False)
    """By chunk."""
    _requests: int = 0
    _pieces: dict[int, tuple[int, int]] = field(default_factory=dict, repr=False)
    """Start -> (end, CRC64NVME) of what arrived."""
    _streams: list[_Stream] = field(default_factory=list, repr=False)

    @property
    def complete(self) -> bool:
        """Whether the whole object is in the cache file."""
        return self.size == 0 or self.present.covers(0, self.size)

    def lacking(self, start: int, end: int) -> int:
        """Bytes of the object in [start, end) that are not in the cache file."""
        gaps = self.present.gaps(start, max(start, min(end, self.size)))
        return sum(stop - begin for begin, stop in gaps)

    @property
    def stride(self) -> int:
        """Chunks that somebody may read without being seen to: in long files, some."""
        return max(1, min(_UNSEEN, self.size // CHUNK // _OF))

    @property
    def in_flight(self) -> int:
        """Requests on their way."""
        return self._requests

    def received(self, start: int, end: int, crc64: int | None) -> None:
        """Bytes [start, end) have arrived, with this checksum."""
        if crc64 is not None:
            self._pieces[start] = (end, crc64)

    def pieces(
        self, passed: Mapping[int, tuple[int, int]] = MappingProxyType({})
    ) -> list[tuple[int, int]] | None:
        """(CRC64NVME, size) of the pieces that the whole object came in, in order. None when that
        is not known: some came to another daemon, or are no longer what arrived. `passed`: start ->
        (end, CRC64NVME) of others, which were not kept."""
        found, position = [], 0
        while position < self.size:
            end, crc64 = max(each.get(position, (0, 0)) for each in (self._pieces, passed))
            if end <= position:
                return None
            found.append((crc64, end - position))
            position = end
        return found if position == self.size else None

    def trim(self, start: int, end: int) -> None:
        """Bytes [start, end) leave the cache file: from now on they have to be fetched."""
        self.trims += 1
        self.present.remove(start, end)
        for piece in [at for at, (stop, _) in self._pieces.items() if at < end and start < stop]:
            del self._pieces[piece]

    def near(self, *, ahead: bool = True) -> Iterator[tuple[int, int]]:
        """What its readers are at, or have asked to be fetched `ahead`."""
        for stream in self._streams:
            window = stream.window if ahead else 0
            yield stream.position - CHUNK, stream.position + (window + 1) * CHUNK

    def at(self) -> Iterator[tuple[int, int]]:
        """The rest of the chunks that its readers are in, and what they just asked for."""
        for stream in self._streams:
            yield stream.position - _READ, -(-stream.position // CHUNK) * CHUNK

    def is_coming(self, start: int, end: int) -> bool:
        """Whether any of the bytes [start, end) is on its way."""
        return any(job.start < end and start < job.end for job in self._jobs.values())

    def spoiled(self) -> None:
        """Nothing of what arrived is any good."""
        self.failures += 1
        self.present.remove(0, self.size)
        self._pieces.clear()


class Filler:
    """Serves any number of fills. Made by `open_filler`.

    `on_fetched(fill, nbytes)` is called after each piece that has arrived; `fill.complete` then
    tells whether it was the last. It must not raise.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        fetch: Fetch,
        *,
        chunk: int = CHUNK,
        max_in_flight: int = MAX_IN_FLIGHT,
        run: int = RUN,
        on_fetched: Callable[[Fill, int], None] | None = None,
    ) -> None:
        self._nursery = nursery
        self._fetch = fetch
        self._chunk = chunk
        self._max_in_flight = max_in_flight
        self._run = run
        self._on_fetched = on_fetched
        self.room: Room = _Unbounded()
        self._active = 0
        self._queue: deque[tuple[Fill, _Job]] = deque()
        self._fills: dict[str, Fill] = {}

    def under_way(self, path: str) -> Fill | None:
        """The fill of a cache file that something is on its way to, or waits to be; whoever opens
        that file goes on with it. With another one, what comes late would be written over what has
        been written to the file since."""
        return self._fills.get(path)

    @property
    def active(self) -> int:
        """Requests on their way, over all fills."""
        return self._active

    async def ensure(self, fill: Fill, start: int, end: int) -> None:
        """Return when bytes [start, end), as far as the object reaches, are in the cache file.

        Raises what the fetch of a chunk in that range raised (a later call tries again), NoRoom
        when there is none, and ESTALE when the store no longer has this version. Returns at once
        when everything is there.
        """
        end = min(end, fill.size)
        if start >= end:
            return
        window = self._note_read(fill, start, end)
        if fill.whole and start > 0:
            window = _AHEAD * self._run
        self._start_missing(fill, start, end)
        self._read_ahead(fill, end, window)
        await self._wait_for(fill, start, end)

    async def fetch_all(self, fill: Fill) -> None:
        """Return when the whole object is in the cache file. Errors as for `ensure`."""
        await self._wait_for(fill, 0, fill.size)

    async def claim(self, fill: Fill, start: int, end: int) -> None:
        """Take a range out of the object's hands: it counts as present, no fetch will write to it.

        For a writer, before it writes there or truncates; waits for chunks that are on their way.
        """
        while jobs := [job for job in fill._jobs.values() if job.start < end and start < job.end]:
            await jobs[0].done.wait()
        fill._pieces.clear()
        fill.present.add(start, end)

    async def abandon(self, fill: Fill) -> None:
        """Stop fetching, return when nothing is on its way. Readers that wait get EIO.

        The store's answer to a cancelled GET may still be written to the file, if that still
        exists.
        """
        while jobs := list(fill._jobs.values()):
            for job in jobs:
                job.scope.cancel()
            await jobs[0].done.wait()

    async def _wait_for(self, fill: Fill, start: int, end: int) -> None:
        while job := self._start_missing(fill, start, min(end, fill.size)):
            await job.done.wait()
            if job.error is not None:
                # Each waiter raises a copy: one exception object cannot grow several tracebacks.
                raise copy.copy(job.error) from job.error

    def _start_missing(self, fill: Fill, start: int, end: int) -> _Job | None:
        """Start what the limit allows of the missing chunks; returns the first one's job.

        The first is started whatever the limit: others' readahead must not make a reader wait.
        """
        missing = self._missing_chunks(fill, start, end)
        first = next(missing, None)
        if first is None:
            return None
        if fill.stale:
            raise stale_error(fill)
        stop = -(-end // self._chunk)
        length = self._length(fill, stop - first)
        job = fill._jobs.get(first)
        if job is None:  # Less, rather than wait for room.
            fits = max(1, self.room.left(fill) // self._chunk)
            job = self._begin(fill, first, min(first + length, first + fits, stop))
        for index in missing:
            if fill._requests >= self._max_in_flight or not self._fits(fill, length):
                break
            if index not in fill._jobs:
                self._begin(fill, index, min(index + length, stop))
        return job

    def _missing_chunks(self, fill: Fill, start: int, end: int) -> Iterator[int]:
        if start >= end:
            return
        last = -1
        for gap_start, gap_end in fill.present.gaps(start, end):
            for index in range(gap_start // self._chunk, (gap_end - 1) // self._chunk + 1):
                if index != last:
                    yield index
                last = index

    def _length(self, fill: Fill, wanted: int) -> int:
        """Chunks for one request when so many are wanted: few until enough requests are under way,
        which is what makes a distant store fast; then more, since each costs something. Of no
        object a large part: what is on its way can be neither read nor evicted."""
        part = max(_LONG, fill.size // self._chunk // _PARTS)
        longest = self._run if fill.whole else min(self._run, part)
        share = wanted // max(1, _PARALLEL - self._active)
        return min(longest, max(share, min(_FEWEST, wanted), 1))

    def _begin(self, fill: Fill, index: int, stop: int) -> _Job:
        """One request for a chunk and for those that follow and lack as well, up to `stop`."""
        last = index + 1
        while last < stop and last not in fill._jobs and not self._is_present(fill, last):
            last += 1
        start, end = index * self._chunk, min(last * self._chunk, fill.size)
        wanted = sum(stop - start for start, stop in fill.present.gaps(start, end))
        job = _Job(start, end, range(index, last), wanted)
        if wanted <= self.room.left(fill):
            self.room.promise(fill, wanted)
            job.promised = True
        fill._jobs.update(dict.fromkeys(job.chunks, job))
        self._fills[fill.path] = fill
        fill._requests += 1
        self._active += 1
        self._queue.append((fill, job))
        self._nursery.start_soon(self._run_next)
        return job

    def _fits(self, fill: Fill, chunks: int) -> bool:
        return chunks * self._chunk <= self.room.left(fill)

    def _is_present(self, fill: Fill, index: int) -> bool:
        start = index * self._chunk
        return fill.present.covers(start, min(start + self._chunk, fill.size))

    async def _run_next(self) -> None:
        # The scheduler starts new tasks in random order; what is waited for must go out first.
        fill, job = self._queue.popleft()
        job.error = OSError(errno.EIO, "the read from the store was abandoned")
        try:
            with job.scope:
                if not job.promised:
                    await self.room.wait(fill, job.wanted)
                    job.promised = True
                await self._fetch_gaps(fill, job)
                job.error = None
        except PreconditionFailed:
            fill.stale = True
            job.error = stale_error(fill)
        except NotFound:
            job.error = stale_error(fill)
        except Exception as err:  # whatever it is, it belongs to the readers, not to this nursery
            job.error = err
        finally:
            for index in job.chunks:
                del fill._jobs[index]
            fill._requests -= 1
            if not fill._requests:
                self._fills.pop(fill.path, None)
            self._active -= 1
            if job.promised:
                self.room.settle(fill, job.wanted)
            job.done.set()

    async def _fetch_gaps(self, fill: Fill, job: _Job) -> None:
        for start, end in list(fill.present.gaps(job.start, job.end)):
            count, crc64 = await self._fetch(fill.key, fill.path, start, end, fill.etag)
            reach(Point.FILL_AFTER_FETCH)
            if count != end - start:
                raise OSError(errno.EIO, f"{fill.key}: {count} of {end - start} bytes arrived")
            fill.present.add(start, end)
            fill.received(start, end, crc64)
            if self._on_fetched is not None:
                self._on_fetched(fill, count)

    def _read_ahead(self, fill: Fill, position: int, window: int) -> None:
        """Start up to `window` chunks beyond the one that `position` is in, as the limits allow."""
        stop = -(-position // self._chunk) + window
        if window >= _PARALLEL:
            stop -= stop % self._run  # one request now and then, not a small one for each chunk
        stop = min(stop, -(-fill.size // self._chunk))
        ahead_end = min(stop * self._chunk, fill.size)
        if fill.stale or window == 0:
            return
        missing = [
            i for i in self._missing_chunks(fill, position, ahead_end) if i not in fill._jobs
        ]
        length = self._length(fill, len(missing))
        for index in missing:
            # Readahead of all fills together stays within a few windows: it must not queue in front
            # of what somebody is waiting for.
            if fill._requests >= self._max_in_flight or self._active >= 2 * self._max_in_flight:
                return
            if not self._fits(fill, length):
                return
            if index not in fill._jobs:
                self._begin(fill, index, min(index + length, stop))

    def _note_read(self, fill: Fill, start: int, end: int) -> int:
        """Chunks to fetch ahead: none for a lone read, then 1, doubled with each chunk passed.

        A read from the start of an object counts as the first of a sequence: most of them are.
        """
        streams = fill._streams
        for place, stream in enumerate(streams):
            if abs(start - stream.position) <= self._chunk * fill.stride:
                if end // self._chunk > stream.position // self._chunk:
                    stream.window = min(max(1, 2 * stream.window), self._widest(fill))
                stream.position = max(stream.position, end)
                streams.insert(0, streams.pop(place))
                return stream.window
        streams.insert(0, _Stream(end, 1 if start == 0 else 0))
        del streams[_STREAMS:]
        return streams[0].window

    def _widest(self, fill: Fill) -> int:
        """Chunks to fetch ahead at most; of a long file more, in longer requests."""
        part = fill.size // self._chunk // 4
        return max(self._max_in_flight, min(part, self._run * self._max_in_flight))


@asynccontextmanager
async def open_filler(
    fetch: Fetch,
    *,
    chunk: int = CHUNK,
    max_in_flight: int = MAX_IN_FLIGHT,
    run: int = RUN,
    on_fetched: Callable[[Fill, int], None] | None = None,
) -> AsyncIterator[Filler]:
    """A filler for the length of the block; leaving it abandons every chunk that is on its way."""
    async with trio.open_nursery() as nursery:
        yield Filler(
            nursery, fetch, chunk=chunk, max_in_flight=max_in_flight, run=run, on_fetched=on_fetched
        )
        nursery.cancel_scope.cancel()


def stale_error(fill: Fill) -> OSError:
    """For whoever reads bytes of a version that the store no longer has."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), fill.key)
