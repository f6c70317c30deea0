"""The keys of every machine-readable output, pinned: scripts read them, so a change of them is deliberate.

Whoever changes a key changes this file with it, and says so in CHANGELOG.md.
"""

import csv
import gzip
import json

import pytest

from sim.analysis.figures import figures
from tests.test_cli import tiersim

SUMMARY = (
    *("peak_bytes", "mean_bytes", "peak_by_tier", "reserved_bytes", "capacity_bytes", "fits", "complete", "devices"),
    *("makespan_ns", "compute_ns", "recompute_ns", "codec_ns", "stall_ns", "idle_ns", "recompute_overhead"),
    *("moved_bytes", "overlap", "overlap_by_link", "samples_per_s", "tokens_per_s", "mfu", "hfu", "saved_fraction"),
    *("mean_saved_fraction", "overhead", "unlimited_ns", "unlimited_run", "energy_j", "counters"),
    "pinning_ns",
    "priced_as",
    *("bubble", "exposed_ns", "binding_device", "stands_for", "fullest_bytes"),
    "exchanged_bytes",
)
BOUND = ("bound_ns", "above_bound", "outside_bound")
ROW = ("policy", "fidelity", "manages", *SUMMARY, "plan_s", *BOUND)
REFUSED = ("policy", "fidelity", "manages", "fits", "refusal", "error", "floor_bytes", "holders", "full")
ABOUT = ("asked", "assumed", "files", "platform", "trace", "workload")
ASKED = (
    *("profile", "policy", "model", "batch", "seq", "precision", "attention", "optimizer", "loss", "micro_batches"),
    *("budget", "seed", "bound"),
)
TRAITS = (
    *(
        "online",
        "recomputes",
        "moves",
        "rewrites",
        "lossless",
        "optimal",
        "needs",
        "solver",
        "warm_up",
        "manages",
        "yields",
    ),
    *("splits_batch", "plans_ahead", "plans_from", "saves"),
)
PROFILE = ("name", "description", "devices", "home_tier", "home_bytes", "peak", "peak_dtype", "host_link", "assumed")
PARAMETER = ("name", "type", "default", "expected", "choices", "bounds")
CELLS = (
    *("cell", "model", "batch", "sequence", "precision", "profile", "policy", "budget", "seed"),
    *("status", "fits", "error", "fidelity", "budget_bytes", "unconstrained_peak_bytes", "floor_bytes"),
    *(key for key in SUMMARY if key not in ("fits", "reserved_bytes")),  # no tier of that machine reserves
    *("time_limited", "refusal"),
)
JOB = ("--profile", "a100_40_pcie", "--model", "gpt2", "--batch", "1", "--seq", "16")


TOLD = ("over_fastest", "indistinguishable")
ERRORS = ("time", "policies")
ERROR = ("what", "on", "bar", "rows", "sources", "median", "nine_tenths", "worst", "measured_on")


def answer(*words, capsys):
    return json.loads(tiersim(*words, "--json", capsys=capsys)[1])


def test_every_figure_of_a_summary_is_pinned():
    new = [key for key in figures() if key not in SUMMARY]
    assert not new, f"a new figure: put {', '.join(new)} at the end of SUMMARY here, and into CHANGELOG.md"
    assert tuple(figures()) == SUMMARY


def test_run(capsys):
    assert tuple(answer("run", *JOB, capsys=capsys)) == ("policy", *SUMMARY, *BOUND, "measured_error")
    assert tuple(answer("run", *JOB, "--no-bound", capsys=capsys)) == ("policy", *SUMMARY, "measured_error")
    found = answer("run", *JOB, "--analysis", "traffic", capsys=capsys)
    assert tuple(found) == ("policy", *SUMMARY, *BOUND, "measured_error", "analyses")
    assert tuple(found["measured_error"]) == ERRORS
    assert all(tuple(error) == ERROR for error in found["measured_error"].values())
    assert tuple(found["analyses"]["traffic"][0]) == ("link", "bytes", "transfers", "busy_ns", "busy", "utilisation")


