"""Options that several commands share, and the objects made from them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

import typer

from sim.commands.declaring import Option


def _readable(budget: str | None) -> str | None:
    """A budget as it was given, if it is one: a size above zero or a part of the unconstrained peak."""
    if budget is None:
        return None
    from sim.errors import UnitError
    from sim.units import parse_bytes, parse_share

    hint = ""
    try:
        if (parse_share(budget) or parse_bytes(budget)) > 0:
            return budget
    except UnitError as error:
        _, found, rest = str(error).partition(" (did you mean ")
        hint = found + rest
    wanted = "a size above zero with its unit, such as '7.5 GB', or a part of the unconstrained peak, such as '80%'"
    raise typer.BadParameter(f"{budget!r}: expected {wanted}{hint}")


PROFILE = Option("profile", Annotated[str, typer.Option(help="hardware profile: a name or a TOML file")])
MODEL = Option(
    "model",
    Annotated[str | None, typer.Option(help="model name, any Hugging Face config.json, or FILE.py:FUNCTION")],
    None,
)
TRACE = Option("trace", Annotated[str | None, typer.Option("--trace", help="trace file, instead of a model")], None)
BATCH = Option("batch", Annotated[int, typer.Option(help="samples per iteration")], 1)
SEQ = Option("seq", Annotated[int, typer.Option("--seq", "--sequence", help="tokens per sample")], 1024)
PRECISION = Option("precision", Annotated[str, typer.Option(help="{precision}")], "amp_bf16")
ATTENTION = Option("attention", Annotated[str, typer.Option(help="{attention}")], "sdpa")
SELECTED_HELP = "share of elements that conditions on values keep: 0.25, or by place: rpn.py=0.5,*=0.1; default: none"
SELECTED = Option("selected", Annotated[str | None, typer.Option(help=SELECTED_HELP)], None)
AXES = (
    BATCH,
    SEQ,
    PRECISION,
    ATTENTION,
    Option("optimizer", Annotated[str, typer.Option(help="{optimizer}")], "adamw_foreach"),
    Option("loss", Annotated[str, typer.Option(help="{loss}")], "torch"),
    Option("stack", Annotated[str | None, typer.Option(help="{stack}; default: eager")], None),
    Option(
        "dropout", Annotated[float | None, typer.Option(help="dropout probability; default: the model's own")], None
    ),
    Option("micro_batches", Annotated[int, typer.Option(help="micro-batches whose gradients are summed")], 1),
    Option(
        "frozen",
        Annotated[
            str | None,
            typer.Option(
                help="weights that are not trained: wte,h[0-5] or *.weight; default: none, with adapters all others"
            ),
        ],
        None,
    ),
    Option(
        "frozen_dtype",
        Annotated[
            str | None, typer.Option(help="type of frozen weights: {frozen_dtype}; default: that of the trained ones")
        ],
        None,
    ),
    Option("lora_rank", Annotated[int | None, typer.Option(help="rank of LoRA's adapters; default: none")], None),
    Option(
        "lora_targets",
        Annotated[
            str | None,
            typer.Option(help="linear layers with adapters: q_proj,v_proj or all-linear; default: queries and values"),
        ],
        None,
    ),
    Option("lora_dropout", Annotated[float | None, typer.Option(help="dropout before adapters; default: 0")], None),
    Option(
        "generate",
        Annotated[
            int | None,
            typer.Option(help="inference: tokens to generate after a prompt of --seq tokens; default: a training step"),
        ],
        None,
    ),
    SELECTED,
)
"""Options from which a model's trace is made; `workloads.transformer` says what each means."""

WORKLOAD = (MODEL, TRACE, *AXES)
"""The options that choose what is computed."""

MADE_OF = tuple(option.name for option in (MODEL, *AXES))
"""Options that a trace file has already settled."""

WORDS = {"seq": "sequence"}
"""Axes that have another name in `transformer` and in studies."""

