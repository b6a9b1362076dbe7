"""DiskTier: what is read is what was written, or nothing, whatever happens to the files."""

import errno
import itertools
import json
import logging
import os
import pathlib
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specax.paged import page_file
from specax.paged.disk_tier import STALE_SECONDS, DiskTier
from specax.paged.page_file import Content, Key

LARGE = 1 << 20
DTYPES = [np.float32, np.float16, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "tier"


@pytest.fixture
def tier(folder: pathlib.Path) -> Iterator[DiskTier]:
    tier = DiskTier(folder, "model", LARGE, page_size=4)
    yield tier
    tier.close()


def make_key(start: int, stop: int, seed: int = 0, namespace: page_file.Namespace = ()) -> Key:
    return Key(namespace, np.arange(seed, seed + stop, dtype=np.int32), start)


def make_pages(key: Key, seed: int = 0, absent: tuple[int, ...] = ()) -> list[tuple[np.ndarray, ...] | None]:
    """Keys and values, float32 [2, 1, 4, 3], for page size 4."""
    rng = np.random.default_rng(seed)
    pages = range(-(-key.stop // 4) - key.start // 4)
    return [
        None if i in absent else tuple(rng.normal(size=(2, 1, 4, 3)).astype(np.float32) for _ in "kv") for i in pages
    ]


def same(one: Content | None, other: Content | None) -> bool:
    """Bit for bit, with dtypes, shapes and absent pages."""
    if one is None or other is None:
        return one is other

    def plain(content: Content) -> list[Any]:
        return [[p and [(a.dtype, a.shape, a.tobytes()) for a in p] for p in group] for group in content]

    return plain(one) == plain(other)


def later(content: Any) -> Callable[[], Any]:
    return lambda: content


def reopen(tier: DiskTier, **changes: Any) -> DiskTier:
    tier.close()
    kept: dict[str, Any] = {
        "fingerprint": tier.fingerprint,
        "capacity_bytes": tier.capacity_bytes,
        "page_size": tier.page_size,
    }
    return DiskTier(tier.folder, **(kept | changes))


# What goes in comes out.


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_of_every_dtype_with_two_groups_and_absent_pages(tier: DiskTier, dtype: type, rng: Any) -> None:
    def page(*shape: int) -> tuple[np.ndarray, ...]:
        bits = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)  # NaNs and all
        return bits.view(dtype)[..., 0], rng.normal(size=(2, 1)).astype(np.float32).T  # not contiguous

    key = make_key(6, 19, namespace=(("adapter", "ä\ud800"), ("tenant", "")))  # pages 1 … 4
    content: Content = [[page(3, 4, 2) for _ in range(4)], [None, page(1, 4, 2), None, page(1, 4, 2)]]
    assert tier.write(key, content)
    back = tier.read(tier.name(key))
    assert back is not None and same(back, content)
    assert all(array.base is None and array.flags.writeable for p in back[0] for array in p or ())
    assert same(tier.submit_read(tier.name(key)).result(), content)
    nothing = make_key(0, 8, seed=1)
    assert tier.write(nothing, [[None, None], [None, None]])
    assert tier.read(tier.name(nothing)) == [[None, None], [None, None]]
    assert (tier.errors, tier.drain_evicted(), len(tier)) == (0, [], 2)


def test_the_file_is_as_documented(tier: DiskTier) -> None:
    """Parsed here by hand, from the table in page_file's docstring."""
    key = make_key(2, 9, namespace=(("adapter", "x"),))
    content = make_pages(key, absent=(1,))
    tier.write(key, [content])
    path = tier.folder / tier.name(key)
    raw = path.read_bytes()
    magic, version, header_bytes, tokens, header_crc = struct.unpack("<8sIIII", raw[:24])
    assert (magic, version, tokens) == (b"SPECAXKV", 1, 9)
    data = 24 + header_bytes + 4 * tokens
    assert json.loads(raw[24 : 24 + header_bytes]) == {
        "fingerprint": "model", "namespace": [["adapter", "x"]], "page_size": 4, "start": 2,
        "groups": [{"arrays": [["float32", [2, 1, 4, 3]]] * 2, "present": "101"}],
    }  # fmt: skip
    assert raw[24 + header_bytes : data] == key.tokens.astype("<i4").tobytes()
    assert raw[data:-4] == b"".join(a.tobytes() for page in content if page for a in page)
    assert header_crc == zlib.crc32(raw[:20] + raw[24:data])
    assert struct.unpack("<I", raw[-4:])[0] == zlib.crc32(raw[:20] + raw[24:-4])
    assert tier.num_bytes == len(raw)
    assert path.stat().st_mode & 0o777 == 0o600 and tier.folder.stat().st_mode & 0o777 == 0o700


def test_names_differ_in_everything_that_the_kv_depends_on(tmp_path: pathlib.Path) -> None:
    names = set()
    tiers = [DiskTier(tmp_path, fingerprint, 1, size) for fingerprint in ("a", "b") for size in (4, 8)]
    spaces: list[page_file.Namespace] = [(), (("a", "b"),), (("b", "a"),), (("a", "b"), ("", "")), (('a", "b', ""),)]
    keys = [make_key(*span, seed, space) for span in ((0, 4), (1, 4), (0, 5)) for seed in (0, 1) for space in spaces]
    for one, key in itertools.product(tiers, keys):
        names.add(one.name(key))
    assert len(names) == len(tiers) * len(keys)
    strided = Key((), np.arange(8, dtype=np.int32)[::2], 0)
    assert tiers[0].name(strided) == tiers[0].name(Key((), strided.tokens.copy(), 0))


def test_reads_wait_for_a_write_under_way_and_writes_do_not_wait_for_content(tier: DiskTier) -> None:
    key, arrived = make_key(0, 4), threading.Event()
    content = [make_pages(key)]

    def provider() -> Content:
        assert arrived.wait(10)
        return content

    name = tier.submit_write(key, provider)
    assert name in tier and tier.num_bytes == 0
    reading = tier.submit_read(name)
    assert not reading.done()
    arrived.set()
    assert same(reading.result(10), content)


def test_removal_follows_a_write_under_way(tier: DiskTier) -> None:
    key = make_key(0, 4)
    name = tier.submit_write(key, lambda: [make_pages(key)])
    tier.remove(name)
    assert name not in tier
    tier.flush()
    assert list(tier.folder.iterdir()) == [] and (tier.num_bytes, tier.drain_evicted()) == (0, [])
    assert tier.write(key, [make_pages(key)])
    tier.remove(name)
    tier.remove(name)  # a second time: nothing happens
    tier.flush()
    assert list(tier.folder.iterdir()) == [] and tier.num_bytes == tier.errors == 0


# Start-up.


def test_scan_gives_prefixes_first_and_reads_no_pages(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    space = (("adapter", "x"),)
    keys = [make_key(*span, namespace=space) for span in ((7, 9), (0, 4), (9, 20), (4, 7))]
    contents = [[make_pages(key, seed, absent=(0,) if key.start == 9 else ())] for seed, key in enumerate(keys)]
    for key, content in zip(keys, contents):
        tier.write(key, content)
    again = reopen(tier)
    with monkeypatch.context() as patch:
        patch.setattr(page_file, "read_content", lambda *_: pytest.fail("pages were read"))
        entries = list(again.scan())
    assert [(e.start, len(e.tokens)) for e in entries] == [(0, 4), (4, 7), (7, 9), (9, 20)]
    assert again.num_bytes == tier.num_bytes == sum(e.num_bytes for e in entries)
    for entry in entries:
        i = [key.start for key in keys].index(entry.start)
        assert entry.namespace == space and entry.tokens.tolist() == keys[i].tokens.tolist()
        assert entry.name == tier.name(keys[i])
        assert entry.num_bytes == (tier.folder / entry.name).stat().st_size
        assert entry.present == (tuple(page is not None for page in contents[i][0]),)
        assert same(again.read(entry.name), contents[i])
    again.close()


def test_after_a_restart_what_was_used_last_goes_last_and_leaves_go_before_their_prefixes(tier: DiskTier) -> None:
    chains = {seed: [make_key(0, 4, seed), make_key(4, 8, seed), make_key(8, 12, seed)] for seed in (0, 100, 200)}
    for i, key in enumerate(key for chain in chains.values() for key in chain):  # prefixes are the oldest
        tier.write(key, [make_pages(key)])
        os.utime(tier.folder / tier.name(key), (1000 + i, 1000 + i))
    assert tier.read(tier.name(chains[0][1])) is not None  # a use of the first chain's first two
    again = reopen(tier, capacity_bytes=tier.num_bytes)
    assert len(list(again.scan())) == 9
    order = [chains[0][2], *chains[100][::-1], *chains[200][::-1], chains[0][1], chains[0][0]]
    for seed, victim in enumerate(order):
        key = Key(victim.namespace, victim.tokens + np.int32(1000 + seed), victim.start)
        assert again.write(key, [make_pages(key)])
        assert again.drain_evicted()[:1] == [again.name(victim)]
    again.close()


def test_other_models_files_and_foreign_files_are_left_alone(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    key = make_key(0, 8)
    content = [make_pages(key)]
    tier.write(key, content)
    name = tier.name(key)
    foreign = {"0" * 32 + page_file.SUFFIX: b"not ours at all", "notes.txt": b"", "x.partial": b""}
    newer = (tier.folder / name).read_bytes()
    foreign["1" * 32 + page_file.SUFFIX] = newer[:8] + struct.pack("<I", 2) + newer[12:]
    foreign["2" * 32 + page_file.SUFFIX] = newer  # renamed
    for file, data in foreign.items():
        (tier.folder / file).write_bytes(data)
    for changes, reason in (
        ({"fingerprint": "other"}, "another fingerprint"),
        ({"page_size": 2}, "page size is 4, not 2"),
        ({}, "renamed"),
    ):
        caplog.clear()
        usual: dict[str, Any] = {"fingerprint": "model", "capacity_bytes": LARGE, "page_size": 4}
        one = DiskTier(tier.folder, **(usual | changes))
        assert [e.name for e in one.scan()] == ([] if changes else [name])
        for said in (reason, "not a KV page file", "format version 2, not 1"):
            assert said in caplog.text
        if changes:
            assert one.read(name) is None and one.drain_evicted() == [name]
            assert one.name(key) != name
        for file in ("0" * 32 + page_file.SUFFIX, "2" * 32 + page_file.SUFFIX):
            assert one.read(file) is None
        one.close()
    assert {f.name: f.read_bytes() for f in tier.folder.iterdir()} == foreign | {name: newer}
    assert same(tier.read(name), content)


def test_a_foreign_file_is_not_overwritten(tier: DiskTier) -> None:
    key = make_key(0, 4)
    path = tier.folder / tier.name(key)
    path.write_bytes(b"someone's thesis")
    assert not tier.write(key, [make_pages(key)])
    assert path.read_bytes() == b"someone's thesis" and [f.name for f in tier.folder.iterdir()] == [path.name]
    assert (tier.errors, tier.drain_evicted(), tier.num_bytes) == (1, [path.name], 0)


def test_what_a_dead_process_left_half_written_is_deleted_once_it_is_old(tier: DiskTier) -> None:
    name = tier.name(make_key(0, 4))
    young, old = (tier.folder / f"{name}.{i}.partial" for i in ("young", "old"))
    for path in (young, old):
        path.write_bytes(page_file.MAGIC + b"\1")
    foreign = tier.folder / f"{name}.x.partial"
    foreign.write_bytes(b"not ours")
    past = old.stat().st_mtime - STALE_SECONDS - 1
    for path in (old, foreign):
        os.utime(path, (past, past))
    assert list(tier.scan()) == []
    assert sorted(tier.folder.iterdir()) == sorted([young, foreign])


# Damage.


def expect_nothing(tier: DiskTier, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged file: one warning, no exception, no content, and the name is reported."""
    caplog.clear()
    assert tier.read(name) is None
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING
    assert tier.drain_evicted() == [name] and name not in tier and tier.num_bytes == 0


@pytest.mark.parametrize("from_scan", [False, True])
@pytest.mark.parametrize("damage", ["cut", "flip", "longer"])
def test_every_damage_is_noticed(
    tier: DiskTier, caplog: pytest.LogCaptureFixture, damage: str, from_scan: bool
) -> None:
    key = make_key(2, 6, namespace=(("a", "b"),))
    small: Content = [[(np.arange(4, dtype=np.int8), np.ones(2, ml_dtypes.bfloat16)), None], [None, None]]
    tier.write(key, small)
    name = tier.name(key)
    path = tier.folder / name
    good = path.read_bytes()
    assert len(good) < 300
    for i in range(1 if damage == "longer" else len(good)):
        bad = {
            "cut": good[:i],
            "flip": good[:i] + bytes([good[i] ^ (1 << i % 8)]) + good[i + 1 :],
            "longer": good + b"\0",
        }
        path.write_bytes(bad[damage])
        one = DiskTier(tier.folder, "model", LARGE, 4) if from_scan else tier
        caplog.clear()
        entries = list(one.scan()) if from_scan else []
        assert not from_scan or len(caplog.records) + len(entries) == 1  # (damaged pages are found by reading only)
        if entries or not from_scan:
            expect_nothing(one, name, caplog)
        assert (name not in one, one.num_bytes, one.drain_evicted()) == (True, 0, [])
        assert path.exists() == (damage == "flip" and i < 12)  # another magic or version: perhaps someone else's
        if damage == "flip" and i < 8:
            path.unlink()  # it would not be overwritten
    assert tier.write(key, small) and same(tier.read(name), small)


@pytest.mark.parametrize(
    "fields",
    [
        [], 3, {}, {"groups": 1}, {"start": -1}, {"start": 4}, {"start": 1e999}, {"page_size": 0},
        {"namespace": [["a"]]},
        {"groups": [{"arrays": [["float32", [2**62, 2**62]]], "present": "1"}]},
        {"groups": [{"arrays": [["float32", [-1, -4]]], "present": "1"}]},
        {"groups": [{"arrays": [["object", [4]]], "present": "1"}]},
        {"groups": [{"arrays": [["int8", [16] + [1] * 99]], "present": "1"}]},
        {"groups": [{"arrays": [], "present": "1" * 1000}]},
    ],
    ids=str,
)  # fmt: skip
def test_hostile_headers_with_right_checksums_are_refused(
    tier: DiskTier, caplog: pytest.LogCaptureFixture, fields: Any
) -> None:
    key = make_key(0, 4)
    name = tier.name(key)
    if isinstance(fields, dict) and fields:
        fields = {"fingerprint": "model", "namespace": [], "page_size": 4, "start": 0, "groups": []} | fields
    raw, tokens = json.dumps(fields).encode(), key.tokens.tobytes()
    prefix = struct.pack("<8sIII", b"SPECAXKV", 1, len(raw), 4)
    crc = zlib.crc32(prefix + raw + tokens)
    (tier.folder / name).write_bytes(prefix + struct.pack("<I", crc) + raw + tokens + bytes(16) + bytes(4))
    assert tier.read(name) is None
    assert "malformed header" in caplog.text or "cut off" in caplog.text
    for deep in (b"[" * 100_000, b"\xff"):
        crc = zlib.crc32(prefix := struct.pack("<8sIII", b"SPECAXKV", 1, len(deep), 0))
        (tier.folder / name).write_bytes(prefix + struct.pack("<I", zlib.crc32(deep, crc)) + deep + bytes(4))
        assert list(tier.scan()) == [] and "malformed" in caplog.text
    for header_bytes, num_tokens in ((2, 2**32 - 1), (2**32 - 1, 0), (page_file.MAX_HEADER_BYTES + 1, 0)):
        with open(tier.folder / name, "wb") as file:
            file.write(struct.pack("<8sIII", b"SPECAXKV", 1, header_bytes, num_tokens))
            file.truncate(2 * page_file.MAX_HEADER_BYTES)
        caplog.clear()
        assert tier.read(name) is None and not (tier.folder / name).exists()
        assert "cut off, or a corrupt header" in caplog.text  # said before anything is allocated


# A disk that fails, or is full.


def test_a_full_disk_costs_one_warning_and_the_files(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = make_key(0, 8)
    tier.write(kept, [make_pages(kept)])

    def fill(file: BinaryIO, header: page_file.Header, content: Content) -> None:
        file.write(header.encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(page_file, "write", fill)
        names = [
            tier.submit_write(key, lambda: [make_pages(kept)[:1]]) for key in (make_key(0, 4, s) for s in (1, 2, 3))
        ]
        tier.flush()
    assert tier.errors == 3 and len(caplog.records) == 1 and "No space left" in caplog.text
    assert tier.drain_evicted() == names and not any(name in tier for name in names)
    assert [file.name for file in tier.folder.iterdir()] == [tier.name(kept)]  # no half files
    assert tier.num_bytes == (tier.folder / tier.name(kept)).stat().st_size
    assert tier.read(tier.name(kept)) is not None
    assert tier.write(make_key(0, 4, 1), [make_pages(make_key(0, 4, 1))])  # there is room again


def test_content_that_never_comes_or_does_not_fit_is_counted_in_the_background_and_raised_to_a_direct_caller(
    tier: DiskTier,
) -> None:
    key = make_key(0, 8)
    page = (np.zeros(4, np.float32),)
    wrong: list[tuple[Any, str]] = [
        ([[page]], "has 1 pages; .* take 2"),
        ([[page, (np.zeros(5, np.float32),)]], "pages of group 0 differ"),
        ([[page, (np.zeros(4, np.int8),)]], "pages of group 0 differ"),
        ([[(np.zeros(4, ">f4"),)] * 2], "group 0 holds dtype.'>f4'"),
        ([[(np.zeros(4, object),)] * 2], "holds dtype.'O'"),
        ([[(np.zeros((4, 0), np.int8),)] * 2], "no empty arrays"),
    ]
    for content, message in wrong:
        with pytest.raises(ValueError, match=message):
            tier.write(key, content)
        tier.submit_write(key, later(content))
    tier.submit_write(key, lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    tier.flush()
    assert tier.errors == len(wrong) + 1 and list(tier.folder.iterdir()) == []
    assert tier.drain_evicted() == [tier.name(key)]


def test_a_failed_replacement_takes_the_old_file_with_it(tier: DiskTier) -> None:
    key = make_key(0, 4)
    tier.write(key, [make_pages(key)])
    tier.submit_write(key, list)  # fine: no groups
    tier.flush()
    assert tier.read(tier.name(key)) == []
    tier.submit_write(key, lambda: [[]])
    tier.flush()
    assert tier.drain_evicted() == [tier.name(key)] and list(tier.folder.iterdir()) == [] and tier.num_bytes == 0


def test_the_queue_is_bounded(folder: pathlib.Path) -> None:
    tier, start = DiskTier(folder, "model", LARGE, 4, max_pending_writes=2), threading.Event()
    keys = [make_key(0, 4, seed) for seed in range(3)]

    def provider() -> Content:
        assert start.wait(10)
        return [make_pages(keys[0])]

    names = [tier.submit_write(key, provider) for key in keys]
    assert tier.drain_evicted() == names[2:] and tier.errors == 1
    start.set()
    tier.flush()
    assert [name in tier for name in names] == [True, True, False]
    assert tier.write(keys[2], [make_pages(keys[2])])
    tier.close()
    tier.close()


def test_wrong_settings_and_names_are_errors(folder: pathlib.Path, tier: DiskTier) -> None:
    with pytest.raises(ValueError, match="capacity_bytes is -1"):
        DiskTier(folder, "", -1, 4)
    with pytest.raises(ValueError, match="page size is 0"):
        DiskTier(folder, "", 1, 0)
    for name in ("../secret", "", "0" * 32, "0" * 32 + page_file.SUFFIX + ".x"):
        with pytest.raises(ValueError, match="is not a name"):
            tier.read(name)
        with pytest.raises(ValueError, match="is not a name"):
            tier.submit_read(name)
    with pytest.raises(ValueError, match=r"tokens are int64 \(3,\); give int32"):
        Key((), np.arange(3), 0)
    with pytest.raises(ValueError, match="start is 3; it must lie in 0 … 2"):
        make_key(3, 3)


# Capacity, order and companions.


def test_a_smaller_capacity_after_a_restart_evicts_before_anything_is_taken_over(tier: DiskTier) -> None:
    path = [make_key(4 * i, 4 * i + 4) for i in range(4)]
    for key in path:
        tier.write(key, [make_pages(key)])
    again = reopen(tier, capacity_bytes=tier.num_bytes - 1)
    assert [entry.start for entry in again.scan()] == [0, 4, 8]
    assert again.drain_evicted() == [tier.name(path[3])] and not (tier.folder / tier.name(path[3])).exists()
    again.close()


def test_every_kind_of_use_counts(tier: DiskTier) -> None:
    keys = [make_key(0, 4, seed) for seed in range(5)]
    names = [tier.name(key) for key in keys]
    for key in keys:
        tier.write(key, [make_pages(key)])
    tier.read(names[0])
    tier.submit_read(names[1]).result()
    tier.write(keys[2], [make_pages(keys[2])])
    tier.touch(names[3])
    tier.capacity_bytes = tier.num_bytes
    evicted = []
    for seed in (4, 0, 1, 2, 3):
        other = make_key(0, 4, 100 + seed)
        tier.write(other, [make_pages(other)])
        evicted += tier.drain_evicted()
    assert evicted == [names[seed] for seed in (4, 0, 1, 2, 3)]


def test_what_waits_to_be_written_is_not_evicted(tier: DiskTier) -> None:
    old, one, two = (make_key(0, 4, seed) for seed in range(3))
    tier.write(old, [make_pages(old)])
    tier.capacity_bytes = tier.num_bytes + 50  # of these files one fits
    queued, started, gate = (threading.Event() for _ in range(3))

    def first() -> Content:
        assert queued.wait(10)
        return [make_pages(one)]

    def second() -> Content:
        started.set()
        assert gate.wait(10)
        return [make_pages(two)]

    tier.submit_write(one, first)
    tier.submit_write(two, second)
    tier.touch(tier.name(old))  # the most recent, yet the only one that can go
    queued.set()
    assert started.wait(10)  # the first is there, the second is not
    assert tier.drain_evicted() == [tier.name(old)] and tier.name(one) in tier and tier.name(two) in tier
    gate.set()
    tier.flush()
    assert tier.drain_evicted() == [tier.name(one)] and tier.name(two) in tier and len(tier) == 1


def test_a_loss_is_not_reported_once_the_file_is_to_be_written_again(tier: DiskTier) -> None:
    key, gate = make_key(0, 4), threading.Event()
    content, name = [make_pages(key)], tier.name(key)

    def fail() -> Content:
        assert gate.wait(10)
        raise RuntimeError("the device went away")

    tier.write(key, content)
    (tier.folder / name).unlink()
    assert tier.read(name) is None
    tier.submit_write(key, fail)
    assert tier.drain_evicted() == []
    tier.submit_write(key, later(content))
    gate.set()
    tier.flush()
    assert tier.drain_evicted() == [] and same(tier.read(name), content) and tier.errors == 1


def test_a_file_larger_than_the_capacity_is_not_written(folder: pathlib.Path) -> None:
    tier = DiskTier(folder, "model", 600, 4)
    small, large = make_key(0, 4), make_key(0, 40, 1)
    assert tier.write(small, [make_pages(small)])
    assert not tier.write(large, [make_pages(large)])
    assert tier.drain_evicted() == [tier.name(large)] and tier.name(small) in tier  # nothing was evicted for it
    tier.close()


def test_a_path_touched_deepest_first_is_evicted_leaves_first(folder: pathlib.Path) -> None:
    path = [make_key(4 * i, 4 * i + 4) for i in range(5)]
    tier = DiskTier(folder, "model", LARGE, 4)
    for i, key in enumerate(path):
        tier.submit_write(key, later([make_pages(key)]))
        for above in reversed(path[: i + 1]):  # at once, while the write is still under way
            tier.touch(tier.name(above))
    tier.flush()
    tier.capacity_bytes = tier.num_bytes
    evicted = []
    for seed in range(5):
        other = Key((), path[0].tokens + np.int32(100 + seed), 0)
        tier.write(other, [make_pages(other)])
        evicted += tier.drain_evicted()
    names = [tier.name(key) for key in path[::-1]]
    assert evicted and evicted == names[: len(evicted)]
    tier.close()


def test_two_processes_share_a_folder(folder: pathlib.Path) -> None:
    one, two = (DiskTier(folder, "model", LARGE, 4) for _ in range(2))
    keys = [make_key(0, 4, seed) for seed in range(20)]
    contents = [[make_pages(key, seed)] for seed, key in enumerate(keys)]
    for tier in (one, two):  # both write the same files at the same time
        for key, content in zip(keys, contents):
            tier.submit_write(key, later(content))
    for key, content in zip(keys, contents):
        assert same(two.read(two.name(key)), content)
    one.flush()
    two.flush()
    assert len(list(folder.iterdir())) == 20 and one.errors == two.errors == 0
    gone = one.name(keys[0])
    one.remove(gone)
    one.flush()
    assert two.read(gone) is None and two.drain_evicted() == [gone] and two.errors == 0  # taken by another: no error
    extra = make_key(0, 4, 99)
    one.write(extra, [make_pages(extra)])
    assert same(two.read(two.name(extra)), [make_pages(extra)])  # found by its name alone
    for tier in (one, two):
        tier.close()


class DiskMemory(RuleBasedStateMachine):
    """A small tier beside name → content in order of use, with the files' own sizes; restarts and damage included."""

    @initialize(capacity=st.integers(0, 6), files=st.integers(0, 4))
    def start(self, capacity: int, files: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.capacity = capacity * 300
        self.tier = DiskTier(self.folder.name, "model", self.capacity, 4)
        self.model: dict[str, tuple[Content, int]] = {}  # content, bytes; least recently used first
        self.keys: dict[str, Key] = {}
        for i in range(files):
            self.put(make_key(0, i + 1), i)

    def forget(self, *names: str) -> None:
        for name in names:
            del self.model[name]

    def pick(self, number: int) -> str:
        return sorted(self.model)[number % len(self.model)]

    def use(self, name: str) -> None:
        self.model[name] = self.model.pop(name)

    @rule(start=st.integers(0, 3), length=st.integers(1, 4), seed=st.integers(0, 1), pages=st.integers(0, 3))
    def write(self, start: int, length: int, seed: int, pages: int) -> None:
        self.put(make_key(start, start + length, seed), pages)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99), pages=st.integers(0, 3))
    def replace(self, number: int, pages: int) -> None:
        self.put(self.keys[self.pick(number)], pages)

    def put(self, key: Key, pages: int) -> None:
        content = [[p if i < pages else None for i, p in enumerate(make_pages(key, pages))]]
        with tempfile.TemporaryFile() as file:
            page_file.write(file, page_file.describe("model", 4, key, content), content)
            size = file.tell()
        name = self.tier.name(key)
        self.keys[name] = key
        self.model.pop(name, None)
        assert self.tier.write(key, content) == (size <= self.capacity)
        expected = [] if size <= self.capacity else [name]
        if size <= self.capacity:
            while sum(n for _, n in self.model.values()) + size > self.capacity:
                expected.append(next(iter(self.model)))
                self.forget(expected[-1])
            self.model[name] = content, size
        assert self.tier.drain_evicted() == expected

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99))
    def read(self, number: int) -> None:
        name = self.pick(number)
        assert same(self.tier.read(name), self.model[name][0])
        self.use(name)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99))
    def touch(self, number: int) -> None:
        self.tier.touch(self.pick(number))
        self.use(self.pick(number))

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99))
    def remove(self, number: int) -> None:
        name = self.pick(number)
        self.tier.remove(name)
        self.forget(name)
        self.tier.flush()
        assert self.tier.read(name) is None and self.tier.drain_evicted() == [name]

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 99), where=st.integers(0, 9999))
    def damage(self, number: int, where: int) -> None:
        name = self.pick(number)
        path = self.tier.folder / name
        data = bytearray(path.read_bytes())
        data[12 + where % (len(data) - 12)] ^= 255
        path.write_bytes(data)
        assert self.tier.read(name) is None and self.tier.drain_evicted() == [name]
        self.forget(name)

    @rule()
    def restart(self) -> None:
        self.tier = reopen(self.tier)
        names = [entry.name for entry in self.tier.scan()]
        assert sorted(names) == sorted(self.model)
        for name in reversed(names):  # as an owner does
            self.tier.touch(name)
            self.use(name)

    @invariant()
    def books_agree_with_the_folder(self) -> None:
        self.tier.flush()
        files = {path.name: path.stat().st_size for path in self.tier.folder.iterdir()}
        assert files == {name: size for name, (_, size) in self.model.items()}
        assert self.tier.num_bytes == sum(files.values()) <= self.capacity
        assert len(self.tier) == len(files) and all(name in self.tier for name in files)

    def teardown(self) -> None:
        self.tier.close()
        self.folder.cleanup()


TestDiskMemory = DiskMemory.TestCase
TestDiskMemory.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
