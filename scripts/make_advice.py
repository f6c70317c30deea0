"""Holds what `tiersim advise` chooses against an exhaustive search, and puts the table into its page.

python scripts/make_advice.py            write the table from the data
python scripts/make_advice.py --check    say whether it is current; exit status 1 where it is not
python scripts/make_advice.py --measure  search first, whatever of the data is missing; hours; with --slower=3 on
                                         processors of which other work takes two thirds

The exhaustive search runs everything that `advise` promises to search, with each number of micro-batches, each run for
up to `LIMIT_S`. It shares the simulator with `advise`, but none of its choices: neither order, bounds nor limits.
On models cut to a few layers the search of `advise` has no limit, and is timed by the processor time of its search in
one process, which what else the machine does leaves alone. On whole models `advise` is asked as users ask it.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_demo import replaced

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "advice.json"
PAGE = ROOT / "docs" / "how-to" / "get-advice.md"
LIMIT_S, WHOLE_S = 20, 6
"""Seconds of processor time that a run of the exhaustive search may take, on cut and on whole models."""
STEP = 0.01
"""The part by which the exhaustive search asks for less memory."""
SECONDS = 60
"""Seconds that users give `advise`."""
GPT: Mapping[str, Any] = {"model_type": "gpt2", "n_positions": 1024, "vocab_size": 50257}
LLAMA2 = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 4096, "intermediate_size": 11008,
          "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
          "tie_word_embeddings": False, "rms_norm_eps": 1e-5}  # fmt: skip
XL4 = {**GPT, "n_layer": 4, "n_embd": 1600, "n_head": 25}
MEDIUM6 = {**GPT, "n_layer": 6, "n_embd": 1024, "n_head": 16}
LARGE3 = {**GPT, "n_layer": 3, "n_embd": 1280, "n_head": 20}
SMALL2 = {**GPT, "n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 8192}
SMALL3 = {**GPT, "n_layer": 3, "n_embd": 512, "n_head": 8, "vocab_size": 12000}
BERT3 = {"model_type": "bert", "num_hidden_layers": 3, "hidden_size": 1024, "num_attention_heads": 16,
         "intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512}  # fmt: skip
MIXTRAL2 = {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 3584,
            "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 4096,
            "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False,
            "rms_norm_eps": 1e-5}  # fmt: skip
WHOLE = {"micro_batches": 1}

CASES: Mapping[str, Mapping[str, Any]] = {
    "GPT-2 XL, 4 layers, 70 %": {"model": XL4, "profile": "a100_40_pcie", "batch": 8, "budget": 8688310198, **WHOLE},
    "GPT-2 XL, 4 layers, 45 %": {"model": XL4, "profile": "a100_40_pcie", "batch": 8, "budget": 5585342270, **WHOLE},
    "GPT-2 XL, 4 layers, slow link": {"model": XL4, "profile": "pcie_domestic_low", "batch": 8, "budget": 7447123027,
                                      **WHOLE},
    "GPT-2 XL, 4 layers, little above its state": {"model": XL4, "profile": "a100_40_pcie", "batch": 2,
                                                   "budget": 3500000000, **WHOLE},
    "GPT-2 medium, 6 layers": {"model": MEDIUM6, "profile": "mt3000_survey", "batch": 4, "budget": 3874164412, **WHOLE},
    "BERT-large, 3 layers": {"model": BERT3, "profile": "v100_32", "batch": 8, "sequence": 512, "budget": 1422726068,
                             **WHOLE},
    "GPT-2 large, 3 layers": {"model": LARGE3, "profile": "gh200", "batch": 4, "budget": 3362159352, **WHOLE},
    "Mixtral, 2 small layers": {"model": MIXTRAL2, "profile": "a100_40_pcie", "batch": 2, "budget": 2014448073,
                                **WHOLE},
    "Llama 2, 2 layers, state too large": {"model": LLAMA2, "profile": "a100_80_sxm",
                                           "batch": 2, "sequence": 2048, "budget": 6669180928},
}  # fmt: skip
"""Questions in which something has to be chosen, on models cut to a few layers, so that everything can be run. The
first five were looked at while the search was written, the others not."""


UNCUT: Mapping[str, Mapping[str, Any]] = {
    "GPT-2 on all of a zone": {"model": "gpt2", "profile": "mt3000_survey", "batch": 8, "sequence": 1024, **WHOLE},
    "GPT-2, 45 %": {"model": "gpt2", "profile": "a100_40_pcie", "batch": 8, "sequence": 1024, "budget": 6000000000,
                    **WHOLE},
    "BERT-base, little above its state": {"model": "bert-base", "profile": "v100_32", "batch": 16, "sequence": 512,
                                          "precision": "amp_fp16", "budget": 3000000000, **WHOLE},
    "BERT-large, little above its state": {"model": "bert-large", "profile": "ascend_910b", "batch": 8, "sequence": 512,
                                           "budget": 6500000000, **WHOLE},
    "Llama 1B, state too large": {"model": "llama-1b", "profile": "a100_40_pcie", "batch": 1, "sequence": 1024,
                                  "budget": 16000000000, **WHOLE},
    "ResNet-50, 35 %": {"net": "resnet-50", "profile": "v100_32", "batch": 64, "budget": 1936195780},
}  # fmt: skip
"""Questions on whole models, as users ask them; all were looked at while the order of runs was written."""


T5: Mapping[str, Any] = {"model_type": "t5", "d_model": 512, "d_ff": 2048, "d_kv": 64, "num_layers": 6, "num_heads": 8,
                         "vocab_size": 32128, "decoder_start_token_id": 0}  # fmt: skip
VIT: Mapping[str, Any] = {"model_type": "vit", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
                          "num_hidden_layers": 12, "image_size": 224, "patch_size": 16}  # fmt: skip
LLAMA4 = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
          "tie_word_embeddings": True, "rms_norm_eps": 1e-5}  # fmt: skip
MOE: Mapping[str, Any] = {**MIXTRAL2, "num_hidden_layers": 8, "num_local_experts": 8}

TEN = ("keep_all", "selective_recompute", "full_recompute", "hybrid", "dtr", "swap_all", "offload_activations", "rotor",
       "zero_offload + full_recompute", "superoffload + full_recompute")  # fmt: skip
"""Of each kind some, where all layouts are run, too."""

TWELVE = (*TEN, "tso", "optimizer_in_backward + tso")
"""With what saves launches, which matter where kernels are short."""

UNSEEN: Mapping[str, Mapping[str, Any]] = {
    "Llama 2 7B, state too large": {"model": "llama2-7b", "profile": "gh200", "batch": 1, "sequence": 2048, **WHOLE},
    "Mixtral, 8 small layers, state too large": {"model": MOE, "profile": "h100", "batch": 4, "sequence": 1024,
                                                 "budget": 11000000000, **WHOLE},
    "ViT-base, 63 %": {"model": VIT, "profile": "mt3000_cluster", "batch": 32, "sequence": 1, "budget": 2300000000,
                       **WHOLE},
    "T5-small, 46 %": {"model": T5, "profile": "h100", "batch": 32, "sequence": 512, "budget": 10000000000, **WHOLE},
    "GPT-2 medium, 6 layers, in micro-batches": {"model": MEDIUM6, "profile": "mt3000_cluster", "batch": 4,
                                                 "sequence": 1024, "budget": 3000000000},
    "GPT-2 medium, 6 layers, least memory": {"model": MEDIUM6, "profile": "gh200", "batch": 4, "sequence": 1024,
                                             "goal": "memory"},
    "BERT-large, 3 layers, fastest batch": {"model": BERT3, "profile": "h100", "sequence": 512, "budget": 1500000000,
                                            **WHOLE},
    "BERT-large, 3 layers, largest batch": {"model": BERT3, "profile": "v100_32", "sequence": 512,
                                            "precision": "amp_fp16", "budget": 3000000000, "goal": "batch", **WHOLE},
    "GPT-2, 2 small layers, ten policies on four devices": {
        "model": SMALL2, "profile": "a100_80_sxm", "batch": 8, "sequence": 256, "budget": 60000000, "devices": 4,
        "policies": TEN},
    "GPT-2, 3 small layers, twelve policies on two devices": {
        "model": SMALL3, "profile": "a100_80_sxm", "batch": 8, "sequence": 256, "budget": 330000000, "devices": 2,
        "policies": TWELVE},
    "Llama 1B, 4 layers, state too large, in micro-batches": {"model": LLAMA4, "profile": "mt3000_survey", "batch": 2,
                                                              "sequence": 1024, "budget": 5000000000},
}  # fmt: skip
"""Questions on models and machines that were not looked at while the search was written, each asked as users ask it."""


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


def question_of(case: Mapping[str, Any], folder: Path) -> Any:
    """The question of a case. folder: where its configuration is written."""
    from sim.advice import Question

    workload = workload_of(case, folder)
    if "net" in case:
        from sim.trace.io import save

        save(workload, folder / "step.trace.json.gz")
        made: dict[str, Any] = {"trace": str(folder / "step.trace.json.gz")}
    else:
        made = {"model": workload, **axes_of(case)}
    goal = made.pop("goal", "throughput")
    more = {"policies": made.pop("policies", None)}
    made.pop("devices", None)
    return Question(
        {"batch": 1, **made} if "model" in made else made, case["profile"], budget=case.get("budget"), goal=goal, **more
    )


def workload_of(case: Mapping[str, Any], folder: Path) -> Any:
    """The workload of a case as `advise` takes it: the name of a model, a configuration, written here, or a trace."""
    if "net" in case:
        from workloads import cnn

        return cnn(case["net"], batch=case["batch"], kernels="cudnn", optimizer="sgd")
    if isinstance(case["model"], str):
        return case["model"]
    config = folder / "config.json"
    config.write_text(json.dumps(case["model"]), encoding="utf-8")
    return str(config)


def axes_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a case's model."""
    left = ("model", "profile", "budget") if "net" not in case else tuple(case)
    return {key: value for key, value in case.items() if key not in left}