LAYOUT = (
    Option(
        "devices",
        Annotated[int | None, typer.Option(help="devices in all; replicas are made of those beyond --tp and --pp")],
        None,
    ),
    Option("dp", Annotated[int | None, typer.Option(help="replicas of the model; default: 1")], None),
    Option("tp", Annotated[int | None, typer.Option(help="ranks that divide each layer; default: 1")], None),
    Option(
        "sequence_parallel",
        Annotated[bool | None, typer.Option("--sequence-parallel", help="with --tp: divide by tokens what it leaves")],
        None,
    ),
    Option(
        "async_sums",
        Annotated[
            bool | None,
            typer.Option("--async-sums", help="with --tp: backward gathers and sums beside products, as Megatron-LM"),
        ],
        None,
    ),
    Option(
        "keep_gathered",
        Annotated[
            bool | None,
            typer.Option(
                "--keep-gathered",
                help="with --sequence-parallel: keep gathered inputs for backward, as DTensor; else gather them again",
            ),
        ],
        None,
    ),
    Option(
        "sum_each",
        Annotated[
            bool | None,
            typer.Option(
                "--sum-each", help="with --tp: each linear layer copies its input and sums for itself, as Paddle"
            ),
        ],
        None,
    ),
    Option(
        "by_tokens",
        Annotated[
            str | None,
            typer.Option(
                "--by-tokens",
                help="with --sequence-parallel: parts of layers with all weights on each rank, 'mlp, attention 0-3'",
            ),
        ],
        None,
    ),
    Option(
        "cp",
        Annotated[int | None, typer.Option(help="ranks that divide the tokens, with all weights on each; default: 1")],
        None,
    ),
    Option(
        "ring_attention",
        Annotated[
            bool | None,
            typer.Option("--ring-attention", help="with --cp: keys and values go round in blocks; else gathered"),
        ],
        None,
    ),
    Option(
        "ep",
        Annotated[int | None, typer.Option(help="of the replicas, how many divide the experts; default: 1")],
        None,
    ),
    Option(
        "zero",
        Annotated[
            int | None,
            typer.Option(
                help="ZeRO: replicas keep a part of 1: the optimizer states, 2: and gradients, 3: and weights"
            ),
        ],
        None,
    ),
    Option(
        "shard_within",
        Annotated[
            int | None,
            typer.Option(help="with --zero: replicas (a node's) that divide it, as FSDP's HYBRID_SHARD; default: all"),
        ],
        None,
    ),
    Option(
        "reshard",
        Annotated[
            bool | None,
            typer.Option("--reshard/--no-reshard", help="with --zero 3: free gathered weights after forward"),
        ],
        None,
    ),
    Option(
        "reshard_to",
        Annotated[
            int | None,
            typer.Option(help="with --zero 3: among how many replicas weights stay divided until backward"),
        ],
        None,
    ),
    Option(
        "prefetch",
        Annotated[
            int | None,
            typer.Option(help="with --zero 3: how many layers, or modules, ahead weights are gathered; default: 1"),
        ],
        None,
    ),
    Option(
        "gathered",
        Annotated[
            str | None,
            typer.Option(help="with --zero 3: what is gathered together, layer (default) or module, as DeepSpeed does"),
        ],
        None,
    ),
    Option(
        "gradient_buffer",
        Annotated[
            bool | None,
            typer.Option("--gradient-buffer", help="gradients in buffers that exist from the start, as Megatron-LM's"),
        ],
        None,
    ),
    Option(
        "barrier",
        Annotated[
            bool | None,
            typer.Option("--barrier/--no-barrier", help="with --dp: whether a step waits for all gradients; default"),
        ],
        None,
    ),
    Option(
        "bucket",
        Annotated[
            str | None,
            typer.Option(help='with --dp: gradients summed together, "25 MiB", or ddp: as PyTorch; default: per layer'),
        ],
        None,
    ),
    Option("pp", Annotated[int | None, typer.Option(help="stages of a pipeline over devices; default: 1")], None),
    Option("schedule", Annotated[str | None, typer.Option(help="of the pipeline: {schedule}; default: 1f1b")], None),
    Option(
        "chunks",
        Annotated[int | None, typer.Option(help="parts of the model per device, of interleaved; default: 2")],
        None,
    ),
    Option(
        "stage_layers",
        Annotated[
            str | None,
            typer.Option(
                help="layers of each part: 3,3,2; balanced: the slowest as fast as can be; dapple: all; default: equal"
            ),
        ],
        None,
    ),
)
"""Options that divide a trace among devices; with them --micro-batches is how many go through the pipeline."""
NEGATED = ("reshard", "barrier")
"""Options that say something where they are False: what they turn off is usual."""

