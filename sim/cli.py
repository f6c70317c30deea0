"""The command line: assembles the commands, and turns errors into one line each and an exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, NoReturn

import typer

from sim.commands import advise, applying, explain, lists, measure, report, runs, sweeps, traces
from sim.commands.declaring import Command, Group

TRACEBACK = "TIERSIM_TRACEBACK"
"""The environment variable that shows where a fault of this program happened."""


class _Stoppable(Group):
    """The commands; Ctrl-C in one of them is typer's `Abort`, where typer itself would return 130 without a word."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command. Raises Abort on Ctrl-C."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


app = typer.Typer(
    cls=_Stoppable,
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Compare memory policies for training on accelerators that you do not have.",
)
COMMANDS: tuple[Callable[..., None], ...] = (
    *(runs.demo, advise.advise, runs.run, runs.compare, sweeps.sweep, report.report, runs.check),
    *(advise.largest_batch, advise.smallest_budget, advise.search, applying.export, explain.explain),
    *(lists.profiles, lists.policies, lists.models),
    *(measure.calibrate, measure.validate),
)
for command in COMMANDS:
    app.command(cls=Command)(command)
SUBCOMMANDS: Mapping[str, Any] = {"cls": Group, "no_args_is_help": True, "rich_markup_mode": None}
on_traces = typer.Typer(**SUBCOMMANDS, help="Build, import, capture and inspect traces.")
ON_TRACES: tuple[Callable[..., None], ...] = (
    *(traces.build, traces.show, traces.import_),
    *(traces.capture, traces.export),
)
for command in ON_TRACES:
    on_traces.command(command.__name__.rstrip("_"), cls=Command)(command)
app.add_typer(on_traces, name="trace")
ON_RESULTS: tuple[Callable[..., None], ...] = (sweeps.list_, sweeps.show, sweeps.export, sweeps.query)
on_results = typer.Typer(**SUBCOMMANDS, help="Inspect the results of sweeps.")
for command in ON_RESULTS:
    on_results.command(command.__name__.rstrip("_"), cls=Command)(command)
app.add_typer(on_results, name="results")


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from sim.engine import is_compiled

        print(f"tiersim {version('tiersim')}{' (compiled engine)' if is_compiled() else ''}")
        raise typer.Exit


@app.callback()
def tiersim(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Compare memory policies for training on accelerators that you do not have."""


def program() -> NoReturn:
    """Run the command line in a process of its own, which ends whatever a policy does. See `main`."""
    from sim.limits import end, end_where_stuck

    end_where_stuck(status=1)
    try:
        main()
    except SystemExit as error:
        with suppress(OSError):
            sys.stdout.flush()
        end(int(error.code or 0))


def main() -> NoReturn:
    """Run the command line.

    Exits with 0 when done, 1 if infeasible or failed, 2 for wrong usage; each error is one line on standard error.
    """
    from sim.foreign_text import printed_safely

    with printed_safely():
        code = _status()
    sys.exit(code)


@cache
def parser() -> Any:
    """All commands, as they are parsed; they are built once, for that takes longer than many a command."""
    return typer.main.get_command(app)


def _status() -> int:
    """Run the command that was typed; returns the exit status."""
    from sim.commands.mistakes import explained
    from sim.deprecation import told_on_stderr
    from sim.errors import Deadlock, IllegalPlan, Infeasible, PolicyFailed, TiersimError
    from sim.foreign_text import printable, shortened

    try:
        with told_on_stderr():
            code = parser()(standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as error:
        code = error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        print("tiersim: stopped", file=sys.stderr)
        code = 130
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands alone: what it can do
            print(error.format_message())
        else:
            print(f"tiersim: {shortened(printable(explained(error)))}", file=sys.stderr)
        code = 2
    except TiersimError as error:
        *others, last = getattr(error, "problems", None) or (str(error),)
        for problem in (*others, "; ".join([last, *getattr(error, "__notes__", ())])):
            print(f"tiersim: {shortened(printable(problem))}", file=sys.stderr)
        code = 1 if isinstance(error, (Infeasible, Deadlock, IllegalPlan, PolicyFailed)) else 2
    except BrokenPipeError:  # whoever read has read enough; nothing is left to be said to them
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)
        code = 141
    except OSError as error:
        print(
            f"tiersim: {shortened(printable(str(error.filename or 'file')))}: {error.strerror or error}",
            file=sys.stderr,
        )
        code = 2
    except MemoryError:
        print("tiersim: this machine's memory is not enough for that", file=sys.stderr)
        code = 1
    except Exception as error:
        _report_fault(error)
        code = 1
    return code or 0


def _report_fault(error: Exception) -> None:
    """The last net: a fault of this program in one line, with what to do about it; the traceback where asked."""
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1]
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    said = " ".join(str(error).split())[:200]
    print(
        f"tiersim: {type(error).__name__}: {said} ({os.path.basename(last.filename)}, line {last.lineno}): a fault of "
        f"tiersim. Please report it as CONTRIBUTING.md says, with the command and its files; {TRACEBACK}=1 shows more",
        file=sys.stderr,
    )
