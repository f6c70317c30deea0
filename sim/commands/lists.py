"""profiles, policies and models."""

from __future__ import annotations

from typing import Annotated

import typer

from sim.commands.mistakes import ALL
from sim.commands.options import Json


def _one(ctx: typer.Context, name: str | None) -> str | None:
    """A name that may be given. Raises BadParameter for a word that asks for all."""
    if name in ALL:
        raise typer.BadParameter(f"{name!r}: `tiersim {ctx.info_name}` alone lists all")
    return name


def profiles(
    name: Annotated[str | None, typer.Argument(help="a profile's name or file", callback=_one)] = None,
    toml: Annotated[bool, typer.Option("--toml", help="print the file, as a start for one's own")] = False,
    json: Json = False,
) -> None:
    """List the hardware profiles, or print one.

    Every figure stands with its source and its standing.
    """
    from sim.report.listings import profile_listing, profile_page

    if toml and name:
        from sim.hardware.profile import profile_text

        print(profile_text(name), end="")
    else:
        print(profile_page(name, json) if name else profile_listing(json))


def policies(
    name: Annotated[str | None, typer.Argument(help="a policy's name", callback=_one)] = None,
    new: Annotated[str | None, typer.Option(help="write a policy of that name and its test here")] = None,
    kind: Annotated[
        str, typer.Option(help="with --new: recompute, offload, or online, which evicts under pressure")
    ] = "recompute",
    family: Annotated[
        str | None,
        typer.Option(
            help="with --new: its family, by default the kind's; an online policy of recompute drops, not moves"
        ),
    ] = None,
    in_tree: Annotated[
        bool, typer.Option("--in-tree", help="with --new: in the folders of a checkout, with its row of coverage")
    ] = False,
    json: Json = False,
) -> None:
    """List the policies, print one, or start one's own.

    Of one it prints what it does and its parameters.
    """
    from sim.report.listings import policy_listing, policy_page

    if new is None and (in_tree or family or kind != "recompute"):
        raise typer.BadParameter("--kind, --family and --in-tree go with --new NAME")
    if new is not None:
        from sim.scaffold import write_policy

        for path in write_policy(new, kind=kind, family=family, in_tree=in_tree):
            print(path)
    else:
        print(policy_page(name, json) if name else policy_listing(json))


def models(
    name: Annotated[str | None, typer.Argument(help="a model's name", callback=_one)] = None,
    json: Json = False,
) -> None:
    """List the models, or print one.

    Its configuration and size, with their source.
    """
    from sim.report.listings import model_listing, model_page

    print(model_page(name, json) if name else model_listing(json))
