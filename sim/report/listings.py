"""Lists of profiles, policies, models and traces, as text or as JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.foreign_text import printable
from sim.units import format_bytes, format_flops, format_rate, format_time

if TYPE_CHECKING:
    from sim.hardware.platform import Platform
    from sim.policies.base import Policy
    from sim.trace.graph import Trace

GAP = "  "


def aligned(rows: Sequence[Sequence[str]], *, header: bool = True) -> str:
    """Rows of text in aligned columns; the first row is underlined as a header."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if header:
        lines.insert(1, GAP.join("-" * width for width in widths))
    return "\n".join(lines)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, default=lambda item: sorted(item) if isinstance(item, frozenset) else str(item))


# ---- profiles ------------------------------------------------------------------------------------


def profile_listing(as_json: bool = False) -> str:
    """One line per shipped profile."""
    from sim.hardware.profile import load_profile, profile_names

    platforms = [load_profile(name) for name in profile_names()]
    records = [_profile_record(platform) for platform in platforms]
    if as_json:
        return _json(records)
    rows = [("profile", "devices", "home tier", "peak", "host link", "assumed", "what it is")]
    for r in records:
        home, peak = f"{format_bytes(r['home_bytes'])} {r['home_tier']}", f"{format_flops(r['peak'])} {r['peak_dtype']}"
        rate = format_rate(r["host_link"]) if r["host_link"] else "none"
        rows.append((r["name"], str(r["devices"]), home, peak, rate, str(r["assumed"]), r["description"]))
    return aligned(rows)


def _profile_record(platform: Platform) -> dict[str, Any]:
    """A row of the list.

    home_bytes: usable capacity of the home tier.
    peak: FLOP/s.
    host_link: bytes/s, None without a host.
    """
    home = platform.home(0)
    dtype, peak = max(platform.main_engine(0).peak.items(), key=lambda item: item[1])
    route = platform.route(home.name, platform.host.name) if platform.host else ()
    return {
        "name": platform.name,
        "description": platform.description,
        "devices": platform.devices,
        "home_tier": home.name,
        "home_bytes": home.capacity,
        "peak": peak,
        "peak_dtype": dtype,
        "host_link": min(platform.links[i].rate for i in route) if route else None,
        "assumed": len(platform.assumed),
    }


def profile_page(name: str, as_json: bool = False) -> str:
    """Every figure of a profile with its source and standing, its fit, and notes."""
    from sim.hardware.mapping import mapping_table
    from sim.hardware.profile import fit_error, load_profile, profile_table

    platform = load_profile(name)
    facts = profile_table(platform)
    keys = ("path", "value", "source", "standing")
    fits = {what: fit_error(platform, what) for what in ("op_time", "transfer_time")}
    if as_json:
        figures = [dict(zip(keys, fact, strict=True)) for fact in facts]
        about = {"name": platform.name, "description": platform.description, "notes": list(platform.notes)}
        mapping = [dataclasses.asdict(entry) for entry in mapping_table(platform)]
        return _json({**about, "fit": fits, "figures": figures, "mapping": mapping})
    lines = [f"{platform.name}: {platform.description}", ""]
    lines.append(aligned([("figure", "value", "standing", "source"), *((p, v, st, so) for p, v, so, st in facts)]))
    lines += ["", "instruction mapping table (a kind of op without an entry cannot run on that engine):"]
    lines.append(aligned([("engine", "zone", "kinds", "FLOP/s", "bytes/s", "launch"), *_mapping_rows(platform)]))
    lines.append("")
    for what, error in fits.items():
        said = "no measurement" if error is None else f"mean error {error:.1%} against measurements"
        lines.append(f"fit of {what.replace('_', ' ')}: {said}")
    return "\n".join([*lines, *(f"note: {note}" for note in platform.notes)])


