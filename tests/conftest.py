"""Fixtures of the tests that mount: a real store, real mounts, client processes.

Tests see the product from outside: they run its command line, use the mount from client processes
(the test's own process may call os functions on it but must never map its files), and look at the
bucket with a plain S3 client. Every mount ends with its test, and a mount that cannot be ended, or
whose log has a warning that the test did not allow, fails the test.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support import lanes, scratch
from tests.support.client import Client
from tests.support.mounts import Mount, MountFactory, Watchdog, clean_environment

LOCAL = os.environ.get("CACHEFS_TEST_LOCAL")
"""A local directory to test the tests on (see `tests.support.localdir`)."""
MOUNTING = {"e2e", "posix", "differential", "frameworks", "lanes", "programs", "cuts"}
"""Directories of tests that mount: they need root and /dev/fuse, and end in a minute each."""
DEFAULT_TIMEOUT = 60.0
_left: list[str] = []
"""Directories that tests did not remove."""
GRACE = 5.0
"""Seconds between a test's time-out and the abort of its mounts."""


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def pytest_configure(config: pytest.Config) -> None:
    """The markers of these tests."""
    config.addinivalue_line("markers", "needs(*programs): skipped when a program is missing")
    config.addinivalue_line("markers", "real_starts: no process of its mounts is forked")
    config.addinivalue_line("markers", "either_lane: one lane will do unless lanes are chosen")
    settings.register_profile("shared machine", deadline=None)
    settings.load_profile("shared machine")


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Give tests that mount their default time limit; where tests are shared out to several
    processes, the longest begin."""
    for item in items:
        if _folder(item) in MOUNTING and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DEFAULT_TIMEOUT))
    if not lanes.chosen():
        left_out = [item for item in items if _is_left_out(item)]
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    yield
    if hasattr(config, "workerinput"):  # set by xdist
        from tests.support import sharing

        sharing.longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that share a mount go to one process."""
    from tests.support.sharing import Sharing

    return Sharing(config, log) if config.getoption("dist") == "loadgroup" else None


def _lane(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("lane", "")) if callspec else ""


def _is_left_out(item: pytest.Item) -> bool:
    """Tests that hardly depend on the lane run in one of them, which varies from test to test; but
    for those that name the one they are about."""
    lane, both = _lane(item), lanes.to_test()
    if any("lane" in str(mark.args[0]).split(",") for mark in item.iter_markers("parametrize")):
        return False
    if item.get_closest_marker("either_lane") is None or lane not in both:
        return False
    name = item.nodeid.replace(lane, "")
    return lane != both[zlib.crc32(name.encode()) % len(both)]


