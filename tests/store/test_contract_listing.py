"""The contract of every store: listings."""

from __future__ import annotations

import pytest

from tests.store.conftest import Place

TREE = ("a", "a.b", "b/1", "b/2", "b/c/3", "b-x", "z/y/x/w", "z0", "é/f")


@pytest.fixture
def tree(place: Place) -> Place:
    """A place with a few nested objects."""
    for name in TREE:
        place.store.put(place.key(name), name.encode())
    return place


def test_everything_below_a_prefix(tree: Place) -> None:
    assert sorted(tree.names()) == sorted(TREE)


def test_one_level(tree: Place) -> None:
    assert sorted(tree.names(delimiter="/")) == ["a", "a.b", "b-x", "b/", "z/", "z0", "é/"]


@pytest.mark.parametrize(
    ("below", "objects", "prefixes"),
    [
        ("b/", ["b/1", "b/2"], ["b/c/"]),
        ("b", ["b-x"], ["b/"]),
        ("z/y", [], ["z/y/"]),
        ("z/y/x/", ["z/y/x/w"], []),
        ("a.", ["a.b"], []),
        ("nothing/here/", [], []),
        ("a/", [], []),
    ],
)
def test_below_a_longer_prefix(
    tree: Place, below: str, objects: list[str], prefixes: list[str]
) -> None:
    page = tree.store.list(tree.key(below), delimiter="/")
    assert [info.key for info in page.objects] == [tree.key(name) for name in objects]
    assert list(page.prefixes) == [tree.key(name) for name in prefixes]
    assert page.next_token is None


def test_a_prefix_is_gone_with_its_last_key(tree: Place) -> None:
    """A directory that was emptied by another program must not come back from the listing."""
    tree.store.delete([tree.key("z/y/x/w"), tree.key("b/c/3")])
    assert sorted(tree.names(delimiter="/")) == ["a", "a.b", "b-x", "b/", "z0", "é/"]
    assert tree.store.list(tree.key("b/"), delimiter="/").prefixes == ()


def test_sizes_and_times(tree: Place) -> None:
    for info in tree.store.list(tree.prefix).objects:
        assert info.size == len(info.key.removeprefix(tree.prefix).encode())
        assert info.mtime_ns > 0


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
@pytest.mark.parametrize("delimiter", [None, "/"])
def test_pages_join_to_the_whole(tree: Place, limit: int, delimiter: str | None) -> None:
    whole = tree.names(delimiter=delimiter)
    paged = tree.names(delimiter=delimiter, limit=limit)
    assert sorted(paged) == sorted(whole)
    assert len(set(paged)) == len(paged)


def test_many_objects(place: Place) -> None:
    names = [f"n{number:03}" for number in range(130)]
    for name in names:
        place.store.put(place.key(name), b"")
    assert place.names(limit=50) == names


def test_listing_goes_on_behind_what_was_deleted_meanwhile(tree: Place) -> None:
    first = tree.store.list(tree.prefix, limit=2)
    seen = [info.key for info in first.objects]
    tree.store.delete(seen)
    rest = tree.store.list(tree.prefix, token=first.next_token)
    assert {tree.key(name) for name in TREE} - set(seen) == {info.key for info in rest.objects}