def _mapping_rows(platform: Platform) -> list[tuple[str, ...]]:
    """The mapping table of the first device; kinds that an engine runs alike share a row."""
    from sim.hardware.mapping import mapping_table

    alike: dict[tuple[str, ...], list[str]] = {}
    for entry in mapping_table(platform):
        speeds = " ".join(f"{dtype} {format_flops(flops)}" for dtype, flops in entry.flops.items())
        row = (entry.engine, entry.zone, speeds, format_rate(entry.rate), format_time(entry.launch))
        alike.setdefault(row, []).append(entry.kind)
    return [(row[0], row[1], " ".join(kinds), *row[2:]) for row, kinds in alike.items()]


# ---- policies ------------------------------------------------------------------------------------

OF_TESTS = ("other_values", "unseen", "rarely")
"""Traits that matter to tests only."""

APART = ("fidelity", "slow", "saves", *OF_TESTS)
"""Traits that a policy's page shows elsewhere."""


def traits_shown(record: dict[str, Any]) -> list[tuple[str, Any]]:
    """The other traits that are set."""
    from sim.policies.base import TRAITS

    return [(trait, record[trait]) for trait in TRAITS if trait not in APART and record.get(trait)]


def _trait(found: type[Policy], name: str) -> Any:
    from sim.policies import load

    value = getattr(found, name)
    return getattr(load(found), name) if isinstance(value, property) else value


def policy_record(name: str) -> dict[str, Any]:
    """Family, traits and parameters of a policy; of each parameter the type, and the choices and bounds declared.

    A trait that depends on parameters is that of the defaults.
    """
    from sim.declared import bounds, choices, declarations, expected, plain
    from sim.policies import family, policy_class
    from sim.policies.base import TRAITS, default_of

    found = policy_class(name)
    parameters = []
    for field in dataclasses.fields(found):
        declared = declarations(found)[field.name]
        parameters.append(
            {
                "name": field.name,
                "type": plain(declared),
                "default": repr(default_of(field)),
                "expected": expected(declared),
                "choices": choices(declared),
                "bounds": bounds(declared),
            }
        )
    traits = [trait for trait in TRAITS if trait not in OF_TESTS]
    known = {trait: _trait(found, trait) for trait in traits}
    first = {trait: known.pop(trait) for trait in ("fidelity", "slow")}
    known["saves"] = dict(known["saves"])
    return {
        "name": name,
        "family": family(name),
        **first,
        **known,
        "parameters": parameters,
        "doc": inspect.getdoc(found) or "",
    }


def policy_listing(as_json: bool = False) -> str:
    """One line per policy."""
    from sim.policies import names

    records = [policy_record(name) for name in names()]
    if as_json:
        return _json(records)
    rows = [("policy", "family", "fidelity", "manages", "does", "what it decides")]
    for record in records:
        verbs = ("online", "recomputes", "moves", "rewrites", "optimal")
        does = ", ".join("optimal in its class" if v == "optimal" else v for v in verbs if record.get(v))
        manages = ", ".join(record["manages"]) if isinstance(record.get("manages"), tuple) else "see its page"
        rows.append(
            (record["name"], record["family"], record["fidelity"], manages or "nothing", does or "-", _first(record))
        )
    return aligned(rows)


def policy_page(name: str, as_json: bool = False) -> str:
    """What a policy decides, its source, its parameters and its traits."""
    record = policy_record(name)
    if as_json:
        return _json(record)
    lines = [f"{name} ({record['family']}, fidelity: {record['fidelity']})", "", record["doc"], "", "Parameters:"]
    if record["parameters"]:
        lines.append(
            aligned(
                [(f"  {p['name']}", f"default {p['default']}", p["expected"]) for p in record["parameters"]],
                header=False,
            )
        )
    else:
        lines.append("  none")
    said = [
        f"{trait} = {', '.join(sorted(v)) if isinstance(v, (tuple, frozenset)) else v}"
        for trait, v in traits_shown(record)
    ]
    saves = [f"Declared saving: {kind}: {why}" for kind, why in record["saves"].items()]
    return "\n".join([*lines, "", "Traits: " + "; ".join(said), *saves])


