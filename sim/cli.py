"""The command line: names in, tables out."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Optional

import typer

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compare memory policies for training on accelerators that are not at hand.",
)
traces = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Build and look at traces.")
app.add_typer(traces, name="trace")

# typer reads these annotations at run time, hence Optional
Profile = Annotated[str, typer.Option(help="hardware profile: a name or a TOML file")]
Model = Annotated[Optional[str], typer.Option(help="model name or Hugging Face config.json")]  # noqa: UP045
TraceFile = Annotated[Optional[str], typer.Option("--trace", help="trace file, instead of a model")]  # noqa: UP045
Batch = Annotated[int, typer.Option(help="samples an iteration")]
Seq = Annotated[int, typer.Option("--seq", "--sequence", help="tokens a sample")]
Precision = Annotated[str, typer.Option(help="fp32, bf16, fp16, amp_bf16, amp_fp16, mixed_bf16, mixed_fp16")]
Attention = Annotated[str, typer.Option(help="eager, sdpa or flash")]
Optimizer = Annotated[str, typer.Option(help="adamw_foreach, adamw_fused, adamw_loop, sgd_momentum")]
Loss = Annotated[str, typer.Option(help="torch, fused or chunked")]
Dropout = Annotated[Optional[float], typer.Option(help="dropout probability; default: the model's own")]  # noqa: UP045
MicroBatches = Annotated[int, typer.Option(help="micro-batches whose gradients are summed")]
Budget = Annotated[Optional[str], typer.Option(help='bytes of the device, "7 GB"; default: all of it')]  # noqa: UP045
Set = Annotated[Optional[list[str]], typer.Option("--set", help='change a figure: tiers.hbm.bandwidth="300 GB/s"')]  # noqa: UP045
Seed = Annotated[int, typer.Option(help="seed of everything random")]
Iterations = Annotated[Optional[int], typer.Option(help="iterations to run; the last one is reported")]  # noqa: UP045
Out = Annotated[Optional[str], typer.Option("-o", "--out", help="folder for tables, figures and the timeline")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="machine-readable output on standard output, and nothing else")]
Parameters = Annotated[Optional[list[str]], typer.Option("-p", "--param", help="policy parameter: heuristic=lru")]  # noqa: UP045


def _workload(options: dict[str, Any]) -> Any:
    """The trace that was asked for."""
    if options["trace"]:
        from sim.trace.io import load

        return load(options["trace"])
    from workloads import transformer

    if not options["model"]:
        raise typer.BadParameter("give --model NAME or --trace FILE")
    more = {} if options["dropout"] is None else {"dropout": options["dropout"]}
    return transformer(
        options["model"],
        batch=options["batch"],
        sequence=options["seq"],
        precision=options["precision"],
        attention=options["attention"],
        optimizer=options["optimizer"],
        loss=options["loss"],
        micro_batches=options["micro_batches"],
        **more,
    )


def _platform(profile: str, changes: list[str] | None) -> Any:
    from sim.hardware.profile import load_profile

    overrides = {}
    for change in changes or ():
        path, equals, value = change.partition("=")
        if not equals:
            raise typer.BadParameter(f'--set {change!r}: expected PATH=VALUE, as in tiers.hbm.bandwidth="300 GB/s"')
        overrides[path.strip()] = value.strip()
    return load_profile(profile, overrides=overrides or None)


def _parameters(pairs: list[str] | None) -> dict[str, Any]:
    import json

    found = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"-p {pair!r}: expected NAME=VALUE")
        try:
            found[key] = json.loads(text)
        except json.JSONDecodeError:
            found[key] = {"True": True, "False": False, "None": None}.get(text, text)
    return found


def _say(text: str) -> None:
    """A line for people who watch; nothing in a pipe."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def _again() -> str:
    import shlex

    return shlex.join(["tiersim", *sys.argv[1:]])


