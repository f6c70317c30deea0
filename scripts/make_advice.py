"""Holds what `tiersim advise` chooses against an exhaustive search, and puts the table into its page.

python scripts/make_advice.py            write the table from the data
python scripts/make_advice.py --check    say whether it is current; exit status 1 where it is not
python scripts/make_advice.py --measure  search first, whatever of the data is missing; hours

The exhaustive search runs every lossless policy, every pair of one that manages state with one that does not, and
every pair of policies of state, at every batch of a list, each for up to `LIMIT_S`. It shares the simulator with
`advise`, but none of its choices: not its order, its candidates, its bounds or its limits.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_demo import replaced

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "advice.json"
PAGE = ROOT / "docs" / "how-to" / "get-advice.md"
LIMIT_S = 60
BATCHES = tuple(sorted({*range(1, 17), *(k << s for s in range(2, 8) for k in (4, 5, 6, 7))}))
"""Every batch up to 16, then four to each doubling."""
SEVEN = {"model": "llama2-7b", "sequence": 2048, "precision": "mixed_fp16", "batch": 1}

CASES: Mapping[str, Mapping[str, Any]] = {
    "GPT-2 on MT-3000": {"model": "gpt2", "profile": "mt3000_survey", "batch": 8},
    "GPT-2 in 8 GB of an A100": {"model": "gpt2", "profile": "a100_40_pcie", "batch": 8, "budget": "8 GB"},
    "GPT-2 in 8 GB behind a slow link": {"model": "gpt2", "profile": "pcie_domestic_low", "batch": 8, "budget": "8 GB"},
    "GPT-2 medium, state too large": {"model": "gpt2-medium", "profile": "a100_40_pcie", "batch": 2, "budget": "4 GB"},
    "GPT-2 XL on MT-3000": {"model": "gpt2-xl", "profile": "mt3000_survey", "batch": 1},
    "GPT-2, any batch, in 4 GB": {"model": "gpt2", "profile": "a100_40_pcie", "sequence": 512, "budget": "4 GB"},
    "Llama 2 7B on 910B": {**SEVEN, "profile": "ascend_910b"},
    "Llama 2 7B on an A100 80 GB": {**SEVEN, "profile": "a100_80_sxm"},
}
"""Questions of users in which something has to be chosen. Without a batch the search chooses it, too."""


def everything(policies: Mapping[str, Any]) -> list[str]:
    """The space that `advise` promises to search, written down once more. policies: name -> the policy."""
    state = {"weights", "gradients", "optimizer_state"}
    roles = {name: set(policy.manages) for name, policy in policies.items() if policy.lossless and not policy.slow}
    single = [name for name, managed in roles.items() if managed and managed <= state]
    bases = {name: roles[name] for name in single}
    bases |= {f"{a} + {b}": roles[a] | roles[b] for a in single for b in single if a < b and not roles[a] & roles[b]}
    if {"zero_offload", "weight_streaming"} <= {*single}:
        bases["zero_offload(weights=host) + weight_streaming"] = roles["zero_offload"] | roles["weight_streaming"]
    rest = {name: managed for name, managed in roles.items() if name not in single}
    if {"full_recompute", "swap_all"} <= {*rest}:
        rest["full_recompute; checkpoints: swap_all"] = {"activations"}
    stacks = [f"{a} + {b}" for a in bases for b in rest if b != "keep_all" and not bases[a] & rest[b]]
    return [*rest, *bases, *stacks]


def question_of(case: Mapping[str, Any]) -> Any:
    """The question of a case, at one sample where the search chooses the batch."""
    from sim.advice import Question
    from sim.units import parse_bytes

    axes = {key: value for key, value in case.items() if key not in ("profile", "budget")}
    budget = parse_bytes(case["budget"]) if "budget" in case else None
    return Question({"batch": 1, **axes}, case["profile"], budget=budget)


def exhaustive(case: Mapping[str, Any]) -> dict[str, Any]:
    """The fastest of everything, with the number of runs by how they ended."""
    from sim.advice.trials import best, speed
    from sim.policies import load, names
    from sim.sweeps.execute import Job
    from sim.sweeps.pool import Local, usable_cpus

    asked, began = question_of(case), time.monotonic()
    tried = everything({name: load(name) for name in names()})
    top: Mapping[str, Any] | None = None
    ended: Counter[str] = Counter()
    with closing(Local(usable_cpus(), keeps=True)) as pool:
        for batch in [case["batch"]] if "batch" in case else BATCHES:
            cells = asked.changed(batch=batch).cells(tried, limit_s=LIMIT_S)
            labels = {cell.id: cell.labels for cell in cells}
            rows = []
            for id, outcome in pool.run([Job(cell.task, cell.group) for cell in cells]):
                rows.append({**labels[id], **outcome["row"]})
                ended[rows[-1]["status"]] += 1
                print(f"  batch {batch}: {len(rows)} of {len(cells)}", end="\r", file=sys.stderr, flush=True)
            found = best(rows)
            if found is None:  # memory grows with the batch
                break
            if top is None or speed(found) > speed(top):
                top = max((row for row in rows if row["status"] == "ok"), key=speed)
    assert top is not None
    kept = {"policy": top["policy"], "batch": top["batch"], "samples_per_s": top["samples_per_s"]}
    return {**kept, "ended": dict(sorted(ended.items())), "seconds": round(time.monotonic() - began)}


def advised(case: Mapping[str, Any]) -> dict[str, Any]:
    """What advise chooses, and the wall-clock time that it takes."""
    from sim.advice import advise

    began = time.monotonic()
    rest = {key: value for key, value in case.items() if key not in ("model", "profile")}
    advice = advise(case["model"], case["profile"], **rest)
    assert advice.best is not None
    kept = {key: advice.best[key] for key in ("policy", "batch", "samples_per_s")}
    return {**kept, "runs": len(advice.rows), "skipped": advice.skipped, "seconds": round(time.monotonic() - began, 1)}


def measure(which: Sequence[str]) -> None:
    """Search wherever the data has nothing, and keep what was found after each."""
    kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for name in which:
        entry = kept.setdefault(name, {})
        for key, search in (("advised", advised), ("exhaustive", exhaustive)):
            if key not in entry:
                print(name, key, file=sys.stderr)
                entry[key] = search(CASES[name])
                DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def lag(entry: Mapping[str, Any]) -> float:
    """How much slower the choice is than the fastest of everything, as a fraction; 0 where it is as fast."""
    return max(0.0, 1 - entry["advised"]["samples_per_s"] / entry["exhaustive"]["samples_per_s"])


def complete(data: Mapping[str, Any]) -> dict[str, Any]:
    """The questions of which both searches have been made."""
    return {name: entry for name, entry in data.items() if {"advised", "exhaustive"} <= entry.keys()}


def table(data: Mapping[str, Any]) -> str:
    """What was found, a row per question."""
    lines = ["| question | advised | in | slower by | the best of all | of | in |",
             "| --- | --- | ---: | ---: | --- | ---: | ---: |"]  # fmt: skip
    for name, entry in complete(data).items():
        ours, best = entry["advised"], entry["exhaustive"]
        runs = sum(count for how, count in best["ended"].items() if how != "not_applicable")
        lines.append(
            f"| {name} | {_said(ours, name)} | {ours['seconds']:.0f} s | {100 * lag(entry):.2g} % | "
            f"{_said(best, name)} | {runs:,} runs | {best['seconds'] / 60:.0f} min |"
        )
    return "\n".join(lines) + "\n"


def _said(found: Mapping[str, Any], name: str) -> str:
    batch = "" if "batch" in CASES[name] else f", batch {found['batch']}"
    return f"`{found['policy']}`{batch}"


def main() -> None:
    """Measure where asked, write the table, or check it."""
    if "--measure" in sys.argv:
        named = [word for word in sys.argv[1:] if not word.startswith("--")]
        measure(named or list(CASES))
    text = PAGE.read_text(encoding="utf-8")
    new = replaced(text, table(json.loads(DATA.read_text(encoding="utf-8"))), "exhaustive")
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {PAGE.name if new != text else 'none'}")
    sys.exit(new != text and "--check" in sys.argv)


if __name__ == "__main__":
    main()
