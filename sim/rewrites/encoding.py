"""Tensors kept encoded between forward and backward: a code in their place, and the ops that encode and decode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from sim.errors import TraceError
from sim.rewrites.codecs import SUFFICES, code_bytes, elements, part_of
from sim.rewrites.rewriter import Rewriter
from sim.trace.graph import Trace
from sim.trace.origin import Encoded, Lossy, Same
from sim.trace.phases import saved_through_views


@dataclass(frozen=True, slots=True)
class Codec:
    """How a tensor is encoded between forward and backward.

    name: appended to the tensor's name; a format of `sim.rewrites.codecs`, or one's own.
    ratio: bytes of the encoding per byte of the tensor; None for those of the format.
    encode_ns, decode_ns: time of each op in ns; None lets the platform's cost model price the bytes they touch.
    lossless: decoding restores exactly the same values.
    engine: where they run, "" for the device's main one.
    workspace: bytes that each needs while it runs.
    """

    name: str
    ratio: float | Fraction | None = None
    encode_ns: int | None = None
    decode_ns: int | None = None
    lossless: bool = True
    engine: str = ""
    workspace: int = 0


Codecs = Mapping[int, Codec] | Mapping[str, Codec] | Mapping[int | str, Codec]
"""By tensor, given by id or name, how it is encoded."""


def encode(trace: Trace, codecs: Codecs, sufficient: Iterable[int | str] = ()) -> Trace:
    """Keep some tensors encoded between their last forward use and their first backward reader.

    An encode op follows the last forward op that reads (or produces) the tensor, a decode op precedes its first
    backward reader; backward ops then read the decoded copy.

    trace: the trace to rewrite.
    codecs: tensor -> how it is encoded.
    sufficient: backward ops of a function of `SUFFICES`, which read the code that suffices for them, without decoding,
        and nothing else that forward saved. The code is written right after the forward op, and of what that saved it
        is of its result. The op counts as many bytes touched as before.

    Raises TraceError for a tensor that no forward op produces, that no backward op reads, that is overwritten, or of
    which backward reads a view that forward made; for an op that has no such function or saved nothing.
    """
    return _Encoding(trace, codecs, sufficient).trace()


class _Encoding:
    """One rewrite by `encode`."""

    def __init__(self, trace: Trace, codecs: Codecs, sufficient: Iterable[int | str]) -> None:
        self.old, self.new = trace, Rewriter(trace)
        self.ids = self.new.all_tensors()
        self.after: dict[int, list[tuple[int, int, Codec]]] = {}
        self.before: dict[int, list[tuple[int, int, Codec]]] = {}
        self.decoded: dict[int, int] = {}
        self.instead: dict[int, tuple[int, frozenset[int]]] = {}
        self.shared: dict[int, int] = {}
        chosen = {trace.tensor_id(tensor): codec for tensor, codec in codecs.items()}
        for op in sufficient:
            self.suffice(trace.op_id(op))
        for t, codec in chosen.items():
            self.encode(t, codec)

    def code(self, t: int, codec: Codec) -> int:
        """Add the code of a tensor."""
        old = self.old.tensors[t]
        size = code_bytes(codec.name, old) if codec.ratio is None else ceil(part_of(old.bytes, codec.ratio))
        return self.new.tensor(
            old, Encoded(Same(t), codec.name, codec.lossless),
            name=f"{old.name}.{codec.name}", bytes=size, shape=None, dtype="", zeros=None,
        )  # fmt: skip

    def suffice(self, op: int) -> None:
        """Let a backward op read the code that suffices for it."""
        trace, name = self.old, self.old.op_columns.name[op]
        function = trace.op_columns.function.get(op, "")
        saved = [t for t in trace.reads(op) if _is_saved(trace, t)]
        if function not in SUFFICES or not trace.op_columns.phase[op] or not saved:
            raise TraceError(
                f"encode: op {name!r} is not the backward of {' or '.join(SUFFICES)} of what forward saved"
            )
        form = SUFFICES[function]
        kept = result_of(trace, saved)
        if kept not in self.shared:
            self.shared[kept] = self.code(kept, Codec(form))
            self.after.setdefault(int(trace.producer[kept]), []).append((kept, self.shared[kept], Codec(form)))
        self.instead[op] = self.shared[kept], frozenset(saved)

    def encode(self, t: int, codec: Codec) -> None:
        """Encode a tensor after its last use in forward, and decode it before its first in backward."""
        trace, phase = self.old, self.old.op_columns.phase
        readers = [op for op in trace.readers(t) if op not in self.instead or t not in self.instead[op][1]]
        late = [op for op in readers if phase[op] > 0]
        if not may_encode(trace, t) or not late:
            name = trace.tensor_columns.name[t]
            raise TraceError(
                f"encode: tensor {name!r} is not produced in forward, read in backward and never overwritten, "
                "or a view of it outlives forward"
            )
        early = max((op for op in readers if op < late[0]), default=int(trace.producer[t]))
        old, code = trace.tensors[t], self.code(t, codec)
        claim = Same(t) if codec.lossless else Lossy(Same(t), codec.name)
        self.decoded[t] = self.new.tensor(old, claim, name=f"{old.name}.decoded", saved_for="")
        self.after.setdefault(early, []).append((t, code, codec))
        self.before.setdefault(late[0], []).append((t, code, codec))

    def add(self, word: str, t: int, reads: int, writes: int, codec: Codec, anchor: int) -> None:
        """Add the op that encodes or decodes a tensor beside another op."""
        c, name = self.old.op_columns, self.old.tensor_columns.name[t]
        self.new.glue(
            f"{name}.{codec.name}.{word}" if codec.name in SUFFICES.values() else f"{name}.{word}",
            "codec",
            [reads],
            [writes],
            phase=self.old.ops[anchor].phase,
            layer=int(c.layer[anchor]),
            device=int(c.device[anchor]),
            engine=codec.engine,
            workspace=codec.workspace,
            duration=codec.encode_ns if word == "encode" else codec.decode_ns,
        )

    def trace(self) -> Trace:
        """The trace with its codes."""
        trace, ids = self.old, self.ids
        for op in trace.ops:
            for t, code, codec in self.before.get(op.id, ()):
                self.add("decode", t, code, self.decoded[t], codec, op.id)
            reads = [self.decoded[t] if t in self.decoded and op.phase != "forward" else ids[t] for t in op.reads]
            touched = op.bytes
            if op.id in self.instead:
                code, saved = self.instead[op.id]
                reads = [new for t, new in zip(op.reads, reads, strict=True) if t not in saved] + [code]
                touched = int(trace.touched[op.id])
            self.new.op(op, reads=reads, writes=[ids[t] for t in op.writes], bytes=touched)
            for t, code, codec in self.after.get(op.id, ()):
                self.add("encode", t, ids[t], code, codec, op.id)
        carry = [(ids[a], ids[b]) for a, b in trace.carry]
        return self.new.build(outputs=[ids[t] for t in trace.outputs], carry=carry)


def may_encode(trace: Trace, t: int) -> bool:
    """Whether `encode` takes a tensor: forward makes it, backward reads it itself alone, and nothing overwrites it."""
    late = any(trace.op_columns.phase[op] > 0 for op in trace.readers(t))
    is_alone = trace.replaced_by[t] < 0 and t not in trace.view_of and t not in saved_through_views(trace)
    return _is_saved(trace, t) and late and is_alone


def result_of(trace: Trace, saved: Sequence[int]) -> int:
    """Of what a forward op saved, its own result rather than what it read: of several the one of fewest elements."""
    return max(saved, key=lambda t: (trace.producer[t], -elements(trace.tensors[t]), -t))


def _is_saved(trace: Trace, t: int) -> bool:
    """Whether a forward op produces the tensor."""
    producer = int(trace.producer[t])
    return producer >= 0 and trace.op_columns.phase[producer] == 0
