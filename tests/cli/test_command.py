"""The command itself: help, imports, errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cachefs import __version__
from cachefs.cli import command, output
from cachefs.cli.command import VERBS
from tests.cli.conftest import Run
from tests.cli.fake import FakeMounts

HEAVY = {"boto3", "botocore", "pyfuse3", "trio", "structlog", "prometheus_client", "aiofiles"}


def _imported(*args: str) -> set[str]:
    """Top-level modules that `cachefs ARGS` imports."""
    code = (
        "import sys; from cachefs.cli import main; main(sys.argv[1:]);"
        "print('\\n' + ' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    ran = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    return set(ran.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("args", [("--help",), ("status",), ("ls", "/"), ("wait", "/")])
def test_questions_import_nothing_heavy(args: tuple[str, ...]) -> None:
    assert _imported(*args) & HEAVY == set()


def test_help_lists_every_verb(run: Run) -> None:
    ran = run("--help")
    assert ran.code == 0
    for name, verb in VERBS.items():
        assert name in ran.out
        assert verb.help in ran.out


@pytest.mark.parametrize("name", ["status", "ls", "wait", "flush"])
def test_a_verbs_own_help(run: Run, name: str) -> None:
    ran = run(name, "-h")
    assert ran.code == 0
    assert f"Usage: cachefs {name}" in ran.out
    assert "--json" in ran.out


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"cachefs {__version__}\n", "")


def test_no_arguments_show_the_help(run: Run) -> None:
    ran = run()
    assert ran.code == 2
    assert "Usage: cachefs" in ran.out
    assert ran.err == ""


def test_a_mistyped_verb(run: Run) -> None:
    ran = run("statsu")
    assert ran.code == 2
    assert ran.err == (
        "cachefs: No such command 'statsu'. Did you mean 'status'?; see `cachefs --help`\n"
    )


def _failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(command, "app", fail)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            ZeroDivisionError("a\nb"),
            "internal error: ZeroDivisionError: a b; set CACHEFS_DEBUG=1 to see where",
        ),
        (
            ValueError("\udcff"),
            "internal error: ValueError: \\udcff; set CACHEFS_DEBUG=1 to see where",
        ),
    ],
)
def test_any_failure_is_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    _failing(monkeypatch, error)
    assert run("status") == (1, "", f"cachefs: {line}\n")


def test_debugging_shows_where(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, ZeroDivisionError())
    monkeypatch.setenv("CACHEFS_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        command.main(["status"])


def test_a_reader_that_leaves_early(mounts: FakeMounts) -> None:
    """`cachefs --help | head -1` ends quietly."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cachefs", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(20) == 1


# ---- how values look ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 * 1024 - 1, "10.0 KiB"),
        (1023 * 1024, "1.00 MiB"),
        (64 << 20, "64.0 MiB"),
        (512 << 20, "512 MiB"),
        (1 << 30, "1.00 GiB"),
        (5 << 50, "5.00 PiB"),
        (5 << 60, "5120 PiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert output.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (10, "10 s"),
        (59.6, "1 min"),
        (125, "2 min 5 s"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


def test_names_that_print_as_they_are() -> None:
    assert output.printable("modèle [v2] .ckpt") == "modèle [v2] .ckpt"


def test_json_survives_any_name(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"name": "é\udcff"})
    assert json.loads(capsys.readouterr().out) == {"name": "é\udcff"}