def pytest_sessionstart(session: pytest.Session) -> None:
    """What was left by runs that were killed goes."""
    if not hasattr(session.config, "workerinput"):  # set by xdist
        scratch.sweep()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """What tests have left goes, and is told: they should have removed it."""
    _left.extend(str(path) for path in scratch.remove_all())
    getattr(session.config, "workeroutput", {})["left"] = _left  # of xdist, which passes it on


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of xdist has ended."""
    _left.extend(getattr(node, "workeroutput", {}).get("left", ()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The last lines of a run."""
    for path in _left:
        terminalreporter.write_line(f"WARNING: tests left {path} behind; it was removed", red=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests that mount cannot run without /dev/fuse; say so instead of failing in odd ways."""
    if _folder(item) in MOUNTING and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs /dev/fuse (run as root)")


# ---- places ------------------------------------------------------------------------------------


@pytest.fixture
def after_mounts() -> Iterator[contextlib.ExitStack]:
    """What mounts use ends after they do, whatever the order of a test's fixtures."""
    with contextlib.ExitStack() as stack:
        yield stack


def _scratch_until(stack: contextlib.ExitStack, parent: str) -> Path:
    return stack.enter_context(scratch.directory(parent))


@pytest.fixture
def ram_dir(after_mounts: contextlib.ExitStack) -> Path:
    """An empty directory in RAM (/dev/shm)."""
    return _scratch_until(after_mounts, "/dev/shm")


@pytest.fixture
def disk_dir(after_mounts: contextlib.ExitStack) -> Path:
    """An empty directory on a disk."""
    return _scratch_until(after_mounts, "/var/tmp")


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory with no AWS files in it."""
    return tmp_path_factory.mktemp("home")


# ---- stores ------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Any]:
    """A real SeaweedFS on ports of its own, for the whole session; data in RAM."""
    from tests.support.stores import Seaweed

    with scratch.directory("/dev/shm", "store") as data:
        server = Seaweed(data)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@pytest.fixture
def bucket(seaweed: Any, after_mounts: contextlib.ExitStack) -> Any:
    """A prefix of a fresh bucket, as a plain S3 client sees it; `bucket.url` is what to mount."""
    made = seaweed.fresh_bucket()
    after_mounts.callback(seaweed.remove_bucket, made)
    return made.below("runs")


@pytest.fixture
def dir_store(ram_dir: Path) -> Any:
    """A fresh `file:///dir` store."""
    from tests.support.bucket import DirectoryStore

    path = ram_dir / "store"
    path.mkdir()
    return DirectoryStore(path)


@pytest.fixture
def link(seaweed: Any, after_mounts: contextlib.ExitStack) -> Any:
    """The way to the store, to be slowed or cut: mount with `endpoint=link.endpoint`."""
    from tests.support.link import Link

    return after_mounts.enter_context(Link(seaweed.endpoint))


@pytest.fixture
def faults(seaweed: Any, after_mounts: contextlib.ExitStack) -> Any:
    """A proxy that injects trouble by rules (see `tests.support.faults`)."""
    from tests.support.faultproxy import FaultProxy

    return after_mounts.enter_context(FaultProxy(seaweed.endpoint))


# ---- mounts ------------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=lanes.to_test())
def lane(request: pytest.FixtureRequest) -> str:
    """Every test of a mount runs in each lane."""
    return str(request.param)


@pytest.fixture(scope="session")
def _watchdog() -> Watchdog:
    return Watchdog()


@pytest.fixture(autouse=True)
def _overdue(request: pytest.FixtureRequest) -> Iterator[None]:
    """Abort this test's mounts when it is overdue, so that nothing can hang."""
    if _folder(request.node) not in MOUNTING:
        yield
        return
    watchdog: Watchdog = request.getfixturevalue("_watchdog")
    marker = request.node.get_closest_marker("timeout")
    watchdog.arm((marker.args[0] if marker else DEFAULT_TIMEOUT) + GRACE)
    yield
    watchdog.disarm()


@pytest.fixture(scope="session")
def make_mount(home: Path) -> Iterator[Callable[..., tuple[Mount, list[Path]]]]:
    """Prepare a Mount (not started) and the directories that go with it, at the latest when all
    tests are over."""
    counter = itertools.count()
    folders: list[Path] = []
    below = scratch.make("/tmp", "mounts")
    below.chmod(0o755)  # clients that are not root must get there

    def make(
        store: Any = None,
        *,
        lane: str,
        cache: str = "ram",
        cache_dirs: list[Path] | None = None,
        options: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        arguments: list[str] | None = None,
        endpoint: str | None = None,
        falls_back: bool = False,
    ) -> tuple[Mount, list[Path]]:
        made: list[Path] = []
        if cache_dirs is None:
            made = [scratch.make("/dev/shm" if cache == "ram" else "/var/tmp")]
            cache_dirs = made
            folders.extend(made)
        path = below / f"m{next(counter)}"
        url = store if isinstance(store, str) else store.url
        endpoint = endpoint or getattr(store, "endpoint", None)
        mount = Mount(
            store=url,
            path=path,
            cache_dirs=cache_dirs,
            options={"mount.passthrough": lanes.OPTIONS[lane], **(options or {})},
            env=clean_environment(home, {**getattr(store, "env", {}), **(env or {})}),
            arguments=[*(["--endpoint-url", endpoint] if endpoint else []), *(arguments or [])],
            falls_back=falls_back,
        )
        return mount, made

    yield make
    for folder in [below, *folders]:
        scratch.remove(folder)


@pytest.fixture
def mounted(
    request: pytest.FixtureRequest,
    lane: str,
    make_mount: Callable[..., Any],
    after_mounts: contextlib.ExitStack,
    _watchdog: Watchdog,
) -> Iterator[MountFactory]:
    """Factory of mounts: `mounted(bucket, options={"flush.settle": "5s"})`.

    Options: `cache` ("ram" or "disk"), `cache_dirs`, `options`, `env`, `arguments`, `endpoint`,
    `allow` (patterns of log lines that are expected), `start=False`.
    """
    mounts: list[Mount] = []

    def factory(
        store: Any, *, start: bool = True, allow: tuple[str, ...] = (), **kinds: Any
    ) -> Mount:
        mount: Mount
        mount, made = make_mount(store, **{"lane": lane, **kinds})
        if any(map(request.node.get_closest_marker, ("real_starts", "soak", "bench"))):
            mount.env["CACHEFS_TEST_STARTS"] = "real"
        mount.allowed_log.extend(allow)
        mounts.append(mount)
        for folder in made:
            after_mounts.callback(scratch.remove, folder)
        _watchdog.watch(mount)
        return mount.start() if start else mount

    yield factory
    trouble = []
    for mount in reversed(mounts):
        try:
            mount.tear_down()
        except AssertionError as error:
            trouble.append(str(error))
        finally:
            _watchdog.forget(mount)
    if trouble:
        pytest.fail("\n".join(trouble), pytrace=False)


@pytest.fixture
def client() -> Iterator[Client]:
    """Runs code in processes of its own."""
    made = Client()
    yield made
    made.close()


# ---- shared mounts -----------------------------------------------------------------------------


class Shared:
    """One mount for many tests; made anew after a test that spoiled it."""

    def __init__(self, start: Callable[[], Mount], watchdog: Watchdog) -> None:
        self._start = start
        self._watchdog = watchdog
        self.mount: Mount | None = None
        self.serial = 0
        self._seen = 0

    def get(self) -> Mount:
        """The mount, alive, with whatever its log said so far taken note of."""
        if self.mount is None:
            self.mount = self._start()
            self._watchdog.watch(self.mount)
        self.serial += 1
        self._seen = len(self.mount.log)
        return self.mount

    def check(self, allowed: list[str]) -> None:
        """After a test: the daemon lives and its log has nothing new that was not allowed."""
        from tests.support import logs

        assert self.mount is not None
        found = logs.unexpected(self.mount.log[self._seen :], allowed)
        try:
            self.mount.status()
        except (OSError, AssertionError, ValueError) as error:
            found.append(f"the daemon does not answer any more: {error!r}")
            text = self.mount.log[-3000:]
            self.end()
            found.append(text)
        assert not found, "\n".join(found[:20])

    def end(self) -> None:
        if self.mount is not None:
            self.mount.destroy()
            self._watchdog.forget(self.mount)
            self.mount = None


@pytest.fixture(scope="module")
def _shared_mount(
    lane: str, make_mount: Callable[..., Any], seaweed: Any, _watchdog: Watchdog
) -> Iterator[tuple[Shared, Any] | None]:
    if LOCAL:
        yield None
        return
    whole = seaweed.fresh_bucket()
    view = whole.below("shared/prefix")
    folders: list[Path] = []

    def start() -> Mount:
        mount, made = make_mount(view, lane=lane)
        folders.extend(made)
        started: Mount = mount.start()
        return started

    shared = Shared(start, _watchdog)
    yield shared, view
    try:
        if shared.mount is not None:
            shared.mount.allowed_log.append(".*")
            shared.mount.tear_down()
    finally:
        shared.end()
        for folder in folders:
            scratch.remove(folder)
        seaweed.remove_bucket(whole)


@pytest.fixture
def work(_shared_mount: tuple[Shared, Any] | None, client: Client, ram_dir: Path) -> Iterator[Any]:
    """A fresh directory on a mount that the tests of a module share (see `tests.support.work`)."""
    from tests.support.work import Work

    ram_dir.chmod(0o755)
    if _shared_mount is None:
        yield _local_work(client, ram_dir)
        return
    shared, view = _shared_mount
    mount = shared.get()
    name = f"t{shared.serial}"
    path = mount.path / name
    path.mkdir()
    local = ram_dir / "local"
    local.mkdir()
    made = Work(mount, path, view.below(name), client, local)
    yield made
    client.close()
    shared.check(made.allowed_log)


def _local_work(client: Client, ram_dir: Path) -> Any:
    from tests.support.localdir import LocalMount, LocalView
    from tests.support.work import Work

    (ram_dir / "local").mkdir()
    top = scratch.make(str(LOCAL))
    top.chmod(0o755)
    path = top / "t"
    path.mkdir()
    mount: Any = LocalMount(top)
    view: Any = LocalView(path)
    return Work(mount, path, view, client, ram_dir / "local")
