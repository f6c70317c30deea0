"""Where blocks lie: against hand-computed sequences and naive twins that keep plain lists."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine.allocators import OPTIONS, Blocks, Planned, Pool, make_allocator
from sim.engine.allocators.caching import KIB, MIB, Caching
from sim.errors import IllegalPlan, ProfileError
from sim.hardware.platform import Allocator, Tier


def tier(name: str, capacity: int = 64 * MIB, **options: int | str | bool) -> Tier:
    allocator = Allocator(name, tuple(options.items()))
    return Tier("hbm", capacity, capacity, 10**12, allocator=allocator)


# ---- choosing one ------------------------------------------------------------------------------


def test_exact_has_no_allocator_object():
    assert make_allocator(tier("exact")) is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cashing", {}, r"tier 'hbm': allocator: 'cashing' is unknown \(did you mean 'caching'\?\)"),
        ("pool", {"fits": "best"}, r"option 'fits' is unknown \(did you mean 'fit'\?\)"),
        ("pool", {"fit": "worst"}, "'worst' is neither 'first' nor 'best'"),
        ("pool", {"ends": 3}, "ends: 3 is neither 1 nor 2"),
        ("pool", {"ends": True}, "ends: True is not of type int"),
        ("pool", {"classes": "1,x"}, "classes: '1,x'"),
        ("pool", {"classes": "0,8"}, "classes: 0 is less than 1"),
        ("planned", {"rounding": 0}, "rounding: 0 is less than 1"),
        ("caching", {"max_split_size": MIB}, "max_split_size: 1048576 is not above 20971520"),
        ("caching", {"max_split_size": 32 * MIB, "expandable_segments": True}, "no effect with expandable"),
    ],
)
def test_a_wrong_option_is_named(name, options, message):
    with pytest.raises(ProfileError, match=message):
        make_allocator(tier(name, **options))


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"exact"}))
def test_zero_bytes_are_legal_even_in_a_full_tier(name):
    blocks = make_allocator(tier(name, 2 * MIB))
    full = blocks.take(1 * MIB)
    while blocks.take(1 * MIB) is not None:
        pass
    used = blocks.used
    assert blocks.fits(0)
    assert blocks.would_fit_after((), 0)
    empty = blocks.take(0)
    assert (blocks.size(empty), blocks.neighbours(empty), blocks.used) == (0, (0, 0), used)
    blocks.give(empty)
    blocks.give(full)
    assert blocks.used == used - 1 * MIB
    with pytest.raises(KeyError):
        blocks.give(empty)


# ---- caching: sequences worked out by hand ------------------------------------------------------


def test_reserved_passes_allocated_by_what_the_segments_leave_over():
    blocks = Caching(256 * MIB)
    blocks.take(100)  # 512 B of a 2 MiB segment
    blocks.take(1 * MIB)  # of the same segment
    blocks.take(1 * MIB)  # does not fit beside the two: a second one
    blocks.take(3 * MIB)  # of a 20 MiB segment
    blocks.take(11 * MIB)  # of the same: the 17 MiB left serve it before a new segment
    blocks.take(11 * MIB)  # a segment of its own, 12 MiB; 1 MiB over is not more than 1 MiB: not split
    assert blocks.reserved == (2 + 2 + 20 + 12) * MIB
    assert blocks.used == 512 + (1 + 1 + 3 + 11 + 12) * MIB
    assert blocks.reserved - blocks.used == 8 * MIB - 512


def test_a_remainder_of_more_than_1_mib_is_split_off_and_serves_the_next_request():
    blocks = Caching(20 * MIB)
    first = blocks.take(9 * MIB)
    assert blocks.size(first) == 9 * MIB
    second = blocks.take(10 * MIB)  # 11 MiB left: 1 MiB over stays with the block
    assert blocks.size(second) == 11 * MIB
    assert (blocks.used, blocks.reserved) == (20 * MIB, 20 * MIB)


def test_splitting_decides_an_out_of_memory():
    """The rest of a block serves another request only where it has more than 1 MiB."""
    split, whole = Caching(20 * MIB), Caching(20 * MIB)
    assert split.size(split.take(19 * MIB - 512)) == 19 * MIB - 512
    assert whole.size(whole.take(19 * MIB)) == 20 * MIB
    assert split.take(1 * MIB + 512) is not None
    assert whole.take(1 * MIB + 512) is None


def test_a_survivor_in_a_segment_decides_an_out_of_memory():
    """30 of 40 MiB are free; 21 of them cannot be had, because one block holds a segment of 20."""
    blocks = Caching(40 * MIB)
    a, b = blocks.take(11 * MIB), blocks.take(9 * MIB)  # 12 MiB of its own, and a 20 MiB segment
    blocks.give(a)  # 12 MiB cached
    c = blocks.take(1 * MIB + 512)  # best fit: in the 11 MiB left above b, not in the 12 MiB
    assert blocks.neighbours(b) == (0, 0)
    assert blocks.neighbours(c) == (0, 10 * MIB - 512)
    assert blocks.reserved == 32 * MIB
    assert blocks.take(21 * MIB) is None
    assert blocks.reserved == 20 * MIB  # it emptied the cache in trying
    assert blocks.take(20 * MIB) is not None


def test_blocks_merge_with_free_neighbours_on_both_sides():
    blocks = Caching(20 * MIB)
    a, b, c = (blocks.take(6 * MIB) for _ in range(3))
    blocks.give(a)
    blocks.give(c)
    assert blocks.neighbours(b) == (6 * MIB, 8 * MIB)
    assert not blocks.fits(9 * MIB)
    assert blocks.would_fit_after([b], 20 * MIB)
    blocks.give(b)
    assert blocks.largest_hole() == 20 * MIB


def test_small_and_large_requests_never_share_a_segment():
    blocks = Caching(22 * MIB)
    small, large = blocks.take(512), blocks.take(2 * MIB)
    assert blocks.reserved == 22 * MIB
    assert blocks.take(1 * MIB) is not None
    assert blocks.take(1 * MIB) is None  # 18 MiB are free, in a segment of the other pool
    blocks.give(large)
    assert blocks.take(1 * MIB) is not None  # the whole segment goes back first
    assert blocks.reserved == 4 * MIB
    assert blocks.size(small) == 512


def test_the_best_fit_goes_to_the_smallest_block_then_the_lowest():
    blocks = Caching(256 * MIB)
    thirty, forty, again = blocks.take(30 * MIB), blocks.take(40 * MIB), blocks.take(30 * MIB)
    low = blocks.address(thirty)
    for handle in (again, forty, thirty):
        blocks.give(handle)
    assert blocks.address(blocks.take(29 * MIB)) == low


def test_blocks_above_the_split_limit_stay_whole_and_go_back_first():
    blocks = Caching(200 * MIB, max_split_size=64 * MIB)
    big = blocks.take(100 * MIB)
    blocks.give(big)
    tenth = blocks.take(10 * MIB)  # not from the 100 MiB block
    assert blocks.reserved == 110 * MIB
    assert blocks.size(tenth) == 10 * MIB
    assert blocks.size(blocks.take(81 * MIB)) == 100 * MIB  # within 20 MiB below
    blocks = Caching(200 * MIB, max_split_size=64 * MIB)
    blocks.give(blocks.take(100 * MIB))
    assert blocks.size(blocks.take(80 * MIB)) == 80 * MIB  # 20 MiB below is one too many
    small = Caching(130 * MIB, max_split_size=64 * MIB)
    kept, gone = small.take(20 * MIB), small.take(100 * MIB)
    small.give(kept)
    small.give(gone)
    assert small.take(30 * MIB) is not None
    assert small.reserved == 50 * MIB  # only the oversize block went; the 20 MiB one is still cached


def test_expandable_segments_grow_a_block_in_place():
    plain, grown = Caching(60 * MIB), Caching(60 * MIB, expandable_segments=True)
    for blocks in (plain, grown):
        handle = blocks.take(18 * MIB)
        blocks.take(2 * MIB)
        blocks.give(handle)
    assert (plain.reserved, grown.reserved) == (38 * MIB, 20 * MIB)
    last = grown.take(40 * MIB)  # behind the 2 MiB: two more steps
    assert (grown.reserved, grown.address(last) % (20 * MIB)) == (60 * MIB, 0)
    assert grown.largest_hole() == 18 * MIB
    grown.give(last)
    assert grown.fits(512)  # small pool: needs a step of 2 MiB, so a free large one goes
    assert grown.take(512) is not None
    assert grown.reserved == 22 * MIB


def test_an_expandable_block_that_can_grow_is_spared():
    """Best fit would take the 2 MiB at the mapped end; the hole of 15 MiB, which cannot grow, goes first."""
    blocks = Caching(60 * MIB, expandable_segments=True)
    hole = blocks.take(15 * MIB)
    last = blocks.take(3 * MIB)
    low = blocks.address(hole)
    blocks.give(hole)
    assert blocks.neighbours(last) == (15 * MIB, 2 * MIB)
    assert blocks.address(blocks.take(3 * MIB // 2)) == low


def test_the_lowest_expandable_range_decides_even_where_a_higher_one_needs_less():
    blocks = Caching(100 * MIB, expandable_segments=True)
    blocks.take(39 * MIB // 2)
    middle = blocks.take(75 * MIB)
    blocks.take(3 * MIB // 2)  # ends at 96 MiB: 4 MiB of its step are free, 0.5 MiB of the first one's
    blocks.give(middle)
    for _ in range(24):
        assert blocks.take(1 * MIB) is not None
    # 100 - 40 - 24 MiB leave one step of 20 MiB
    assert blocks.largest_hole() == 41 * MIB // 2
    assert (blocks.fits(41 * MIB // 2), blocks.fits(24 * MIB)) == (True, False)
    assert blocks.take(24 * MIB) is None


def test_segments_that_would_be_empty_count_as_room():
    blocks = Caching(40 * MIB)
    a, b = blocks.take(20 * MIB), blocks.take(20 * MIB)
    assert not blocks.fits(512)
    assert blocks.would_fit_after([a], 512)
    assert not blocks.would_fit_after([a], 30 * MIB)
    assert blocks.would_fit_after([a, b], 40 * MIB)


# ---- caching: naive twins ----------------------------------------------------------------------


class NaiveCaching:
    """Lists of segments, searched from end to end."""

    def __init__(self, capacity: int, max_split: int = 0) -> None:
        self.capacity, self.max_split = capacity, max_split or 1 << 60
        self.segments: list[dict] = []
        self.next = 0

    @property
    def reserved(self) -> int:
        return sum(s["size"] for s in self.segments)

    @property
    def used(self) -> int:
        return sum(b["size"] for s in self.segments for b in s["blocks"] if b["live"])

    def free(self, small: bool) -> list[tuple[int, int, dict, dict]]:
        found = [(b["size"], b["at"], s, b) for s in self.segments for b in s["blocks"] if not b["live"]]
        return sorted((f for f in found if f[2]["small"] == small), key=lambda f: f[:2])

    def cut(self, segment: dict, block: dict, size: int) -> int:
        rest = block["size"] - size
        if rest >= 512 if segment["small"] else rest > MIB and size < self.max_split:
            i = segment["blocks"].index(block)
            segment["blocks"].insert(i + 1, {"at": block["at"] + size, "size": rest, "live": False})
            block["size"] = size
        block["live"] = True
        return block["at"]

    def new(self, size: int, small: bool) -> int | None:
        bytes = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + bytes > self.capacity:
            return None
        block = {"at": self.next, "size": bytes, "live": False}
        self.next += bytes
        self.segments.append({"small": small, "size": bytes, "blocks": [block]})
        return self.cut(self.segments[-1], block, size)

    def take(self, bytes: int) -> int | None:
        size = -(-bytes // 512) * 512
        small = size <= MIB
        for block_size, _, segment, block in self.free(small):
            if block_size >= size:
                over = block_size >= (self.max_split if size < self.max_split else size + 20 * MIB)
                if over:
                    break
                return self.cut(segment, block, size)
        at = self.new(size, small)
        if at is None and self.max_split < 1 << 60:
            wanted = max(size, self.max_split)
            oversize = [f for f in self.free(small) if f[0] >= self.max_split]
            enough = [f for f in oversize if f[0] >= wanted]
            if enough:
                self.segments.remove(enough[0][2])
                at = self.new(size, small)
            elif oversize:
                got = 0
                while got < wanted and oversize:
                    got += oversize[-1][0]
                    self.segments.remove(oversize.pop()[2])
                at = self.new(size, small) if got >= wanted else None
        if at is None:
            self.segments = [s for s in self.segments if any(b["live"] for b in s["blocks"])]
            at = self.new(size, small)
        return at

    def give(self, at: int) -> None:
        for segment in self.segments:
            for block in segment["blocks"]:
                if block["at"] == at and block["live"]:
                    block["live"] = False
                    merged: list[dict] = []
                    for b in segment["blocks"]:
                        if merged and not merged[-1]["live"] and not b["live"]:
                            merged[-1]["size"] += b["size"]
                        else:
                            merged.append(b)
                    segment["blocks"] = merged
                    return


class NaiveExpandable:
    """Per pool a set of mapped steps and the live ranges; everything else is worked out from these each time."""

    END = (20 * MIB) << 30

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.live: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self.steps: dict[bool, set[int]] = {True: set(), False: set()}
        self.unit = {True: 2 * MIB, False: 20 * MIB}

    @property
    def reserved(self) -> int:
        return sum(len(self.steps[s]) * self.unit[s] for s in (True, False))

    def gaps(self, small: bool) -> list[tuple[int, int]]:
        edges = [0, *(x for pair in sorted(self.live[small]) for x in pair), self.END]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]

    def pieces(self, small: bool, low: int, high: int) -> list[tuple[int, int, bool]]:
        """The mapped and unmapped stretches of a gap."""
        unit, out, at = self.unit[small], [], low
        while at < high:
            step = at // unit
            stop = min(high, (step + 1) * unit)
            mapped = step in self.steps[small]
            if not mapped and step > max(self.steps[small], default=-1):
                stop = high
            if out and out[-1][2] == mapped:
                out[-1] = (out[-1][0], stop, mapped)
            else:
                out.append((at, stop, mapped))
            at = stop
        return out

    def grow(self, small: bool, size: int) -> int | None:
        unit = self.unit[small]
        for low, high in self.gaps(small):
            if high - low >= size and not all(p[2] for p in self.pieces(small, low, high)):
                need = set(range(low // unit, (low + size - 1) // unit + 1)) - self.steps[small]
                if self.reserved + len(need) * unit > self.capacity:
                    return None
                self.steps[small] |= need
                return low
        raise AssertionError

    def take(self, bytes: int) -> int | None:
        size = -(-bytes // 512) * 512
        small = size <= MIB
        fitting = []
        for low, high in self.gaps(small):
            pieces = self.pieces(small, low, high)
            for i, (a, b, mapped) in enumerate(pieces):
                if mapped and b - a >= size:
                    more = pieces[i + 1][1] - pieces[i + 1][0] if i + 1 < len(pieces) else 0
                    fitting.append((b - a, a, b - a + more))
        fitting.sort()
        while len(fitting) > 1 and fitting[1][2] < fitting[0][2]:
            fitting.pop(0)
        at = fitting[0][1] if fitting else self.grow(small, size)
        if at is None:
            for s in (True, False):
                touched = {k for a, b in self.live[s] for k in range(a // self.unit[s], (b - 1) // self.unit[s] + 1)}
                self.steps[s] &= touched
            at = self.grow(small, size)
        if at is None:
            return None
        self.live[small].append((at, at + size))
        return at if small else at + self.END

    def give(self, at: int) -> None:
        small = at < self.END
        at -= 0 if small else self.END
        self.live[small] = [r for r in self.live[small] if r[0] != at]

    @property
    def used(self) -> int:
        return sum(b - a for ranges in self.live.values() for a, b in ranges)


REQUESTS = st.one_of(
    st.integers(1, 1 * MIB),
    st.integers(1 * MIB, 12 * MIB),
    st.integers(10 * MIB, 90 * MIB),
    st.sampled_from([512, 1 * MIB, 1 * MIB + 1, 10 * MIB, 20 * MIB, 64 * MIB]),
)
STEPS = st.lists(st.tuples(st.booleans(), REQUESTS, st.integers(0, 99)), max_size=40)
CACHING = [{}, {"max_split_size": 24 * MIB}, {"expandable_segments": True}]


@pytest.mark.parametrize("options", CACHING, ids=str)
@settings(deadline=None, max_examples=60)
@given(steps=STEPS, capacity=st.sampled_from([30 * MIB, 64 * MIB, 200 * MIB]))
def test_caching_does_what_its_naive_twin_does(options, steps, capacity):
    blocks = Caching(capacity, **options)
    twin = NaiveExpandable(capacity) if "expandable_segments" in options else NaiveCaching(capacity, **_split(options))
    live: list[int] = []
    for release, bytes, which in steps:
        if release and live:
            handle = live.pop(which % len(live))
            twin.give(blocks.address(handle))
            blocks.give(handle)
        else:
            fits, hole = blocks.fits(bytes), blocks.largest_hole()
            handle, at = blocks.take(bytes), twin.take(bytes)
            assert (None if handle is None else blocks.address(handle)) == at
            assert fits == (at is not None)
            assert bytes <= hole or at is None or "expandable_segments" in options
            if handle is not None:
                live.append(handle)
        assert (blocks.used, blocks.reserved) == (twin.used, twin.reserved)
        assert blocks.used == sum(blocks.size(h) for h in live) <= blocks.reserved <= capacity
        assert blocks.fits(blocks.largest_hole())
        _check_disjoint(blocks, live)


def _split(options: dict) -> dict:
    return {"max_split": options["max_split_size"]} if options else {}


def _check_disjoint(blocks: Blocks, live: list[int]) -> None:
    spans = sorted((blocks.address(h), blocks.address(h) + blocks.size(h)) for h in live if blocks.size(h))
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize(
    ("name", "options"),
    [("caching", o) for o in CACHING]
    + [("pool", {"fit": "first", "ends": 2}), ("pool", {"classes": "pow2"}), ("planned", {})],
    ids=str,
)
@settings(deadline=None, max_examples=40)
@given(steps=STEPS, gone=st.sets(st.integers(0, 20)), bytes=REQUESTS)
def test_would_fit_after_is_what_giving_back_and_taking_finds(name, options, steps, gone, bytes):
    blocks = make_allocator(tier(name, 100 * MIB, **options))
    live: list[int] = []
    for release, size, which in steps:
        if release and live:
            blocks.give(live.pop(which % len(live)))
        elif (handle := blocks.take(size, end="high" if which % 2 else "low")) is not None:
            live.append(handle)
    leaving = [h for i, h in enumerate(live) if i in gone]
    before = (blocks.used, blocks.reserved)
    answer = blocks.would_fit_after(leaving, bytes)
    assert (blocks.used, blocks.reserved) == before
    for handle in leaving:
        blocks.give(handle)
    assert answer == blocks.fits(bytes) == (blocks.take(bytes) is not None)


# ---- pool and planned ---------------------------------------------------------------------------


def holes(capacity: int, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    edges = [0, *(x for span in sorted(spans) for x in span), capacity]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


@pytest.mark.parametrize("fit", ["first", "best"])
@pytest.mark.parametrize("ends", [1, 2])
@settings(deadline=None, max_examples=80)
@given(
    rounding=st.sampled_from([1, 4]),
    capacity=st.integers(0, 130),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40), st.integers(0, 99), st.booleans()), max_size=60),
)
def test_pool_does_what_a_scan_of_all_holes_does(fit, ends, rounding, capacity, steps):
    blocks = Pool(capacity, fit=fit, ends=ends, rounding=rounding)
    live: dict[int, tuple[int, int]] = {}
    for release, bytes, which, up in steps:
        free = holes(capacity, [s for s in live.values() if s[0] < s[1]])
        size = -(-bytes // rounding) * rounding
        if release and live:
            handle = sorted(live)[which % len(live)]
            blocks.give(handle)
            del live[handle]
        else:
            high = up and ends == 2
            fitting = [h for h in free if h[1] - h[0] >= size]
            ranked = sorted(fitting, key=lambda h: h[0], reverse=high)
            if fit == "best":
                ranked.sort(key=lambda h: h[1] - h[0])
            chosen = ranked[0] if ranked else None
            assert blocks.fits(bytes) == (size == 0 or bool(fitting))
            handle = blocks.take(bytes, end="high" if up else "low")
            if size == 0:
                live[handle] = (0, 0)
            elif chosen is None:
                assert handle is None
            else:
                start = chosen[1] - size if high else chosen[0]
                assert (blocks.address(handle), blocks.size(handle)) == (start, size)
                live[handle] = (start, start + size)
        free = holes(capacity, [s for s in live.values() if s[0] < s[1]])
        largest = max((b - a for a, b in free), default=0)
        assert blocks.largest_hole() == largest // rounding * rounding
        assert blocks.used == blocks.reserved == sum(b - a for a, b in live.values())
        below, above = {b: b - a for a, b in free}, {a: b - a for a, b in free}
        for handle, (a, b) in live.items():
            assert blocks.neighbours(handle) == ((below.get(a, 0), above.get(b, 0)) if a < b else (0, 0))


def test_a_two_ended_pool_keeps_short_lived_blocks_apart():
    """Saved blocks from below, scratch from above: one hole stays where one end would leave many."""
    two, one = Pool(100, ends=2), Pool(100, ends=1)
    largest = []
    for blocks in (two, one):
        scratch = []
        for _ in range(4):
            blocks.take(10, end="low")
            scratch.append(blocks.take(10, end="high"))
        for handle in scratch:
            blocks.give(handle)
        largest.append(blocks.largest_hole())
    assert largest == [60, 30]


def test_first_fit_takes_the_first_hole_however_well_another_fits():
    for fit, start in (("first", 0), ("best", 60)):
        blocks = Pool(100, fit=fit)
        a, _, c, _ = (blocks.take(size) for size in (40, 20, 5, 35))
        blocks.give(a)
        blocks.give(c)
        assert blocks.address(blocks.take(5)) == start
    blocks = Pool(100, fit="first", ends=2)
    a, _, c = (blocks.take(size, end="high") for size in (40, 20, 5))
    blocks.give(a)
    blocks.give(c)
    assert blocks.address(blocks.take(5, end="high")) == 95


def test_compacting_slides_blocks_down_and_counts_what_moved():
    blocks = Pool(100)
    a, b, c = (blocks.take(20) for _ in range(3))
    blocks.give(a)
    assert blocks.compact() == 40
    assert (blocks.address(b), blocks.address(c), blocks.largest_hole()) == (0, 20, 60)
    assert blocks.compact() == 0
    assert blocks.address(blocks.take(60)) == 40


@pytest.mark.parametrize(
    ("classes", "asked", "got"),
    [("pow2", 5, 8), ("pow2", 8, 8), ("8,32", 9, 32), ("32 B, 8 B", 33, 36), ("32", 5, 32), ("", 5, 8)],
)
def test_size_classes_round_up(classes, asked, got):
    given = int(classes) if classes.isdecimal() else classes
    assert make_allocator(tier("pool", classes=given, rounding=4)).rounded(asked) == got
    blocks = Pool(100, classes=classes, rounding=4)
    assert blocks.size(blocks.take(asked)) == got


@given(
    capacity=st.integers(0, 300),
    rounding=st.sampled_from([1, 3, 8]),
    classes=st.sampled_from(["", "pow2", "7,50", "100"]),
    taken=st.integers(0, 99),
)
def test_the_largest_hole_fits_and_nothing_larger_does(capacity, rounding, classes, taken):
    blocks = Pool(capacity, classes=classes, rounding=rounding)
    blocks.take(taken)
    hole = blocks.largest_hole()
    assert blocks.fits(hole)
    assert not any(blocks.fits(bytes) for bytes in range(hole + 1, capacity + 2))


def test_planned_puts_blocks_where_the_plan_says():
    blocks = Planned(100)
    a, b = blocks.take(20, offset=0), blocks.take(10, offset=40)
    assert (blocks.address(a), blocks.address(b)) == (0, 40)
    assert (blocks.fits(20, 20), blocks.fits(21, 20), blocks.fits(51, 50)) == (True, False, False)
    assert blocks.overlapping(30, 15) == (a, b)
    assert blocks.would_fit_after([b], 80, 20)
    assert not blocks.would_fit_after([a], 80, 20)
    assert blocks.take(61, offset=40) is None
    with pytest.raises(IllegalPlan, match=r"planned bytes 15\.\.45 overlap a live block at 0\.\.20"):
        blocks.take(30, offset=15)
    scratch = blocks.take(10)
    assert blocks.address(scratch) == 90
    blocks.give(b)
    assert (blocks.largest_hole(), blocks.neighbours(a)) == (70, (0, 70))


@settings(deadline=None, max_examples=80)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 20), st.one_of(st.none(), st.integers(-2, 80)), st.integers(0, 9)),
        max_size=40,
    )
)
def test_planned_refuses_exactly_the_ranges_that_are_taken(steps):
    blocks, live = Planned(80), {}
    for release, bytes, offset, which in steps:
        if release and live:
            handle = sorted(live)[which % len(live)]
            blocks.give(handle)
            del live[handle]
            continue
        taken = [h for h, (a, b) in live.items() if offset is not None and a < offset + bytes and offset < b and bytes]
        inside = offset is None or bytes == 0 or 0 <= offset <= 80 - bytes
        if taken and inside:
            assert not blocks.fits(bytes, offset)
            with pytest.raises(IllegalPlan):
                blocks.take(bytes, offset)
            continue
        handle = blocks.take(bytes, offset)
        if handle is None:
            assert not inside or offset is None
            continue
        at = blocks.address(handle)
        live[handle] = (at, at + bytes) if bytes else (0, 0)
        if offset is not None and bytes:
            assert at == offset
        free = holes(80, [s for s in live.values() if s[0] < s[1]])
        assert blocks.largest_hole() == max((b - a for a, b in free), default=0)
        _check_disjoint(blocks, list(live))


def test_ten_thousand_live_blocks_cost_microseconds_each():
    """A budget, not a benchmark: quadratic work would take minutes."""
    for blocks in (Pool(1 << 40, fit="first", ends=2), Pool(1 << 40), Caching(1 << 40)):
        handles = [blocks.take(3 * MIB + i * KIB % 997, end="high" if i % 3 else "low") for i in range(10_000)]
        for handle in handles[::2]:
            blocks.give(handle)
        for i in range(5_000):
            blocks.take(3 * MIB + i * KIB % 997)
        assert blocks.used > 0