BUDGET = Option(
    "budget",
    Annotated[
        str | None,
        typer.Option(
            callback=_readable,
            help='bytes of the device, "7.5 GB", or with a batch a part of the unconstrained peak, "80%"; default: '
            "the capacity",
        ),
    ],
    None,
)
SET = Option(
    "set_",
    Annotated[
        list[str] | None,
        typer.Option("--set", help='change a figure: tiers.hbm.bandwidth="300 GB/s"; may be given more than once'),
    ],
    None,
)
PARAM = Option(
    "param",
    Annotated[
        list[str] | None,
        typer.Option("-p", "--param", help="policy parameter: heuristic=lru; may be given more than once"),
    ],
    None,
)
SEED = Option("seed", Annotated[int, typer.Option(help="seed of everything random", min=0)], 0)
REPLAY = (
    SEED,
    Option("iterations", Annotated[int | None, typer.Option(help="iterations to run; the last one is reported")], None),
    Option(
        "recompute_limit",
        Annotated[
            float | None,
            typer.Option(
                min=0,
                help="recomputation, as a multiple of the trace's ideal time, beyond which a run counts as thrashing; "
                "0: no limit",
            ),
        ],
        None,
    ),
)
"""The options of a replay."""

OUT = Option(
    "out", Annotated[str | None, typer.Option("-o", "--out", help="folder for tables, figures and the timeline")], None
)
JSON = Option(
    "json",
    Annotated[bool, typer.Option("--json", help="machine-readable output on standard output, and nothing else")],
    False,
)
JOBS = Option("jobs", Annotated[int | None, typer.Option(help="worker processes; default: one per core")], None)
TRUST = Option(
    "trust",
    Annotated[
        bool,
        typer.Option(
            "--trust", help="use the files that the folder names: its own policies' programs, profiles, traces, models"
        ),
    ],
    False,
)
Json, Jobs, Trusting = JSON.type, JOBS.type, TRUST.type


BY_ITSELF = ("balanced", "dapple")
"""What finds the layers of stages by itself."""


def _numbers(key: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        from sim.errors import closest_name

        wanted = f"expected numbers such as 3,3,2, {' or '.join(BY_ITSELF)}"
        raise typer.BadParameter(f"--{key} {text!r}: {wanted}{closest_name(text, BY_ITSELF)}") from None


def job_of(options: dict[str, Any]) -> tuple[Any, Any]:
    """The platform and the trace that the options describe, the trace divided as they say."""
    given = {option.name: options[option.name] for option in LAYOUT if options.get(option.name) is not None}
    if not given:
        return platform_of(options["profile"], options["set_"]), workload(options)
    from sim.layout import lay_out, to_layout, with_devices
    from workloads.stacks import after_division

    if text := given.pop("stage_layers", None):
        given["layers"] = text if text in BY_ITSELF else _numbers("stage-layers", text)
    layout = to_layout(with_devices({**given, "micro_batches": options["micro_batches"]}))
    options = {**options, "micro_batches": 1, "divided": True}
    if kernels := after_division(options["stack"], layout.tp * layout.cp * layout.ep):
        options["stack"] = None
    changes = overrides(options["set_"]) or None
    trace, platform = lay_out(workload(options), options["profile"], layout, overrides=changes, kernels=kernels)
    return platform, trace


def workload(options: dict[str, Any]) -> Any:
    """The trace that the options describe.

    options["ctx"], if present, knows which of them were given; options["chosen"] names those that the command chose.
    """
    if options["trace"]:
        if "ctx" in options:
            _refuse_axes(options["ctx"], {"stack", *({"micro_batches"} if "divided" in options else ())})
        from workloads import load_trace
        from workloads.stacks import as_workload

        return as_workload(load_trace(options["trace"]), "eager" if options["stack"] is None else options["stack"])
    from workloads.steps import is_reference, training_step

    if not options["model"]:
        raise typer.BadParameter("give --model NAME or --trace FILE")
    axes = {WORDS.get(axis.name, axis.name): options[axis.name] for axis in AXES}
    if is_reference(options["model"]):  # it has defaults of its own
        axes = {WORDS.get(name, name): options[name] for name in _given(options)}
    return training_step(options["model"], **{key: value for key, value in axes.items() if value is not None})


def _given(options: dict[str, Any]) -> list[str]:
    """The axes of a model that were given on the command line, or that the command chose, and not as in the default."""
    if "ctx" not in options:  # a saved run, which has those alone
        chosen = {axis.name for axis in AXES if options.get(axis.name) is not None}
    else:
        sources = {axis.name: options["ctx"].get_parameter_source(axis.name) for axis in AXES}
        chosen = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        chosen |= set(options.get("chosen", ()))
    return [a.name for a in AXES if a.name in chosen and (a in (BATCH, SEQ) or options[a.name] != a.default)]


def _not_given(options: dict[str, Any]) -> set[str]:
    """The axes of which a function has its own."""
    return {axis.name for axis in AXES} - set(_given(options))


def _refuse_axes(ctx: typer.Context, but: Collection[str]) -> None:
    for option in ctx.command.params:
        source = ctx.get_parameter_source(str(option.name))
        if option.name in MADE_OF and option.name not in but and source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"{option.opts[0]}: the workload of a --trace file is fixed; give one or the other"
            )


