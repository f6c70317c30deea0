"""From the program's answer to a plan: ops on their engines, recomputations, moves where it copies, and drops."""

from __future__ import annotations

from collections.abc import Iterator

from sim.plan import Action, Drop, Move, Plan, Recompute
from sim.policies.hybrid.xengine.engines import on_engines
from sim.policies.hybrid.xengine.program import Answer, Scene


def plan_of(scene: Scene, answer: Answer) -> Plan:
    """The plan, not yet replayed."""
    trace = on_engines(scene.index.trace, scene.choices, answer.engine)
    return Plan(trace, tuple(Walk(scene, answer).actions()), place=answer.home)


class Walk:
    """The steps of an answer in order, with what is resident where.

    An op of another engine is handed over, and the device goes on; it waits only for results that it reads. So a copy
    can be asked for once the tensor has been read, or when its producer ends. Where neither can be said, it is left to
    the op that reads the tensor: the engine fetches it then.
    """

    def __init__(self, scene: Scene, answer: Answer) -> None:
        self._index, self._roots, self._answer = scene.index, scene.roots, answer
        self._at = [scene.choices.memory(e) for e in answer.engine]
        main = scene.choices.platform.engine_for(0)
        self._beside = [e != main for e in answer.engine]
        self._where: dict[int, set[str]] = {t: {answer.home[root]} for t, root in scene.roots.items() if t == root}
        self._exists = set(self._where)  # produced for sure, whatever engine makes it
        self._asked: set[int] = set()  # moved when the producer ends
        self._uses = list(scene.index.uses)
        for ops in answer.reruns:
            for op in ops:
                for t in scene.index.reads[op]:
                    self._uses[t] += 1

    def actions(self) -> Iterator[Action]:
        """All of them, stage by stage."""
        for t, reruns in enumerate(self._answer.reruns):
            steps = [*reruns, t]
            again = {x for op in reruns for x in self._index.writes[op]}
            copies = sorted((x, a, b) for s, x, a, b in self._answer.copies if s == t)
            for x, a, b in copies:
                if x not in again or a in self._where.get(x, ()):
                    yield from self._copy(t, steps, -1, x, a, b)
            for q, op in enumerate(steps):
                if op != t:
                    yield Recompute(op, before=t)
                self._ran(op, first=op == t)
                if op != t:
                    for x, a, b in copies:
                        if x in self._index.writes[op] and b not in self._where.get(x, ()):
                            yield from self._copy(t, steps, q, x, a, b)
                yield from self._dropped(t, steps, q)

    def _copy(self, t: int, steps: list[int], q: int, x: int, a: str, b: str) -> Iterator[Action]:
        """A copy before the op of a stage, or at the end of the tensor's producer if nothing has read it yet."""
        if x not in self._where:
            return  # nothing reads it any more: what has no bytes the program copies for nothing
        keep = self._is_wanted(t, steps, q, x, a)
        producer = self._index.producer[x]
        if x in self._exists:
            yield Move(x, b, keep=keep, before=t)
        elif (
            x in self._asked
            or any(producer in stage for stage in self._answer.reruns[: t + 1])
            or any(x in self._index.reads[op] and self._at[op] == b for op in steps[q + 1 :])
        ):
            return  # the op that reads it has it fetched
        else:
            self._asked.add(x)
            yield Move(x, b, keep=keep, after=producer)
        self._where[x].add(b)
        if not keep:
            self._where[x].discard(a)

    def _ran(self, op: int, *, first: bool) -> None:
        """What an op reads exists, and is where it runs; its results are there, too."""
        index = self._index
        for x in index.reads[op]:
            self._exists.add(x)
            self._where.setdefault(x, set()).add(self._at[op])
            self._uses[x] -= 1
        for x in index.releases.get(op, ()) if first else ():
            self._uses[x] -= 1
        for x in index.writes[op]:
            if index.replaces[x] >= 0:
                self._where.pop(index.replaces[x], None)
            self._where.setdefault(x, set()).add(self._at[op])
            if self._beside[op]:
                self._exists.discard(x)
            else:
                self._exists.add(x)

    def _dropped(self, t: int, steps: list[int], q: int) -> Iterator[Action]:
        """Release what no later step reads where it is; the engine itself frees what nothing reads any more."""
        op, index = steps[q], self._index
        for x in dict.fromkeys((*index.reads[op], *index.writes[op])):
            if self._uses[x] <= 0 and index.freeable[x]:
                self._where.pop(x, None)
            for m in sorted(self._where.get(x, ())):
                if self._is_wanted(t, steps, q, x, m):
                    continue
                if op != t and x not in self._exists:
                    continue  # it is being recomputed beside the device, and can be dropped once it has been read
                self._where[x].discard(m)
                yield Drop(x, m, after=t) if op == t else Drop(x, m, before=t)

    def _is_wanted(self, t: int, steps: list[int], q: int, x: int, m: str) -> bool:
        """Whether a copy is needed after a step: by a later one of the stage, or when the next stage starts."""
        root = self._roots.get(x)
        if (root is not None and self._answer.home[root] == m) or (t + 1, x, m) in self._answer.kept:
            return True
        return any(x in self._index.reads[op] and self._at[op] == m for op in steps[q + 1 :])