def test_compare(capsys):
    fits, refused = answer("compare", *JOB, "--policies", "keep_all,min_cut", "--budget", "1 GB", capsys=capsys)
    assert tuple(refused) == tuple(fits) == REFUSED
    (row,) = answer("compare", *JOB, "--policies", "keep_all", capsys=capsys)
    assert tuple(row) == (*ROW, *TOLD, "measured_error")
    assert tuple(row["measured_error"]) == ERRORS


def test_files_of_a_run_and_of_a_comparison(capsys, tmp_path):
    tiersim("run", *JOB, "--budget", "30 GB", "-o", str(tmp_path / "run"), capsys=capsys)
    saved = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert tuple(saved) == (*ABOUT, *SUMMARY, "measured_error")
    assert tuple(saved["asked"]) == ASKED
    with gzip.open(tmp_path / "run" / "view.json.gz") as file:
        assert tuple(json.load(file)["view"]["figures"]) == SUMMARY
    tiersim("compare", *JOB, "--policies", "keep_all,full_recompute", "-o", str(tmp_path / "two"), capsys=capsys)
    saved = json.loads((tmp_path / "two" / "comparison.json").read_text())
    assert tuple(saved) == (*ABOUT, "rows", "left_out", "bound", "measured_error")
    assert all(tuple(row) == (*ROW, *TOLD) for row in saved["rows"])
    head = next(csv.reader((tmp_path / "two" / "comparison.csv").open()))
    assert tuple(dict.fromkeys(name.partition(".")[0] for name in head)) == tuple(
        key for key in ROW if saved["rows"][0][key] != {} or saved["rows"][1][key] != {}
    )


def test_a_sweep(capsys, tmp_path):
    study = tmp_path / "study.toml"
    axes = 'model = "gpt2"\nsequence = 16\nprofile = "a100_40_pcie"\nbudget = ["all", "1 GB"]\n'
    study.write_text(axes + 'policy = ["keep_all", "swap_all"]\n')
    tiersim("sweep", str(study), "-o", str(tmp_path / "out"), "--jobs", "1", capsys=capsys)
    tiersim("results", "export", str(tmp_path / "out"), "--csv", str(tmp_path / "cells.csv"), capsys=capsys)
    head, *rows = csv.reader((tmp_path / "cells.csv").open())
    assert len(rows) == 4
    assert tuple(dict.fromkeys(name.partition(".")[0] for name in head)) == CELLS


@pytest.mark.parametrize(("words", "keys"), [
    (("policies",), ("name", "family", "fidelity", "slow", *TRAITS, "parameters", "doc")),
    (("policies", "delta"), ("name", "family", "fidelity", "slow", *TRAITS, "parameters", "doc")),
    (("profiles",), PROFILE),
    (("profiles", "mt3000_survey"), ("name", "description", "notes", "fit", "figures", "mapping")),
])  # fmt: skip
def test_listings(words, keys, capsys):
    found = answer(*words, capsys=capsys)
    for record in found if isinstance(found, list) else [found]:
        assert tuple(record) == keys
        assert all(tuple(each) == PARAMETER for each in record.get("parameters", ()))
        assert all(tuple(each) == ("path", "value", "source", "standing") for each in record.get("figures", ()))


def test_models_and_traces(capsys, tmp_path):
    every = answer("models", capsys=capsys)
    assert len({tuple(record) for record in every}) == 1
    assert tuple(answer("models", "gpt2", capsys=capsys)) == tuple(every[0])
    assert {"name", "family", "layers", "hidden", "parameters", "aliases", "source"} < set(every[0])
    path = str(tmp_path / "t.jsonl")
    words = ("trace", "build", "--model", "gpt2", "--batch", "1", "--seq", "16", "-o", path)
    assert tuple(answer(*words, capsys=capsys)) == ("path", "hash")
    assert tuple(answer("trace", "show", path, capsys=capsys)) == (
        *(
            "ops",
            "tensors",
            "devices",
            "flops",
            "ops_by_phase",
            "ops_by_kind",
            "bytes_by_role",
            "hash",
            "meta",
            "lacks",
        ),
    )