def budget_of(budget: str | None, trace: Any, platform: Any) -> int | None:
    """The bytes of a budget, None where none is given."""
    from sim.experiment import budget_of as bytes_of

    return None if budget is None else bytes_of(budget, trace, platform)


def platform_of(profile: str, changes: list[str] | None) -> Any:
    """The platform of a profile, with the figures of `--set` changed."""
    from sim.hardware.profile import load_profile

    return load_profile(profile, overrides=overrides(changes) or None)


def overrides(changes: list[str] | None) -> dict[str, str]:
    """The figures that `--set` changes, by path."""
    found = {}
    for change in changes or ():
        path, equals, value = change.partition("=")
        if not equals:
            raise typer.BadParameter(f'--set {change!r}: expected PATH=VALUE, as in tiers.hbm.bandwidth="300 GB/s"')
        found[path.strip()] = value.strip()
    return found


def names_of(policies: str | None) -> list[str] | None:
    """The policies and compositions that a list with commas names, "all" being every policy; None for no list."""
    if policies is None:
        return None
    if policies == "all":
        from sim.policies import names

        return list(names())
    from sim.policies.writing import listed

    found = listed(policies)
    if not found:
        raise typer.BadParameter(f"the list of policies {policies!r} names none")
    return found


def parameters(pairs: list[str] | None) -> dict[str, Any]:
    """Policy parameters from `NAME=VALUE`, the values as JSON or else as text."""
    import json

    found = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"-p {pair!r}: expected NAME=VALUE")
        try:
            found[key] = json.loads(text)
        except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, brackets without end
            found[key] = {"True": True, "False": False, "None": None}.get(text, text)
    return found


def say(text: str) -> None:
    """Print a line of progress on a terminal; nothing in a pipe."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def command_line() -> str:
    """The command that reproduces this one."""
    import shlex

    return shlex.join(["tiersim", *sys.argv[1:]])


def command_with(verb: str, asked: Mapping[str, Any]) -> str:
    """The command line with these options."""
    import shlex

    words = ["tiersim", verb]
    for key, value in asked.items():
        option = {"param": "-p", "set_": "--set"}.get(key, f"--{key.replace('_', '-')}")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool):
                words.append(option if each else f"--no-{option.removeprefix('--')}")
            else:
                words += [option, str(each)]
    return shlex.join(words)


def files_of(asked: Mapping[str, Any], policies: Iterable[str]) -> list[Any]:
    """The files that a saved run names: its profile, its trace or model, and those of its policies."""
    from sim.foreign import model_files, policy_files, profile_files, trace_files

    named = {key: [asked[key]] if asked.get(key) else [] for key in ("profile", "trace", "model")}
    models = [] if named["trace"] else named["model"]
    return [
        *profile_files(named["profile"]),
        *trace_files(named["trace"]),
        *model_files(models),
        *policy_files(dict.fromkeys(policies)),
    ]


def about_run(options: dict[str, Any], platform: Any, trace: Any, policies: Iterable[str]) -> dict[str, Any]:
    """The provenance of a file of results: options, platform, trace, sums of files, and assumed figures.

    policies: the names of those that ran.
    """
    from sim.foreign import sums_of
    from workloads.steps import is_reference

    beside = (
        "ctx",
        "out",
        "json",
        "jobs",
        "figures",
        "time_limit",
        "most_actions",
        *(MADE_OF if options["trace"] else ()),
        *(_not_given(options) if is_reference(options.get("model")) else ()),
    )
    said = {k: value for k, value in options.items() if value is not None and k not in beside}
    asked = {k: value for k, value in said.items() if value is not False or k in NEGATED}
    assumed = {fact.path: fact.text for fact in platform.assumed}
    return {
        "asked": asked,
        "assumed": assumed,
        "files": sums_of(files_of(asked, policies)),
        "platform": platform.name,
        "trace": trace.content_hash,
        "workload": dict(trace.meta),
    }


def limit_of(recompute_limit: float | None) -> dict[str, Any]:
    """The limit on recomputation as arguments of `simulate`: none if it was not given, None for 0 (no limit)."""
    return {} if recompute_limit is None else {"recompute_limit": recompute_limit or None}
