"""The schema of a study: the TOML file as a pydantic model; every value is checked, all mistakes are found at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from itertools import product
from math import prod
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, StrictBool, StrictStr

from sim.errors import ProfileError, TiersimError, UnitError, WorkloadError, near
from sim.layout import Layout, to_layout, with_devices
from sim.sweeps.axes import COMPARISON, LAYOUT_KEYS, Chosen, Several
from sim.units import format_time, parse_bytes, parse_time

PERCENT = re.compile(r"(\d{1,4}(?:\.\d{1,6})?)\s*%")
LEAST_LIMIT = 10_000_000  # ns of a cell's time limit; a shorter one would test only the machine
MOST_POLICIES = 10_000
"""The most policies that the lists of one entry are crossed to: each is made and checked."""
MOST_LAYOUTS = 1_000
"""The most layouts that the lists of one table are crossed to."""


# ---- values --------------------------------------------------------------------------------------


def _count(least: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"value {value!r}: expected a whole number of at least {least}")
        return value

    return read


def _one_of(valid: Callable[[], tuple[str, ...]]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in valid():
            hint = near(str(value), valid())
            shown = hint if "did you mean" in hint else ""
            raise ValueError(f"value {value!r}: expected one of {', '.join(valid())}{shown}")
        return value

    return read


def _model(value: Any) -> str:
    from workloads.steps import config_identity

    if not isinstance(value, str):
        raise ValueError(f"value {value!r}: expected the name of a model or of a config.json")
    try:
        config_identity(value)
    except TiersimError as error:
        raise ValueError(f"value {value!r}: expected a model: {error}") from None
    return value


def _profile(value: Any) -> str:
    from sim.hardware.profile import load_profile

    if not isinstance(value, str):
        raise ValueError(f"value {value!r}: expected the name of a hardware profile or of its TOML file")
    try:
        load_profile(value)
    except ProfileError as error:
        raise Several([f"value {value!r}: expected a hardware profile: {line}" for line in error.problems]) from None
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"value {value!r}: expected text")
    return value


def _selected(value: Any) -> Any:
    from workloads.capturing.selections import Selections

    try:
        Selections(value)
    except WorkloadError as error:
        raise ValueError(str(error).removeprefix("selected: ")) from None
    return value


def _dropout(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"value {value!r}: expected a number from 0 up to 1")
    return float(value)


def _limit(value: Any) -> float:
    """A multiple of the ideal time of the trace, 0 for no limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ValueError(
            f"value {value!r}: expected a multiple of the trace's ideal time, such as 20, or 0 for no limit"
        )
    return float(value)


