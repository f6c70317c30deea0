"""An online part is told of every change before it is asked, in order, one by one or all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from sim import load_profile
from sim.engine.replay import replay
from sim.plan import Action, Change, ChangeFields, Drop, Memory, Need, Online, Plan
from workloads import w1

MACHINE = load_profile("a100_40_pcie")
TRACE = w1(2)
LAST = {t: len(TRACE.ops) if t in TRACE.outputs else int(op) for t, op in enumerate(TRACE.last_use)}


class One(Online):
    """Hears of one change at a time; notes when, in the order of what happens to it."""

    def __init__(self, heard: list[object], drops: bool) -> None:
        self.heard, self.drops = heard, drops

    def before(self, op: int, memory: Memory) -> Iterable[Action]:
        self.heard.append(op)
        return [Drop(t) for t in memory.residents("hbm") if self.drops and op > LAST[t]]

    def on_pressure(self, need: Need, memory: Memory) -> Iterable[Action]:
        raise AssertionError("memory is not short")

    def notice(self, change: Change) -> None:
        assert type(change) is Change
        self.heard.append((change.what, change.tensor, change.tier, change.now))


class All(One):
    """The same, all at once."""

    def notice_all(self, changes: Sequence[ChangeFields]) -> None:
        self.heard += [tuple(change) for change in changes]


class Own(All):
    """Says only how it hears of one: that counts, not what its base does with all."""

    def notice(self, change: Change) -> None:
        self.heard.append(change.tensor)


def heard(kind: type[One], drops: bool = True) -> list[object]:
    found: list[object] = []
    replay(Plan(TRACE, online=partial(kind, found, drops), keep_dead=True), MACHINE)
    return found


def test_all_at_once_is_the_same_as_one_by_one():
    assert heard(One) == heard(All) != []


def test_each_op_comes_after_what_happened_before_it():
    rows = heard(One)
    asked = [i for i, row in enumerate(rows) if isinstance(row, int)]
    assert [rows[i] for i in asked] == list(range(len(TRACE.ops)))
    for op, at in enumerate(asked[:-1]):
        following = rows[at + 1 : asked[op + 1]]
        read = [row[1] for row in following if row[0] == "read"]
        came = [row[1] for row in following if row[0] == "came"]
        assert (tuple(read), tuple(came)) == (TRACE.distinct_reads[op], TRACE.writes(op))
    assert rows[asked[-1] + 1 :]  # and the last op is not forgotten


def test_drops_are_told_before_the_next_question():
    went = [row for row in heard(One) if isinstance(row, tuple) and row[0] == "went"]
    assert len({tensor for _, tensor, *_ in went}) == len(went) > 10


def test_a_class_that_hears_of_one_is_not_told_as_its_base_is():
    assert all(isinstance(row, int) for row in heard(Own, drops=False))