@app.command()
def run(
    profile: Profile,
    policy: Annotated[str, typer.Option(help="policy name or path/to/file.py:Class")] = "keep_all",
    model: Model = None,
    trace: TraceFile = None,
    batch: Batch = 1,
    seq: Seq = 1024,
    precision: Precision = "amp_bf16",
    attention: Attention = "sdpa",
    optimizer: Optimizer = "adamw_foreach",
    loss: Loss = "torch",
    dropout: Dropout = None,
    micro_batches: MicroBatches = 1,
    budget: Budget = None,
    set_: Set = None,
    param: Parameters = None,
    seed: Seed = 0,
    iterations: Iterations = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Run one policy and print what came of it."""
    options = locals()
    from sim.experiment import simulate
    from sim.outputs import open_folder, to_json, write_run
    from sim.report.foot import Foot
    from sim.report.table import print_summary

    folder = open_folder(out) if out else None
    platform, work = _platform(profile, set_), _workload(options)
    result = simulate(work, platform, policy, budget=budget, seed=seed, iterations=iterations, **_parameters(param))
    about = _about(options, platform, work)
    if folder:
        for path in write_run(result, folder, about=about):
            _say(f"wrote {path}")
    if json:
        print(to_json({"policy": policy, **result.summary()}))
    else:
        foot = Foot(result.platform, warm_up=len(result.warm_up), command=_again(), workload=_label(work))
        print_summary({"policy": policy, "fidelity": result.policy.fidelity, **result.summary()}, foot=foot)


@app.command()
def compare(
    profile: Profile,
    model: Model = None,
    trace: TraceFile = None,
    policies: Annotated[Optional[str], typer.Option(help="a,b,…; default: all that apply and plan quickly")] = None,  # noqa: UP045
    batch: Batch = 1,
    seq: Seq = 1024,
    precision: Precision = "amp_bf16",
    attention: Attention = "sdpa",
    optimizer: Optimizer = "adamw_foreach",
    loss: Loss = "torch",
    dropout: Dropout = None,
    micro_batches: MicroBatches = 1,
    budget: Budget = None,
    set_: Set = None,
    seed: Seed = 0,
    iterations: Iterations = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Run many policies on one trace, platform and budget, and print a row for each."""
    options = locals()
    _compare(options, _again())


def _compare(options: dict[str, Any], command: str) -> None:
    from sim.comparison import compare as run_all
    from sim.outputs import open_folder, to_json, write_comparison
    from sim.policies import names
    from sim.report.foot import Foot
    from sim.report.table import comparison_text, print_comparison
    from sim.units import to_bytes

    folder = open_folder(options["out"]) if options["out"] else None
    asked = None
    if options["policies"] == "all":
        asked = list(names())
    elif options["policies"]:
        asked = [name.strip() for name in options["policies"].split(",") if name.strip()]
    platform, work = _platform(options["profile"], options["set_"]), _workload(options)
    comparison = run_all(
        work,
        platform,
        asked,
        budget=options["budget"],
        seed=options["seed"],
        iterations=options["iterations"],
        on_progress=lambda name: _say(f"… {name}"),
    )
    left_out = [f"not run: {name}: {why}" for name, why in comparison.left_out.items()]
    limited = platform if options["budget"] is None else platform.with_budget(to_bytes(options["budget"]))
    warm_up = max((len(result.warm_up) for result in comparison.results.values()), default=0)
    foot = Foot(limited, warm_up=warm_up, command=command, workload=_label(work), notes=tuple(left_out))
    if folder:
        text = comparison_text(comparison.rows, foot=foot)
        for path in write_comparison(comparison, folder, about=_about(options, platform, work), text=text):
            _say(f"wrote {path}")
    if options["json"]:
        print(to_json([dict(row) for row in comparison.rows]))
    else:
        print_comparison(comparison.rows, foot=foot)
    if comparison.failed:
        raise typer.Exit(1)


DEMO = {
    "profile": "mt3000_survey",
    "model": "gpt2-medium",
    "batch": 4,
    "seq": 1024,
    "precision": "amp_bf16",
    "budget": None,
}
"""The demo's job; `docs/demo.md` says why these figures."""


@app.command()
def demo(
    out: Annotated[str, typer.Option("-o", "--out", help="folder for what it writes")] = "tiersim-demo",
    json: Json = False,
) -> None:
    """Compare policies on MT-3000 as the survey describes it: GPT-2 medium, more than its memory holds."""
    defaults = {"trace": None, "policies": None, "attention": "sdpa", "optimizer": "adamw_foreach", "loss": "torch"}
    more = {"dropout": None, "micro_batches": 1, "set_": None, "seed": 0, "iterations": None}
    _compare({**defaults, **more, **DEMO, "out": out, "json": json}, "tiersim demo")
    if not json:
        print(f"\nTables, figures and a timeline for ui.perfetto.dev are in {out}/")


@app.command()
def check(
    policy: Annotated[str, typer.Argument(help="policy name or path/to/file.py:Class")],
    examples: Annotated[int, typer.Option(help="random examples a law")] = 50,
    param: Parameters = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Hold a policy to the law for every policy, on traces that nobody picked by hand."""
    from sim.conformance import check_policy
    from sim.outputs import to_json
    from sim.policies import load

    report = check_policy(load(policy, **_parameters(param)), examples=examples, seed=seed, name=policy)
    print(to_json(report.as_dict()) if json else report.as_text())
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def profiles(
    name: Annotated[Optional[str], typer.Argument(help="a profile's name or file")] = None,  # noqa: UP045
    toml: Annotated[bool, typer.Option("--toml", help="print the file, to start one's own from")] = False,
    json: Json = False,
) -> None:
    """List the hardware profiles, or print one with the source and standing of every figure."""
    from sim.report.listings import profile_listing, profile_page

    if toml and name:
        from sim.hardware.profile import profile_text

        print(profile_text(name), end="")
    else:
        print(profile_page(name, json) if name else profile_listing(json))


@app.command()
def policies(
    name: Annotated[Optional[str], typer.Argument(help="a policy's name")] = None,  # noqa: UP045
    new: Annotated[Optional[str], typer.Option(help="write a policy of that name and its test here")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """List the policies, print what one does and takes, or start one's own."""
    from sim.report.listings import policy_listing, policy_page

    if new:
        from sim.scaffold import write_policy

        for path in write_policy(new):
            print(path)
    else:
        print(policy_page(name, json) if name else policy_listing(json))


@app.command()
def models(
    name: Annotated[Optional[str], typer.Argument(help="a model's name")] = None,  # noqa: UP045
    json: Json = False,
) -> None:
    """List the models, or print one's configuration and size with its source."""
    from sim.report.listings import model_listing, model_page

    print(model_page(name, json) if name else model_listing(json))


@traces.command("build")
def trace_build(
    model: Annotated[str, typer.Option(help="model name or Hugging Face config.json")],
    out: Annotated[str, typer.Option("-o", "--out", help="file to write: .jsonl or .jsonl.gz")],
    batch: Batch = 1,
    seq: Seq = 1024,
    precision: Precision = "amp_bf16",
    attention: Attention = "sdpa",
    optimizer: Optimizer = "adamw_foreach",
    loss: Loss = "torch",
    dropout: Dropout = None,
    micro_batches: MicroBatches = 1,
    json: Json = False,
) -> None:
    """Build a transformer's training trace and save it."""
    from sim.outputs import to_json
    from sim.report.listings import trace_page
    from sim.trace.io import save

    work = _workload({**locals(), "trace": None})
    save(work, out)
    print(trace_page(work, json) if not json else to_json({"path": out, "hash": work.content_hash}))


@traces.command("show")
def trace_show(path: Annotated[str, typer.Argument(help="trace file")], json: Json = False) -> None:
    """Say what is in a trace file."""
    from sim.report.listings import trace_page
    from sim.trace.io import load

    print(trace_page(load(path), json))


def _label(trace: Any) -> str:
    meta = trace.meta
    known = [f"{key} {meta[key]}" for key in ("batch", "sequence", "precision", "attention") if key in meta]
    return ", ".join([str(meta.get("model", "trace")), *known])


def _about(options: dict[str, Any], platform: Any, trace: Any) -> dict[str, Any]:
    asked = {
        key: value for key, value in options.items() if value is not None and key not in ("out", "json", "options")
    }
    return {"asked": asked, "platform": platform.name, "trace": trace.content_hash, "workload": dict(trace.meta)}


def main() -> None:
    """Run the command line: 0 done, 1 infeasible or failed, 2 usage; mistakes are one line each on standard error."""
    from sim.errors import Deadlock, IllegalPlan, Infeasible, TiersimError

    try:
        code = typer.main.get_command(app)(standalone_mode=False)
    except typer.Exit as error:
        code = error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("tiersim: stopped", file=sys.stderr)
        code = 130
    except typer.TyperException as error:
        print(f"tiersim: {error.format_message()}", file=sys.stderr)
        code = 2
    except TiersimError as error:
        for line in str(error).splitlines():
            print(f"tiersim: {line}", file=sys.stderr)
        code = 1 if isinstance(error, (Infeasible, Deadlock, IllegalPlan)) else 2
    except OSError as error:
        print(f"tiersim: {error.filename or 'file'}: {error.strerror}", file=sys.stderr)
        code = 2
    sys.exit(code or 0)
