"""The schema of a hardware profile: the TOML file as pydantic models, one class per part.

What a class says of its keys, `scripts/make_profiles.py` copies into `hardware_profiles/README.md`. A figure is written
"2039 GB/s", or as a table with `value`, `source` and `standing`. A part, or a table of figures in it, gives the default
`source` and `standing` of its figures.
References to other parts are checked against the file, so that one pass finds every mistake. `sim.hardware.profile`
turns the result into a `Platform`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from types import UnionType
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    ValidationInfo,
    model_validator,
)

from sim import units
from sim.errors import UnitError, near
from sim.hardware.cost import STAND_INS
from sim.hardware.platform import DISPATCHES, OP_TIMES, STANDINGS, Fact
from sim.trace.op import KINDS

N = TypeVar("N")
OP_KEYS = (*KINDS, *(f"{kind}_{dtype}" for kind in KINDS for dtype in STAND_INS), "default")
"""Keys of the tables by op kind: a kind, a kind in one type (`matmul_fp32`), or `default` for all other kinds."""

DUPLEX = ("full", "half", "factors")
"""How opposite directions affect each other: not at all, by sharing one rate, or by measured factors."""

ALLOCATORS = ("exact", "caching", "pool", "planned")

UNITS = ("vector", "scalar", "none")
"""With what an engine runs a kind of op: with whole vectors, one element at a time, or not at all."""

IMAGE_ORDERS = ("any", "channels_last")
"""In which order of their dimensions an engine convolves images."""

BITS = {"fp64": 64, "fp32": 32, "tf32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8}
"""Width of an element."""

MAX_DEVICES = 1024


class Quantity(NamedTuple):
    """A figure's number and the text it was read from."""

    number: Any
    text: str


# ---- values --------------------------------------------------------------------------------------


def _with_unit(parse: Callable[[str], Any], zero: bool) -> Callable[[Any], Quantity]:
    def read(value: Any) -> Quantity:
        number = parse(value)
        if not number and not zero:
            raise ValueError(f"value {value!r}: expected more than zero")
        return Quantity(number, str(value))

    return read


def _number(low: Fraction, high: Fraction, expected: str) -> Callable[[Any], Quantity]:
    def read(value: Any) -> Quantity:
        if isinstance(value, bool) or not isinstance(value, (int, Decimal)) or not Decimal(value).is_finite():
            raise ValueError(f"value {_shown(value)}: expected {expected}, written as a number")
        if not low < Fraction(value) <= high:
            raise ValueError(f"value {_shown(value)}: expected {expected}")
        return Quantity(Fraction(value), str(value))

    return read


def _count(value: Any) -> Quantity:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024:
        raise ValueError(f"value {_shown(value)}: expected a whole number from 1 to 1024")
    return Quantity(value, str(value))


def _unit_word(value: Any) -> Quantity:
    return Quantity(_one_of(UNITS, f"one of {', '.join(UNITS)}")(value), str(value))


def _image_order(value: Any) -> Quantity:
    return Quantity(_one_of(IMAGE_ORDERS, f"one of {', '.join(IMAGE_ORDERS)}")(value), str(value))


def _no_measurement(value: Any) -> Quantity:
    if value == "no measurement":
        return Quantity(None, value)
    return _number(Fraction(0), Fraction(10), "a mean relative error such as 0.07, or 'no measurement'")(value)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, Decimal) else repr(value)