def exhaustive(case: Mapping[str, Any], folder: Path, advised: Mapping[str, Any]) -> dict[str, Any]:
    """The best of everything by the goal of a case, with the number of runs by how they ended.

    advised: what `advise` has chosen. For the goal `memory` everything is run with `STEP` less than that needs, and
    once more from there, where something fits; for the goal `batch` with one sample more, without what splits the batch
    itself, which fits any. Of several devices it is run in every layout.
    """
    search = {"memory": _least_memory, "batch": _largest}.get(case.get("goal", ""), _fastest)
    rows = search(case, question_of(case, folder), advised)
    ended = Counter(str(row["status"]) for row in rows)
    top = _top([row for row in rows if row["status"] == "ok"], case)
    return {**(kept_of(top, case) if top else {}), "ended": dict(sorted(ended.items()))}


def _fastest(case: Mapping[str, Any], asked: Any, advised: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    with closing(_pool()) as pool:
        if "batch" in case or "net" in case:
            return _run(case, asked, pool)
        rows: list[Mapping[str, Any]] = []
        for batch in (count for k in range(16) for count in sorted({1 << k, 3 << k >> 1})):
            new = _run(case, asked.changed(batch=batch), pool)
            rows += new
            if not any(row["status"] == "ok" for row in new):
                return rows
        return rows


def _largest(case: Mapping[str, Any], asked: Any, advised: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    most = advised["batch"]
    with closing(_pool()) as pool:
        while True:
            new = _run(case, asked.changed(batch=most + 1), pool)
            rows += new
            if not any(row["status"] == "ok" for row in new):
                return rows
            most += 1


def _in_layouts(case: Mapping[str, Any], asked: Any) -> list[Any]:
    """The question in every layout of its devices."""
    from sim.hardware.profile import load_profile
    from sim.layout_search import layouts

    machine = load_profile(case["profile"])
    per_node = max(machine.networks[0].per_node if machine.networks else case["devices"], machine.devices)
    return [replace(asked, parallel=layout.said()) for layout in layouts(asked.trace, case["devices"], per_node)]


def _least_memory(case: Mapping[str, Any], asked: Any, advised: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = []
    least = advised["peak_bytes"]
    with closing(_pool()) as pool:
        while True:
            new = _run(case, replace(asked, budget=int(least * (1 - STEP))), pool)
            rows += new
            if not (peaks := [row["peak_bytes"] for row in new if row["status"] == "ok"]):
                return rows
            least = min(peaks)


def _pool() -> Any:
    from sim.sweeps.pool import Local, usable_cpus

    return Local(usable_cpus(), bench="sim.advice.bench:Bench", keeps=True)


def _run(case: Mapping[str, Any], asked: Any, pool: Any) -> list[Mapping[str, Any]]:
    """The rows of everything, in each number of micro-batches; a run has `LIMIT_S` or `WHOLE_S` of processor time."""
    from sim.advice.narrowing import divisions
    from sim.policies import load, names
    from sim.sweeps.execute import Job

    every = {name: load(name) for name in names()}
    whole = case.get("goal") == "batch"
    tried = case.get("policies") or everything(
        {name: policy for name, policy in every.items() if not (whole and policy.splits_batch)}
    )
    limit_s = LIMIT_S if any(case is each for each in CASES.values()) else WHOLE_S
    rows: list[Mapping[str, Any]] = []
    for each in _in_layouts(case, asked) if "devices" in case else divisions(asked):
        cells = each.cells(tried, limit_s=60 * limit_s)
        labels = {cell.id: cell.labels for cell in cells}
        for id, outcome in pool.run([Job({**cell.task, "stop_s": limit_s}, cell.group) for cell in cells]):
            rows.append({**labels[id], **outcome["row"]})
            print(f"  {len(rows)} runs", end="\r", file=sys.stderr, flush=True)
    return rows


def _top(rows: Sequence[Mapping[str, Any]], case: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if case.get("goal") == "memory":
        return min(rows, key=lambda row: int(row["peak_bytes"]), default=None)
    if case.get("goal") == "batch":
        return max(rows, key=lambda row: (int(row["batch"]), float(row["samples_per_s"])), default=None)
    return max(rows, key=lambda row: float(row["samples_per_s"]), default=None)


def kept_of(top: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of the best run: its peak or its batch, too, where that was looked for."""
    from sim.advice.trials import micro_batches

    kept = {"policy": top["policy"], "micro_batches": micro_batches(top), "samples_per_s": top["samples_per_s"]}
    if case.get("goal") == "batch":
        kept["goal"] = "batch"
    if case.get("goal") == "memory":
        kept["peak_bytes"] = top["peak_bytes"]
    if "batch" not in case and "net" not in case:
        kept["batch"] = top["batch"]
    if "devices" in case:
        kept["layout"] = top["parallel"]
    return kept


def advised(case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """What the search of advise chooses, how many runs that takes, and how much processor time."""
    from sim.advice.narrowing import Search
    from sim.advice.trials import Trials, best

    asked, began = question_of(case, folder), time.process_time()
    with closing(Trials(3600.0, jobs=1)) as trials:
        rows = Search(asked, trials).run()
    top = best(rows)
    assert top is not None
    spent = time.process_time() - began + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    return {**kept_of(top, case), "runs": len(rows), "processor_s": round(spent, 1)}


def asked_as_users_do(case: Mapping[str, Any], folder: Path, slower: float) -> dict[str, Any]:
    """What `advise` answers in two processes, after how many runs and how much processor time.

    It has `slower` times `SECONDS` on the clock, and no more processor time than users would have in `SECONDS` on two
    free processors, since the machine gave it that much less.
    """
    from sim.advice import advise

    def spent() -> float:
        return time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime

    began, axes = spent(), axes_of(case)
    found = advise(
        workload_of(case, folder), case["profile"], budget=case.get("budget"), jobs=2, seconds=SECONDS * slower, **axes
    )
    top = found.best
    assert top is not None
    took = spent() - began
    if took > 2 * SECONDS:
        raise SystemExit(
            f"{took:.0f} s of processor time, more than two processors have in {SECONDS} s: lower --slower"
        )
    return {**kept_of(top, case), "runs": len(found.rows), "processor_s": round(took, 1)}


def exhaustive_for(entry: Mapping[str, Any], case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`exhaustive` for a case of which `advise` has been asked. entry: what the data have of the case."""
    return exhaustive(case, folder, entry["advised"])


def measure(which: Sequence[str], slower: float) -> None:
    """Search wherever the data has nothing, and keep what was found after each. slower: see `asked_as_users_do`."""
    kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for name in which:
        entry, case = kept.setdefault(name, {}), {**CASES, **UNCUT, **UNSEEN}[name]
        ours = advised if name in CASES else partial(asked_as_users_do, slower=slower)
        searches = {"advised": ours, "exhaustive": partial(exhaustive_for, entry)}
        for key, search in searches.items():
            if key not in entry:
                print(name, key, file=sys.stderr)
                with tempfile.TemporaryDirectory() as folder:
                    entry[key] = search(case, Path(folder))
                DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def lag(entry: Mapping[str, Any]) -> float:
    """How far the choice is from the best of everything, as a fraction; 0 where it is as good.

    By how much fewer samples per second it has, or how much more memory it needs where the least was asked for. Where
    nothing fits what would be better, the exhaustive search has no best run.
    """
    ours, best = entry["advised"], entry["exhaustive"]
    if "policy" not in best:
        return 0.0
    if ours.get("goal") == "batch":
        return float(max(0.0, 1 - ours["batch"] / best["batch"]))
    if "peak_bytes" in best:
        return float(max(0.0, ours["peak_bytes"] / best["peak_bytes"] - 1))
    return float(max(0.0, 1 - ours["samples_per_s"] / best["samples_per_s"]))


def complete(data: Mapping[str, Any]) -> dict[str, Any]:
    """The questions of which both searches have been made."""
    return {name: entry for name, entry in data.items() if {"advised", "exhaustive"} <= entry.keys()}


def page(text: str, data: Mapping[str, Any]) -> str:
    """The page with its tables."""
    for mark, cases in (("exhaustive", CASES), ("whole", UNCUT), ("unseen", UNSEEN)):
        text = replaced(text, table(data, cases), mark)
    return text


def table(data: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]]) -> str:
    """What was found, a row per question."""
    lines = ["| question | advised | after | short by | the best of all | of |",
             "| --- | --- | ---: | ---: | --- | ---: |"]  # fmt: skip
    found = complete(data)
    for name in (name for name in cases if name in found):
        entry = found[name]
        ours, best = entry["advised"], entry["exhaustive"]
        runs = sum(count for how, count in best["ended"].items() if how != "not_applicable")
        late = best["ended"].get("timed_out", 0)
        ended = f", {late} of them ended" if late else ""
        after = f"{ours['runs']} runs, {ours['processor_s']:.0f} s"
        top = _said(best) if "policy" in best else "none is better"
        lines.append(
            f"| {name} on `{cases[name]['profile']}` | {_said(ours)} | {after} | "
            f"{100 * lag(entry):.2g} % | {top} | {runs:,} runs{ended} |"
        )
    return "\n".join(lines) + "\n"


def _said(found: Mapping[str, Any]) -> str:
    count = found["micro_batches"]
    peak = f", {found['peak_bytes'] / 1e9:.3g} GB" if "peak_bytes" in found else ""
    batch = f", batch {found['batch']}" if "batch" in found else ""
    batch += f" ({found['layout']})" if "layout" in found else ""
    return f"`{found['policy']}`" + (f" in {count} micro-batches" if count > 1 else "") + peak + batch


def main() -> None:
    """Measure where asked, write the table, or check it."""
    if "--measure" in sys.argv:
        named = [word for word in sys.argv[1:] if not word.startswith("--")]
        given = [float(word.partition("=")[2]) for word in sys.argv[1:] if word.startswith("--slower=")]
        measure(named or [*CASES, *UNCUT, *UNSEEN], given[0] if given else 1.0)
    text = PAGE.read_text(encoding="utf-8")
    new = page(text, json.loads(DATA.read_text(encoding="utf-8")))
    if "--check" not in sys.argv:
        PAGE.write_text(new, encoding="utf-8")
    print(f"{'stale' if '--check' in sys.argv else 'written'}: {PAGE.name if new != text else 'none'}")
    sys.exit(new != text and "--check" in sys.argv)


if __name__ == "__main__":
    main()
