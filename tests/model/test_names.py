from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.model import names
from cachefs.model.order import EffectClass, EffectKind, OrderRules, classify, is_unordered


@pytest.mark.parametrize(
    ("prefix", "path", "directory", "key"),
    [
        ("", "a/b", False, "a/b"),
        ("", "/a/b", False, "a/b"),
        ("run/", "a", False, "run/a"),
        ("/run/x/", "a/b", True, "run/x/a/b/"),
        ("run", "", True, "run/"),
        ("", "", True, ""),
    ],
)
def test_keys(prefix: str, path: str, directory: bool, key: str) -> None:
    assert names.key_for(prefix, path, directory=directory) == key


def test_key_limit_counts_bytes() -> None:
    assert names.key_for("p", "é" * 511) == "p/" + "é" * 511
    for path in ("é" * 511 + "x", "x" * 1023):
        with pytest.raises(OSError, match="1024 bytes") as caught:
            names.key_for("p", path)
        assert caught.value.errno == errno.ENAMETOOLONG


def test_a_parent_is_not_renamed_beyond_the_limit_of_what_is_below() -> None:
    assert names.key_fits("x" * 1000, longest_below=23)
    assert not names.key_fits("x" * 1000, longest_below=24)


def test_names_are_utf8_of_at_most_255_bytes() -> None:
    assert names.decode_name("né".encode()) == "né"
    with pytest.raises(OSError, match="UTF-8") as caught:
        names.decode_name(b"\xff")
    assert caught.value.errno == errno.EILSEQ
    with pytest.raises(OSError, match="255") as caught:
        names.decode_name(b"x" * 256)
    assert caught.value.errno == errno.ENAMETOOLONG


def test_the_reserved_corner() -> None:
    for path in (".cachefs", ".cachefs/", "/.cachefs/id"):
        assert names.is_reserved(path)
    for path in (".cachefsx", "a/.cachefs", ""):
        assert not names.is_reserved(path)


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*.bin", "a/b/x.bin", True),
        ("*.bin", "a/x.bin/y", False),
        ("logs/**", "logs/a", True),
        ("logs/**", "run/logs/a/b", True),
        ("logs/**", "logs", False),
        ("logs/**", "xlogs/a", False),
        ("/logs/**", "run/logs/a", False),
        ("/logs/**", "logs/a", True),
        ("a/*/c", "x/a/b/c", True),
        ("a/*/c", "a/b/b/c", False),
        ("a/**/c", "a/c", True),
        ("a/**/c", "a/b/b/c", True),
        ("x[0-9]", "x5", True),
        ("x[!0-9]", "x5", False),
        ("x[!0-9]", "x/", False),
        ("x[", "x[", True),
        ("a.b", "axb", False),
        ("?", "/", False),
        ("step-<n>", "step-100", True),
        ("step-<n>", "step-100b", False),
        (".*.XXXXXX", ".model.bin.x8Kq2c", True),
        (".*.XXXXXX", ".model.bin.123456", True),
        (".*.XXXXXX", ".model.backup", False),
    ],
)
def test_patterns(pattern: str, path: str, matches: bool) -> None:
    assert names.matches((pattern,), path) == matches


@given(st.text(min_size=1, max_size=12), st.text(max_size=12))
def test_any_pattern_is_compiled_or_refused(pattern: str, path: str) -> None:
    try:
        names.check_pattern(pattern)
    except ValueError:
        return
    names.matches((pattern,), path)


@given(st.text("abc/*.", min_size=1, max_size=10).filter(lambda p: p.strip("/")))
def test_a_plain_path_matches_itself(path: str) -> None:
    literal = path.replace("*", "[*]").strip("/")
    assert names.matches((literal,), path.strip("/"))


@pytest.mark.parametrize(
    "path",
    [
        "a/model.safetensors.tmp",
        "tmp-checkpoint-500/model.bin",
        "run/epoch=3-unfinished",
        "ckpt/1000.orbax-checkpoint-tmp-17/params/d/x",
        "ckpt/1000/params.orbax-checkpoint-tmp",
        ".tmpAb12Cd",
        "x.incomplete",
        "ckpt/.model.bin.x8Kq2c",
        "tf/ckpt-3_temp/part-00000-of-00001.index",
        "tf/checkpoint.tmp0a1b2c3d4e5f",
        ".metadata.tmp",
    ],
)
def test_temporary_names(path: str) -> None:
    assert names.is_temp(names.TEMP_PATTERNS, path)


@pytest.mark.parametrize(
    "path",
    [
        "model.safetensors",
        "checkpoint-500/model.bin",
        "template.tmpl",
        ".metadata",
        ".hidden.backup",
        "tmpdir/x",
        "runs_temp/x",
        "latest",
        "x.parts",
    ],
)
def test_lasting_names(path: str) -> None:
    assert not names.is_temp(names.TEMP_PATTERNS, path)


RULES = OrderRules()


def klass(path: str, size: int = 100, new_key: bool = True, rules: OrderRules = RULES) -> str:
    name = path.rpartition("/")[2]
    return classify(
        rules, kind=EffectKind.PUBLISH, name=name, path=path, size=size, new_key=new_key
    )


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s/model-00001-of-00002.safetensors", "data"),
        ("s/pytorch_model.bin", "data"),
        ("s/__0_0.distcp", "data"),
        ("s/last.ckpt", "data"),
        ("s/x.zarr/0.0", "data"),
        ("tf/ckpt-1.data-00000-of-00001", "data"),
        ("o/1000/params/ocdbt.process_0/d/0123456789abcdef0123456789abcdef", "data"),
        ("s/config.json", "small"),
        ("s/model.safetensors.index.json", "barrier"),
        ("tf/ckpt-1.index", "barrier"),
        ("s/.metadata", "barrier"),
        ("latest", "barrier"),
        ("latest_checkpointed_iteration.txt", "barrier"),
        ("_SUCCESS", "barrier"),
        ("tf/checkpoint", "barrier"),
        ("o/1000/commit_success.txt", "barrier"),
        ("o/1000/_CHECKPOINT_METADATA", "barrier"),
        ("o/1000/params/manifest.ocdbt", "barrier"),
    ],
)
def test_classes_of_new_small_files(path: str, expected: str) -> None:
    assert klass(path) == expected


def test_size_and_history_decide_too() -> None:
    assert klass("s/blob", size=1 << 20) == "data"
    assert klass("latest.bin", size=1 << 40) == "barrier", "markers are markers at any size"
    assert klass("s/model.bin", new_key=False) == "barrier"
    assert klass("s/model.bin", rules=OrderRules(mode="strict")) == "barrier"


@pytest.mark.parametrize("kind", [EffectKind.UNPUBLISH, EffectKind.RELOCATE])
def test_deletes_and_moves_are_barriers(kind: EffectKind) -> None:
    found = classify(RULES, kind=kind, name="a.bin", path="a.bin", size=0, new_key=True)
    assert found is EffectClass.BARRIER


def test_symlinks_are_barriers() -> None:
    found = classify(
        RULES,
        kind=EffectKind.PUBLISH,
        name="last.ckpt",
        path="last.ckpt",
        size=9,
        new_key=True,
        symlink=True,
    )
    assert found is EffectClass.BARRIER


def test_logs_are_unordered_except_in_strict_mode() -> None:
    for path in ("run/logs/a", "x/events.out.tfevents.1"):
        assert is_unordered(RULES, path)
        assert not is_unordered(OrderRules(mode="strict"), path)
    assert not is_unordered(RULES, "run/model.bin")
