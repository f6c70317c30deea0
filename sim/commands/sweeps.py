"""sweep and results: thousands of cells and their results."""

from __future__ import annotations

from typing import Annotated

import typer

from sim.commands.options import Jobs, Json, parameters

Folder = Annotated[str, typer.Argument(help="folder of a sweep")]


def sweep(
    study: Annotated[str, typer.Argument(help="study file, TOML; docs/sweeps.md describes its keys")],
    out: Annotated[str | None, typer.Option("-o", "--out", help="folder of results; default: the study's name")] = None,
    jobs: Jobs = None,
    resume: Annotated[bool, typer.Option("--resume", help="run only the cells that have no answer yet")] = False,
    dask: Annotated[
        str | None, typer.Option(help="run on a Dask cluster: address, scheduler file, or slurm (with --jobs)")
    ] = None,
    slurm: Annotated[
        list[str] | None, typer.Option(help="setting of --dask slurm: queue=NAME, submit_command=yhbatch, …")
    ] = None,
    bound: Annotated[
        bool,
        typer.Option("--bound", help="say how near a run is to the least time that any plan of its class takes"),
    ] = False,
    json: Json = False,
) -> None:
    """Run every cell of a study that has no answer yet."""
    from sim.sweeps.command import run_study

    for pair in slurm or ():
        if "=" not in pair:
            raise typer.BadParameter(f"--slurm {pair!r}: expected NAME=VALUE, as in queue=debug")
    code = run_study(
        study, out=out, jobs=jobs, resume=resume, dask=dask, slurm=parameters(slurm), bound=bound, as_json=json
    )
    if code:
        raise typer.Exit(code)


def list_(folder: Folder, json: Json = False) -> None:
    """Print what a folder holds: its study, cells and answers."""
    from sim.sweeps.command import list_results

    print(list_results(folder, as_json=json))


def show(
    folder: Folder,
    cell: Annotated[str | None, typer.Argument(help="a cell's id or its beginning")] = None,
    json: Json = False,
) -> None:
    """Print the cells of a sweep, or all of one."""
    from sim.sweeps.command import show_results

    print(show_results(folder, cell, as_json=json))


def export(
    folder: Folder,
    csv: Annotated[str | None, typer.Option("--csv", help="CSV file to write")] = None,
    parquet: Annotated[str | None, typer.Option("--parquet", help="Parquet file to write; needs pyarrow")] = None,
    timing: Annotated[bool, typer.Option("--timing", help="with wall time, host and date, which vary")] = False,
) -> None:
    """Write the results as one table."""
    from sim.sweeps.command import export_results

    for path in export_results(folder, csv, parquet=parquet, timing=timing):
        print(path)


def query(
    folder: Folder,
    sql: Annotated[str, typer.Argument(help="a SELECT over the table `cells`")],
    time_limit: Annotated[float, typer.Option(help="seconds that it may take; 0: no limit", min=0)] = 60,
    json: Json = False,
) -> None:
    """Query the results with SQL; read-only."""
    from sim.sweeps.command import query_results

    print(query_results(folder, sql, time_limit_s=time_limit, as_json=json))
