"""The trace: one iteration as an immutable graph of ops over tensors, and what is kept and carried at its end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.trace import validity
from sim.trace.columns import FROM_SIZES, FROM_STRUCTURE, Graph, OpColumns, TensorColumns
from sim.trace.origin import Origin
from sim.trace.tensor import ROLE_CODE

__all__ = ["PERSISTENT", "OpColumns", "Structure", "TensorColumns", "Trace"]

PERSISTENT = (ROLE_CODE["weight"], ROLE_CODE["optimizer_state"])
SIZES = frozenset({"bytes", "shape", "flops", "workspace", "counted"})
"""The columns in which traces of one structure may differ; `bytes` is one of tensors and one of ops."""

ENDS = (-1, "ends")
"""Among what is hashed what is kept at the end, and carried."""


class Structure:
    """What traces have in common that differ in sizes alone: what is derived from that is kept with it.

    is_shared: whether several traces have it.
    hashed: of columns that are no sizes what is hashed, once it is shared.
    common: what else its traces have in common, by id, with what has been derived from it; see `sim.trace.kept`.
    """

    def __init__(self) -> None:
        self.is_shared = False
        self.hashed: dict[tuple[int, str], bytes] = {}
        self.common: dict[int, tuple[object, dict[Any, Any]]] = {}


class Trace(Graph):
    """One iteration of a computation: its ops, in program order, over its tensors.

    Build one with `TraceBuilder`, a generator in `workloads`, or `load`. A trace is immutable; a rewrite returns
    a new one. `trace.ops` and `trace.tensors` are sequences.

    outputs: ids of the tensors that are kept to the end.
    carry: pairs of ids: a tensor at the end, and the tensor that it is when the next iteration starts.
    meta: facts about the workload, JSON values only (`model`, `batch`, `sequence`, `tokens`, `samples`, …).
    origin: what the parts of a rewritten trace stand for, see `sim.trace.origin`. It is not part of the content
        hash, because it does not change what runs.
    like: a trace from which this one takes over what it has in common with it and has been derived already.

    Raises TraceError, naming op and tensor, for a read before the write, two producers of one tensor, a read of an
    overwritten tensor, a negative size, or an impossible view, output, carry or
    release.
    """

    def __init__(
        self,
        tensors: TensorColumns,
        ops: OpColumns,
        *,
        outputs: Sequence[int] | None = None,
        carry: Sequence[tuple[int, int]] | None = None,
        meta: Mapping[str, Any] | None = None,
        origin: Origin | None = None,
        like: Trace | None = None,
    ) -> None:
        super().__init__(tensors, ops)
        if like is not None:
            self._share(like)
        self.meta: Mapping[str, Any] = MappingProxyType(dict(meta or {}))
        self.origin = origin
        self.outputs: tuple[int, ...] = () if like is None else like.outputs
        self.carry: tuple[tuple[int, int], ...] = () if like is None else like.carry
        self._structure: Structure | None = None
        if like is None or meta is not like.meta:
            validity.check_meta(self.meta)
        has_ends = like is not None and outputs is like.outputs and carry is like.carry
        if like is not None and has_ends and self._differs_in_sizes_alone(like):
            self._take_over(like, FROM_STRUCTURE)
            self._structure = like.structure
            self._structure.is_shared = True
            if validity.sizes_are_possible(self, self.of_one_size):
                return  # all else has been checked; where they are not, what follows says why
        if like is None or not self.has_other_releases_alone(like):
            validity.check_graph(self)
        if has_ends:
            validity.check_range(self, self.outputs, self.carry)
        else:
            self._end(outputs, carry)
        validity.check_ends(self, self.outputs, self.carry)
        validity.check_releases(self, self.outputs)
        validity.check_unbinds(self)
        if like is not None and not has_ends and self._differs_in_sizes_alone(like):
            self._structure = like.structure
            self._structure.is_shared = True

    def _end(self, outputs: Sequence[int] | None, carry: Sequence[tuple[int, int]] | None) -> None:
        """Set what is kept and carried."""
        self.outputs = self._default_outputs() if outputs is None else tuple(int(t) for t in outputs)
        named = tuple((int(a), int(b)) for a, b in carry or ())
        validity.check_range(self, self.outputs, named)
        self.carry = self._default_carry() if carry is None else named

    def released_as(self, like: Trace) -> Trace:
        """This trace with the release points of another one, from which it differs in sizes alone otherwise."""
        new = Trace(
            self.tensor_columns,
            replace(self.op_columns, releases=like.op_columns.releases),
            outputs=self.outputs,
            carry=self.carry,
            meta=self.meta,
            origin=Origin.identity(self),
            like=like,
        )
        for name in FROM_SIZES:
            getattr(self, name)
        new._take_over(self, FROM_SIZES)
        return new

    @property
    def structure(self) -> Structure:
        """The same object for traces that are known to differ in sizes, FLOPs and facts of `meta` alone.

        They are known where one is made `like` the other, such as the built-in models at several batches and sequences.
        """
        if self._structure is None:
            self._structure = Structure()
        return self._structure

    @cached_property
    def of_one_size(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Pairs of tensors with the same bytes: each that overwrites another and that, each carried one at the end and
        at the start. Shapes (pairs,) both."""
        new = np.flatnonzero(self.tensor_columns.replaces >= 0)
        last, first = np.array(self.carry, np.int64).reshape(-1, 2).T
        return np.concatenate((new, last)), np.concatenate((self.tensor_columns.replaces[new], first))

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over the whole content of the trace, as hexadecimal digits; not over the names of axes, see `Tensor`.

        Those say how a trace may be divided, and change nothing of what runs.
        """
        structure = self._structure
        return self._hash(structure.hashed if structure is not None and structure.is_shared else None)

    def hashed_anew(self) -> str:
        """The same from the columns as they are, whatever has been kept of them."""
        return self._hash(None)

    def _hash(self, known: dict[tuple[int, str], bytes] | None) -> str:
        """known: what is hashed of columns that are no sizes; what it lacks is added. None to keep nothing."""
        digest = hashlib.sha256()
        for part, columns in enumerate((self.tensor_columns, self.op_columns)):
            for key, column in vars(columns).items():
                if key == "axes":
                    continue
                if key in ("releases", "views", "function", "ring", "counted", "unbinds") and not column:
                    continue  # a trace without them hashes as it did before they existed
                digest.update(key.encode())
                if known is None or key in SIZES:
                    digest.update(_to_hash(key, column))
                elif (part, key) in known:
                    digest.update(known[part, key])
                else:
                    digest.update(known.setdefault((part, key), _to_hash(key, column)))
        ends = known.get(ENDS) if known is not None else None
        if ends is None:
            ends = repr((self.outputs, self.carry)).encode()
            if known is not None:
                known[ENDS] = ends
        digest.update(ends)
        digest.update(self._facts().encode())
        return digest.hexdigest()

    def _facts(self) -> str:
        """`meta` as it is hashed."""
        return json.dumps(dict(self.meta), sort_keys=True, default=str)

    def _differs_in_sizes_alone(self, other: Trace) -> bool:
        """Whether it shares all columns but those of sizes with a trace, and what is kept and carried."""
        pairs = ((self.tensor_columns, other.tensor_columns), (self.op_columns, other.op_columns))
        mine, theirs = self.origin, other.origin
        if mine is not theirs and (mine is None or theirs is None or not mine.is_like(theirs)):
            return False
        return (self.outputs, self.carry) == (other.outputs, other.carry) and all(
            column is vars(there)[name]
            for here, there in pairs
            for name, column in vars(here).items()
            if name not in SIZES
        )

    def has_other_releases_alone(self, other: Trace) -> bool:
        """Whether it differs from a trace in nothing but where the program releases tensors."""
        mine, theirs = vars(self.op_columns), vars(other.op_columns)
        return self.tensor_columns is other.tensor_columns and all(
            column is theirs[name] for name, column in mine.items() if name != "releases"
        )

    def is_but_for_releases(self, other: Trace) -> bool:
        """Whether it is equal to a trace but for where the program releases tensors."""
        pairs = ((self.tensor_columns, other.tensor_columns), (self.op_columns, other.op_columns))
        return (
            (self.outputs, self.carry) == (other.outputs, other.carry)
            and all(
                _are_equal(column, vars(there)[name])
                for here, there in pairs
                for name, column in vars(here).items()
                if name not in ("axes", "releases")
            )
            and self._facts() == other._facts()
        )

    def _default_outputs(self) -> tuple[int, ...]:
        role = self.tensor_columns.role
        keep = np.isin(role, PERSISTENT) & (self.replaced_by < 0)
        return tuple(np.flatnonzero(keep).tolist())

    def _default_carry(self) -> tuple[tuple[int, int], ...]:
        pairs = []
        for last in self.outputs:
            first = last
            while self.tensor_columns.replaces[first] >= 0:
                first = int(self.tensor_columns.replaces[first])
            if self.producer[first] < 0:
                pairs.append((last, first))
        return tuple(pairs)

    def __getstate__(self) -> dict[str, Any]:
        """The trace itself; what is computed from it on demand, and may be large, does not travel."""
        kept = ("tensor_columns", "op_columns", "origin", "outputs", "carry", "content_hash")
        return {**{key: vars(self)[key] for key in kept if key in vars(self)}, "meta": dict(self.meta)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, meta=MappingProxyType(state["meta"]), _structure=None)
        self._make_read_only()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self.content_hash == other.content_hash

    def __hash__(self) -> int:
        return hash(self.content_hash)

    def __repr__(self) -> str:
        words = [str(self.meta.get("model", "trace"))]
        words += [f"{key} {self.meta[key]}" for key in ("batch", "sequence", "precision") if key in self.meta]
        return f"<Trace {', '.join(words)}: {len(self.op_columns.name)} ops, {len(self.tensor_columns.name)} tensors>"


def _are_equal(column: Any, other: Any) -> bool:
    """Whether two columns of the same name have the same values."""
    if isinstance(column, np.ndarray):
        return column.dtype == other.dtype and np.array_equal(column, other)
    return column == other if isinstance(column, Mapping) else tuple(column) == tuple(other)


def _to_hash(key: str, column: Any) -> bytes:
    """What is hashed of a column."""
    if isinstance(column, np.ndarray):
        return np.ascontiguousarray(column).tobytes()
    if key == "name":
        return json.dumps(list(column)).encode()
    is_sparse = isinstance(column, Mapping)
    rows = sorted(column) if is_sparse else range(len(column))
    values = [column[row] for row in rows] if is_sparse else column
    # few values are distinct: hash each one once, then the code of each row
    seen = {value: code for code, value in enumerate(dict.fromkeys(values))}
    return np.array([rows, [*map(seen.__getitem__, values)]], np.int64).tobytes() + repr(list(seen)).encode()