def _first(record: dict[str, Any]) -> str:
    return str(record["doc"]).split("\n", 1)[0]


# ---- models and traces ---------------------------------------------------------------------------


def model_listing(as_json: bool = False) -> str:
    """One line per model."""
    from workloads.models import model_names

    records = [_model_record(name) for name in model_names()]
    if as_json:
        return _json(records)
    sizes = ("layers", "hidden", "heads", "vocabulary", "parameters", "published")
    rows = [("model", "family", *sizes, "also called", "source")]
    for r in records:
        counts = (f"{r[size]:,}" if r[size] else "" for size in sizes)
        rows.append((r["name"], r["family"], *counts, ", ".join(r["aliases"]), r["source"]))
    return aligned(rows)


def _model_record(name: str) -> dict[str, Any]:
    """A model's configuration, with `parameters` as its trace has them and the names that hubs give it."""
    from workloads.models import HUB_NAMES, read_config
    from workloads.parameters import parameter_count

    config = read_config(name)
    aliases = [alias for alias, named in HUB_NAMES.items() if named == config.name]
    return {**dataclasses.asdict(config), "parameters": parameter_count(config), "aliases": aliases}


def model_page(name: str, as_json: bool = False) -> str:
    """One model's configuration and its source."""
    record = _model_record(name)
    if as_json:
        return _json(record)
    return aligned([(key, _listed(value)) for key, value in record.items()], header=False)


def _listed(value: Any) -> str:
    return ", ".join(sorted(value)) if isinstance(value, (list, frozenset)) else str(value)


def trace_page(trace: Trace, as_json: bool = False) -> str:
    """What a trace holds: ops by phase and kind, bytes by role, FLOPs, and its `meta`."""
    ops, tensors = trace.ops, trace.tensors
    by_phase: dict[str, int] = {}
    by_kind: dict[str, int] = {}
    for op in ops:
        by_phase[op.phase] = by_phase.get(op.phase, 0) + 1
        by_kind[op.kind] = by_kind.get(op.kind, 0) + 1
    by_role: dict[str, int] = {}
    for tensor in tensors:
        if tensor.replaces is None:
            by_role[tensor.role] = by_role.get(tensor.role, 0) + tensor.bytes
    flops = sum(trace.op_columns.flops.tolist())  # may be more than 64 bits hold
    record = {
        "ops": len(ops),
        "tensors": len(tensors),
        "devices": trace.devices,
        "flops": flops,
        "ops_by_phase": by_phase,
        "ops_by_kind": by_kind,
        "bytes_by_role": by_role,
        "hash": trace.content_hash,
        "meta": dict(trace.meta),
    }
    lacking = _lacking(trace)
    if as_json:
        return _json({**record, "lacks": lacking})
    rows = [(key, str(value)) for key, value in record.items() if not isinstance(value, dict)]
    rows += [(f"ops {phase}", str(count)) for phase, count in by_phase.items()]
    rows += [(f"bytes {role}", format_bytes(size)) for role, size in by_role.items()]
    rows += [(str(key), str(value)) for key, value in trace.meta.items()]
    rows += [
        (f"no {each['what']}", each["effect"] + (f": {', '.join(each['policies'])}" if each["policies"] else ""))
        for each in lacking
    ]
    return aligned(rows, header=False)


def _lacking(trace: Trace) -> list[dict[str, Any]]:
    """What a trace lacks, each with its effect and the policies that it concerns."""
    from sim.policies import load, names
    from sim.trace.provenance import lacks

    found = lacks(trace)
    policies = {name: load(name) for name in names()} if found else {}
    return [
        {
            "what": lack.what,
            "effect": lack.effect,
            "policies": [
                name
                for name, policy in policies.items()
                if lack.needs in policy.needs or set(policy.manages) & set(lack.manages)
            ],
        }
        for lack in found
    ]