def _one_of(valid: tuple[str, ...], expected: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in valid:
            hint = near(str(value), valid)  # `expected` lists the valid ones already; only a near match adds anything
            raise ValueError(f"value {_shown(value)}: expected {expected}{hint if 'did you mean' in hint else ''}")
        return str(value)

    return check


def _known(*parts: str) -> Callable[[Any, ValidationInfo], str]:
    """Checks for the name of a part of one of these kinds in the same file."""

    def check(value: Any, info: ValidationInfo) -> str:
        file: Mapping[str, list[str]] = info.context or {}
        names = [name for part in parts for name in file.get(part, ())]
        if value not in names:
            kinds = " or ".join(part.removesuffix("s") for part in parts)
            raise ValueError(f"value {_shown(value)}: there is no {kinds} of that name{near(str(value), names)}")
        return str(value)

    return check


Standing = Annotated[str, PlainValidator(_one_of(STANDINGS, f"one of {', '.join(STANDINGS)}"))]


class Model(BaseModel):
    """Base class: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Figure(Model, Generic[N]):
    """One figure with its source and its standing."""

    value: N
    source: Annotated[str, Field(min_length=1)]
    standing: Standing


Size = Figure[Annotated[Quantity, PlainValidator(_with_unit(units.parse_bytes, zero=False))]]
Rate = Figure[Annotated[Quantity, PlainValidator(_with_unit(units.parse_rate, zero=False))]]
Compute = Figure[Annotated[Quantity, PlainValidator(_with_unit(units.parse_flops, zero=False))]]
Frequency = Figure[Annotated[Quantity, PlainValidator(_with_unit(units.parse_frequency, zero=False))]]
Width = Figure[Annotated[Quantity, PlainValidator(_with_unit(units.parse_width, zero=False))]]
Time = Figure[Annotated[Quantity, PlainValidator(_with_unit(units.parse_time, zero=True))]]
Power = Figure[Annotated[Quantity, PlainValidator(_with_unit(units.parse_power, zero=True))]]
Energy = Figure[Annotated[Quantity, PlainValidator(_with_unit(units.parse_energy, zero=True))]]
Count = Figure[Annotated[Quantity, PlainValidator(_count)]]
Runs = Figure[Annotated[Quantity, PlainValidator(_unit_word)]]
ImageOrder = Figure[Annotated[Quantity, PlainValidator(_image_order)]]
Part = Figure[Annotated[Quantity, PlainValidator(_number(Fraction(0), Fraction(1), "a fraction above 0, up to 1"))]]
Share = Figure[Annotated[Quantity, PlainValidator(_number(Fraction(0), Fraction(100), "a number from 0 to 100"))]]
Residual = Figure[Annotated[Quantity, PlainValidator(_no_measurement)]]

_OP_KEY = f"one of {', '.join(KINDS)}, default, or a kind in one type such as matmul_fp32"
TierName = Annotated[str, PlainValidator(_known("tiers"))]
UserName = Annotated[str, PlainValidator(_known("links", "engines"))]
Kind = Annotated[str, PlainValidator(_one_of((*KINDS, "default"), f"one of {', '.join(KINDS)}, default"))]
OpKey = Annotated[str, PlainValidator(_one_of(OP_KEYS, _OP_KEY))]
Dtype = Annotated[str, PlainValidator(_one_of(tuple(STAND_INS), f"one of {', '.join(STAND_INS)}"))]
OpTime = Annotated[str, PlainValidator(_one_of(OP_TIMES, f"one of {', '.join(OP_TIMES)}"))]
Dispatching = Annotated[str, PlainValidator(_one_of(DISPATCHES, f"one of {', '.join(DISPATCHES)}"))]
Scale = Annotated[Quantity, PlainValidator(_number(Fraction(0), Fraction(100), "a number above 0, up to 100"))]
Duplex = Annotated[str, PlainValidator(_one_of(DUPLEX, f"one of {', '.join(DUPLEX)}"))]
PartName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


# ---- parts ---------------------------------------------------------------------------------------


class Sourced(Model):
    """A part with figures.

    source, standing: defaults for its figures.
    """

    FIGURES: ClassVar[tuple[str, ...]] = ()
    """The keys that are figures, as declared by their types."""

    TABLES: ClassVar[tuple[str, ...]] = ()
    """The keys that are tables of figures."""

    source: str | None = None
    standing: Standing | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        """Read from the fields which of them are figures."""
        super().__pydantic_init_subclass__(**more)
        types = {name: field.annotation for name, field in cls.model_fields.items()}
        cls.FIGURES = tuple(name for name, kind in types.items() if _is_figure(kind))
        cls.TABLES = tuple(n for n, kind in types.items() if get_origin(kind) is dict and _is_figure(get_args(kind)[1]))

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, raw: Any) -> Any:
        """Expand each figure to a table of its own, with the defaults of its part."""
        if not isinstance(raw, Mapping):
            return raw
        part = dict(raw)
        default = {key: part[key] for key in ("source", "standing") if key in part}
        for key in cls.FIGURES:
            if key in part:
                part[key] = _expanded(part[key], default)
        for key in cls.TABLES:
            if isinstance(part.get(key), Mapping):
                table = dict(part[key])
                own = default | {word: table.pop(word) for word in ("source", "standing") if word in table}
                part[key] = {name: _expanded(value, own) for name, value in table.items()}
        return part

    def figures(self) -> Iterator[tuple[str, Figure[Quantity]]]:
        """Every figure that is present, with its path within this part."""
        for key in self.FIGURES:
            if getattr(self, key) is not None:
                yield key, getattr(self, key)
        for key in self.TABLES:
            for name, figure in getattr(self, key).items():
                yield f"{key}.{name}", figure


def _is_figure(kind: Any) -> bool:
    """Whether a type is a figure, or one or None."""
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return any(isinstance(each, type) and issubclass(each, Figure) for each in kinds)


def _expanded(value: Any, default: Mapping[str, Any]) -> Any:
    return {**default, **value} if isinstance(value, Mapping) else {**default, "value": value}


class AllocatorPart(Model):
    """The allocator of a tier; all keys but `name` are that allocator's options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Annotated[str, PlainValidator(_one_of(ALLOCATORS, f"one of {', '.join(ALLOCATORS)}"))]

    @model_validator(mode="after")
    def _scalars(self) -> AllocatorPart:
        for key, value in (self.model_extra or {}).items():
            if not isinstance(value, (int, str)):
                raise ValueError(f"value {value!r}: option {key!r} must be a whole number, a size, text or true/false")
        return self

    @property
    def options(self) -> tuple[tuple[str, int | str | bool], ...]:
        """Options sorted by name; text that is a size, such as "20 MiB", becomes bytes."""
        return tuple((key, _size_or_text(value)) for key, value in sorted((self.model_extra or {}).items()))


def _size_or_text(value: int | str | bool) -> int | str | bool:
    if isinstance(value, str):
        try:
            return units.parse_bytes(value)
        except UnitError:
            return value
    return value


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class TierPart(Sourced):
    """A memory.

    kind: `hbm`, `ddr`, `lpddr5`, `nvme`, `pooled`, `zone`, …
    per_device: `true` where each device has its own (default `false`: shared by all)
    nominal: size as sold
    capacity: what programs can use of it
    bandwidth: the rate to which engines' shares refer; usually the nominal one
    write_bandwidth: the rate to which shares refer for results that engines of another tier write there in place, where
        it is not `bandwidth`
    latency: time per access, charged for operands read in place from another tier (default 0)
    pinning: the rate at which its pages are locked, once before training, where they have to be
    allocator: `"exact"` (default), `"caching"`, `"pool"`, `"planned"`, or a table:
        `{ name = "caching", expandable_segments = true }`
    """

    kind: str
    per_device: StrictBool = False
    nominal: Size
    capacity: Size
    bandwidth: Rate
    write_bandwidth: Rate | None = None
    latency: Time | None = None
    pinning: Rate | None = None
    allocator: Annotated[AllocatorPart, BeforeValidator(_named)] = AllocatorPart(name="exact")


class EnginePart(Sourced):
    """A unit that runs ops.

    home: the tier where its results are allocated
    reaches: other tiers that it reads and writes in place; a shared engine reaches those of all devices
    main: `true` (default) for the one engine that runs a device's ops unless they name another; `false` for a host CPU
    peak: by type: `bf16 fp16 tf32 fp32 fp64 fp8 int8`; a missing type uses the peak of the next wider one, or of the
        other of `bf16` and `fp16`. Required, unless `units` gives it
    efficiency: by kind of op: fraction of the peak that is reached, above 0 and up to 1
    bandwidth_share: by kind of op: fraction of the home tier's bandwidth; above 1 where caches help
    launch: fixed time per op
    bandwidth: what this engine alone can draw from its home tier; shares then refer to it (default: the tier's)
    power: power while it runs ops, for energy
    cores: cores of the unit, from which with the next three the peak of the types in `units` follows (see below)
    clock: such as `"1.2 GHz"`
    vector: bits of a vector, such as `"512 bit"`
    units: by type: the multiply-add units of a core
    runs: by kind of op: what runs it, `vector` (default), `scalar` (one element at a time) or `none`: this engine
        cannot
    image_order: by type: `channels_last` where its convolutions need images in that order, and those with channels
        first, as PyTorch has them by default, are transposed there and back; `any` (default)
    """

    home: TierName
    reaches: tuple[TierName, ...] = ()
    main: StrictBool = True
    peak: dict[Dtype, Compute] = {}
    efficiency: dict[OpKey, Part] = {}
    bandwidth_share: dict[Kind, Share] = {}
    launch: Time
    bandwidth: Rate | None = None
    power: Power | None = None
    cores: Count | None = None
    clock: Frequency | None = None
    vector: Width | None = None
    units: dict[Dtype, Count] = {}
    runs: dict[Kind, Runs] = {}
    image_order: dict[Dtype, ImageOrder] = {}

    @model_validator(mode="after")
    def _capability(self) -> EnginePart:
        """Hold the description of the units together: nothing that follows from nothing, nothing said twice."""
        if not self.peak and not self.units:
            raise ValueError("an engine needs `peak`, or `units` with `cores`, `clock` and `vector`")
        scalar = [kind for kind, figure in self.runs.items() if figure.value.number == "scalar"]
        for key in ("cores", "clock", "vector"):
            if self.units and getattr(self, key) is None:
                raise ValueError(f"`units` without `{key}`: the peak is cores * clock * elements a vector * units * 2")
            if getattr(self, key) is not None and not self.units and not (key == "vector" and scalar):
                raise ValueError(f"`{key}` without `units`: nothing follows from it")
        if scalar and self.vector is None:
            raise ValueError(f"`runs.{scalar[0]}` is scalar: without `vector` no efficiency follows from that")
        for dtype in self.units:
            if dtype in self.peak:
                raise ValueError(f"{dtype} has a peak and `units`; give one of them")
            if self.vector is not None and self.vector.value.number < BITS[dtype]:
                raise ValueError(f"a vector of {self.vector.value.text} is narrower than an element of {dtype}")
        for key in self.efficiency:
            kind = key.partition("_")[0]
            if kind in self.runs and (text := self.runs[kind].value.text) != "vector":
                raise ValueError(f"`efficiency.{key}` and `runs.{kind}` = {text!r} exclude each other")
        return self

    def derived_peak(self) -> dict[str, int]:
        """FLOP/s of each type of `units`: cores * clock * elements of a vector * multiply-add units * 2."""
        if self.cores is None or self.clock is None or self.vector is None:
            return {}
        rate, width = self.cores.value.number * self.clock.value.number, self.vector.value.number
        return {dtype: rate * (width // BITS[dtype]) * figure.value.number * 2 for dtype, figure in self.units.items()}

    def transposed(self) -> tuple[str, ...]:
        """The types in which it convolves images with channels last alone, in the order of `STAND_INS`."""
        orders = {dtype: figure.value.number for dtype, figure in self.image_order.items()}
        return tuple(dtype for dtype in STAND_INS if orders.get(dtype) == "channels_last")

    def unit_of(self, kind: str) -> str:
        """With what it runs a kind of op, one of `UNITS`."""
        figure = self.runs.get(kind, self.runs.get("default"))
        return "vector" if figure is None else str(figure.value.number)


class LinkPart(Sourced):
    """One direction between two tiers, or with `peer` from each device's tier to that of each other device.

    from: a tier
    to: a tier
    peer: `true`: from each device's tier to every other device's (appears when `devices` > 1)
    rate: time of a copy alone = `fixed` + bytes / `rate`
    fixed: time per copy
    copy_engines: how many copies run at once; further ones queue (default 1)
    egress: peer links only: what one device can send, and what it can receive, over all of them together
    energy: energy of a byte copied
    codec: bytes per second, counted before compression, at which its copy engines compress, and restore what was
        compressed (cDMA); leave it out where they cannot
    """

    start: Annotated[TierName, Field(alias="from")]
    end: Annotated[TierName, Field(alias="to")]
    peer: StrictBool = False
    rate: Rate
    fixed: Time
    copy_engines: Count | None = None
    egress: Rate | None = None
    energy: Energy | None = None
    codec: Rate | None = None


class PoolPart(Sourced):
    """Bandwidth that links and engines share.

    per_device: `true` where each device has its own such pool
    devices: how many devices are behind one such pool, as behind a PCIe switch (default: all that there are)
    duplex: `"factors"` (default): as given; `"half"`: one direction at a time, rates from the links; `"full"`: no pool
    rate: charged bytes per second; without it the pool only has factors
    charges: by link or engine: bytes that it charges the pool per byte of payload
    factors: by link or engine: fraction of its own rate that remains while another member is active
    """

    per_device: StrictBool = False
    devices: Count | None = None
    duplex: Duplex = "factors"
    rate: Rate | None = None
    charges: dict[UserName, Share] = {}
    factors: dict[UserName, Part] = {}

    @model_validator(mode="after")
    def _shares_something(self) -> PoolPart:
        if self.devices is not None and self.per_device:
            raise ValueError("a pool of its own for each device has no `devices`")
        if not self.charges and not self.factors:
            raise ValueError("a pool needs `charges` or `factors`, which name its members")
        if self.rate is None and not self.factors and self.duplex == "factors":
            raise ValueError("a pool without a rate needs `factors`, or `duplex`")
        return self


class NetworkPart(Sourced):
    """What joins nodes to a larger machine; layouts over more devices than a node has use it.

    per_node: devices of a node, a whole number; a layout makes as many as it takes
    nodes: how many nodes it joins at most, a whole number (default: any)
    rate: per device, each way
    fixed: time per message
    """

    per_node: Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES)]
    nodes: Annotated[int, Field(strict=True, ge=1)] | None = None
    rate: Rate
    fixed: Time


class FitPart(Sourced):
    """Mean relative errors of the time model against measurements, or `"no measurement"`.

    op_time: of ops
    transfer_time: of copies
    """

    op_time: Residual
    transfer_time: Residual


class DispatchPart(Sourced):
    """What a thread of the CPU takes under one software stack, in `dispatch.toml`.

    forward: per op of forward
    backward: per op of backward
    update: per op of the optimizer
    once: before the first op of an iteration
    """

    forward: Time
    backward: Time
    update: Time
    once: Time | None = None


class ProfileFile(Model):
    """A whole file.

    description: one line: what machine it is
    notes: list of text: what to know when reading results
    devices: whole number (default 1)
    sharers: how many such devices use at the same time what they share, of which one is simulated: it has its share of
        shared tiers, engines and pools (default 1: all of them)
    op_time: `"sum"` (default): an op takes its arithmetic and its bytes one after the other, which fits measurements;
        or `"bound"`: the longer of the two, with whole waves of blocks where `cores` are stated (DeepCuts' bound)
    dispatch: who launches ops: `"none"` (default): nobody that a device waits for; `"cpu"`: a thread of the CPU that
        runs ahead, under the stack of the trace; `"graphs"`: a captured iteration, replayed;
        `sim/hardware/dispatch.toml` states what each takes
    dispatch_scale: how many times as long that CPU takes as the one that was measured (default 1)
    tiers: memories, see below
    engines: what runs ops
    links: what copies
    pools: what links and engines share
    networks: what joins nodes
    fit: how far times are from measurements
    """

    description: Annotated[str, Field(min_length=1)]
    notes: tuple[str, ...] = ()
    devices: Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES)] = 1
    sharers: Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES)] = 1
    op_time: OpTime = "sum"
    dispatch: Dispatching = "none"
    dispatch_scale: Scale = Quantity(Fraction(1), "1")
    tiers: Annotated[dict[PartName, TierPart], Field(min_length=1)]
    engines: Annotated[dict[PartName, EnginePart], Field(min_length=1)]
    links: dict[PartName, LinkPart] = {}
    pools: dict[PartName, PoolPart] = {}
    networks: dict[PartName, NetworkPart] = {}
    fit: FitPart

    def facts(self) -> Iterator[Fact]:
        """Every figure with its path, source and standing, as written, in the order of the schema."""
        for group in ("tiers", "engines", "links", "pools", "networks"):
            for name, part in getattr(self, group).items():
                for path, figure in part.figures():
                    yield Fact(f"{group}.{name}.{path}", figure.value.text, figure.source, figure.standing)
        for path, figure in self.fit.figures():
            yield Fact(f"fit.{path}", figure.value.text, figure.source, figure.standing)


PARTS: Mapping[str, type[Sourced]] = {
    "tiers": TierPart,
    "engines": EnginePart,
    "links": LinkPart,
    "pools": PoolPart,
    "networks": NetworkPart,
    "fit": FitPart,
}


def keys(model: type[Model]) -> list[str]:
    """The keys that a part may have, as they are written in a file."""
    return [field.alias or name for name, field in model.model_fields.items()]