def _skew(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ValueError(f"value {value!r}: expected a number of at least 0")
    return float(value)


def _budget(value: Any) -> int | str | None:
    """Bytes, "62.5%" of the unconstrained peak in its shortest form, or None for all of the device."""
    if value == "all":
        return None
    wanted = "expected a size such as '7 GB', a part of the unconstrained peak such as '50%', or 'all'"
    if not isinstance(value, str):
        raise ValueError(f"value {value!r}: {wanted}")
    part = PERCENT.fullmatch(value.strip())
    if part:
        number = Decimal(part[1])
        if not number:
            raise ValueError(f"value {value!r}: expected more than 0%")
        return f"{number.normalize():f}%"
    try:
        return parse_bytes(value)
    except UnitError as error:
        hint = re.search(r" \(did you mean .*\)", str(error))
        raise ValueError(f"value {value!r}: {wanted}{hint[0] if hint else ''}") from None


def _figure(value: Any) -> str:
    if isinstance(value, (bool, int, float, str)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    raise ValueError(f"value {value!r}: expected a figure as a profile writes it, such as '300 GB/s'")


def _layouts(value: Any) -> list[Layout]:
    """The layouts of one entry: a table of a layout's keys, or `devices` for its replicas; its lists are crossed.

    A list of numbers in `layers` is one value; several are written in two brackets.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"value {value!r}: expected a table such as {{ pp = 4, micro_batches = 8 }}")
    if misspelt := [key for key in value if key not in LAYOUT_KEYS]:
        raise Several([f"there is no key {key!r}{near(str(key), LAYOUT_KEYS)}" for key in misspelt])
    axes = {key: each if isinstance(each, list) else [each] for key, each in value.items()}
    if axes.get("layers") and not any(isinstance(each, (list, str)) for each in axes["layers"]):
        axes["layers"] = [axes["layers"]]
    if (number := prod(map(len, axes.values()))) > MOST_LAYOUTS:
        raise ValueError(f"its lists cross to {number:,} layouts; an entry has {MOST_LAYOUTS:,} at most")
    found: list[Layout] = []
    problems: dict[str, None] = {}
    for values in product(*axes.values()):
        table = dict(zip(axes, values, strict=True))
        try:
            found.append(to_layout(with_devices(table)))
        except TiersimError as error:
            problems[f"value {', '.join(f'{key} {each}' for key, each in table.items())}: {error}"] = None
    if problems or not found:
        raise Several(list(problems) or [f"value {value!r}: expected at least one value of each key"])
    return found


def _policies(value: Any) -> list[Chosen]:
    """The policies of one entry: a name, or a table whose lists are crossed."""
    from sim.policies import load

    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise ValueError(f"value {value!r}: expected the name of a policy, or a table with its name and parameters")
    name = value["name"]
    axes = {k: v if isinstance(v, list) else [v] for k, v in value.items() if k != "name"}
    if (number := prod(map(len, axes.values()))) > MOST_POLICIES:
        raise ValueError(
            f"value {name!r}: its lists cross to {number:,} policies; an entry has {MOST_POLICIES:,} at most"
        )
    found: list[Chosen] = []
    problems: dict[str, None] = {}
    for values in product(*axes.values()):
        parameters = {k: tuple(v) if isinstance(v, list) else v for k, v in zip(axes, values, strict=True)}
        inside = ", ".join(f"{key}={each}" for key, each in parameters.items())
        label = f"{name}({inside})" if inside else name
        try:
            found.append(Chosen(label, name, tuple(parameters.items()), load(name, **parameters)))
        except TiersimError as error:
            problems[f"value {label!r}: {error}"] = None
    if problems or not found:
        raise Several(list(problems) or [f"value {value!r}: expected at least one value of each parameter"])
    return found


def _time_limit(value: Any) -> float:
    """Seconds."""
    try:
        limit = parse_time(value)
    except UnitError as error:
        raise ValueError(str(error)) from None
    if limit < LEAST_LIMIT:
        raise ValueError(f"value {value!r}: expected at least {format_time(LEAST_LIMIT)}")
    return limit / 1e9


def _condition(value: Any) -> Any:
    text = value.strip() if isinstance(value, str) else ""
    if text[:1] in ("<", ">", "!", "=") and text and not COMPARISON.fullmatch(text):
        sign = re.match("<=|>=|<|>|", text)[0] or "!="  # type: ignore[index]
        raise ValueError(f"value {value!r}: expected a number after the sign, as in '{sign} 4'")
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list) and value and all(isinstance(each, (bool, int, float, str)) for each in value):
        return [_condition(each) for each in value]
    raise ValueError(f"value {value!r}: expected a value, a list of values, or a comparison such as '>= 4'")


def _timeline(value: Any) -> bool | list[dict[str, Any]]:
    if isinstance(value, bool):
        return value
    filters = value if isinstance(value, list) else [value]
    if not all(isinstance(each, Mapping) for each in filters):
        raise ValueError(f"value {value!r}: expected true, false, or tables that say which cells")
    return [{key: _condition(asked) for key, asked in each.items()} for each in filters]


def _listed(value: Any) -> Any:
    """A single value is a list of one."""
    if isinstance(value, list) and not value:
        raise ValueError("value []: expected at least one entry")
    return value if isinstance(value, list) else [value]


def _choices(axis: str) -> Callable[[], tuple[str, ...]]:
    """The names that `transformer` knows for one of its arguments."""

    def names() -> tuple[str, ...]:
        from workloads.transformer import CHOICES

        return tuple(CHOICES[axis])

    return names


# ---- the file ------------------------------------------------------------------------------------

Listed = BeforeValidator(_listed)
Counts = Annotated[list[Annotated[int, PlainValidator(_count(1))]], Listed]
Seeds = Annotated[list[Annotated[int, PlainValidator(_count(0))]], Listed]
FrozenDtype = Annotated[str, PlainValidator(_one_of(_choices("frozen_dtype")))]
Condition = Annotated[Any, PlainValidator(_condition)]
Filter = dict[str, Condition]


class StudyFile(BaseModel):
    """A whole file. Each axis is a list or one value; all are crossed."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: StrictStr = ""
    description: StrictStr = ""
    model: Annotated[list[Annotated[str, PlainValidator(_model)]], Listed] | None = None
    trace: Annotated[list[Annotated[str, PlainValidator(_text)]], Listed] | None = None
    batch: Counts = [1]
    sequence: Counts = [1024]
    precision: Annotated[list[Annotated[str, PlainValidator(_one_of(_choices("precision")))]], Listed] = ["amp_bf16"]
    attention: Annotated[list[Annotated[str, PlainValidator(_one_of(_choices("attention")))]], Listed] = ["sdpa"]
    optimizer: Annotated[list[Annotated[str, PlainValidator(_one_of(_choices("optimizer")))]], Listed] = [
        "adamw_foreach"
    ]
    loss: Annotated[list[Annotated[str, PlainValidator(_one_of(_choices("loss")))]], Listed] = ["torch"]
    stack: Annotated[list[Annotated[str, PlainValidator(_one_of(_choices("stack")))]], Listed] | None = None
    dropout: Annotated[list[Annotated[float, PlainValidator(_dropout)]], Listed] | None = None
    micro_batches: Counts = [1]
    frozen: Annotated[list[Annotated[str, PlainValidator(_text)]], Listed] | None = None
    frozen_dtype: Annotated[list[FrozenDtype], Listed] | None = None
    lora_rank: Counts | None = None
    lora_targets: Annotated[list[Annotated[str, PlainValidator(_text)]], Listed] | None = None
    lora_dropout: Annotated[list[Annotated[float, PlainValidator(_dropout)]], Listed] | None = None
    generate: Counts | None = None
    selected: Annotated[list[Annotated[Any, PlainValidator(_selected)]], Listed] | None = None
    routing_seed: Seeds = [0]
    routing_skew: Annotated[list[Annotated[float, PlainValidator(_skew)]], Listed] = [0.0]
    profile: Annotated[list[Annotated[str, PlainValidator(_profile)]], Listed]
    figures: dict[str, Annotated[list[Annotated[str, PlainValidator(_figure)]], Listed]] = {}
    parallel: Annotated[list[Annotated[list[Layout], PlainValidator(_layouts)]], Listed] | None = None
    policy: Annotated[list[Annotated[list[Chosen], PlainValidator(_policies)]], Listed]
    budget: Annotated[list[Annotated[Any, PlainValidator(_budget)]], Listed] = [None]
    seed: Seeds = [0]
    iterations: Counts | None = None
    recompute_limit: Annotated[list[Annotated[float, PlainValidator(_limit)]], Listed] | None = None
    skip: Annotated[list[Filter], Listed] = []
    only: Annotated[list[Filter], Listed] = []
    timeline: Annotated[Any, PlainValidator(_timeline)] = False
    bound: StrictBool = False
    time_limit: Annotated[float | None, PlainValidator(_time_limit)] = None
    most_cells: Annotated[int, PlainValidator(_count(1))] = 1_000_000
