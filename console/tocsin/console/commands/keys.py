"""The command line: `keys`, which sign stops and which a training trusts."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from tocsin.console.commands.options import JsonOption

if TYPE_CHECKING:
    from tocsin.schemas.key_folder import FolderKey

_NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the key: the file is NAME.key.")
]


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    group = typer.Typer(
        help="List, create and rotate the keys that sign stops.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    example = "Example: tocsin keys"
    group.command("list", epilog=f"{example} list --json")(keys_list)
    group.command("new", epilog=f"{example} new night-shift")(keys_new)
    group.command("rotate", epilog=f"{example} rotate --prepare")(keys_rotate)
    group.command("retire", epilog=f"{example} retire 3f9c2a51")(keys_retire)
    app.add_typer(group, name="keys")


def keys_list(json_output: JsonOption = False) -> None:
    """List the keys in ~/.config/tocsin/keys.

    A training of this user obeys stops that one of them has signed, unless TOCSIN_STOP_KEYS or
    stop.trusted_keys names other keys.
    """
    from tocsin.schemas.key_folder import keys_folder, list_keys

    folder = keys_folder(os.environ)
    keys = list_keys(folder)
    if json_output:
        typer.echo(json.dumps({"version": 1, "folder": str(folder), "keys": _as_json(keys)}))
    elif keys:
        width = max(len(key.name) for key in keys)
        for key in keys:
            typer.echo(f"{key.name:{width}}  {key.key_id}  {_MEANINGS[key.role]}")
    else:
        typer.echo(f"{folder}: no key; `tocsin run` and `tocsin actions` create one")


def keys_new(name: _NameArgument = "actions") -> None:
    """Create a key. Never overwrites one."""
    from tocsin.schemas.key_folder import keys_folder, new_key

    folder = keys_folder(os.environ)
    key = new_key(folder, name)
    typer.echo(f"wrote {folder / name}.key, which signs, key id {key.public.key_id}")
    typer.echo(f"wrote {folder / name}.pub: copy it to the machines that train")


def keys_rotate(
    name: _NameArgument = "actions",
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare",
            help="Only create the next key, so that all machines can trust it before it signs.",
        ),
    ] = False,
) -> None:
    """Sign with a new key. The old one stays valid until it is retired.

    With trainings on other machines: rotate --prepare, copy NAME-next.pub to them, rotate, restart
    `tocsin actions`, retire the old key, and remove its public key from the other machines.
    """
    from tocsin.schemas.key_folder import keys_folder, prepare_key, rotate_key

    folder = keys_folder(os.environ)
    if prepare:
        key = prepare_key(folder, name)
        typer.echo(f"wrote {folder / name}-next.pub, key id {key.public.key_id}")
        typer.echo(
            "next: copy it to the machines that train; then run `tocsin keys rotate "
            f"{name}` here. The present key signs until then."
        )
        return
    rotation = rotate_key(folder, name)
    typer.echo(f"{name} signs with key {rotation.new_id} from now on")
    typer.echo(
        f"key {rotation.old_id} stays valid ({rotation.old_public}). A running `tocsin actions` "
        "signs with it until it is restarted."
    )
    typer.echo(f"then: tocsin keys retire {rotation.old_id[:8]}")


def keys_retire(
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the key, or its first digits (four or more).")
    ],
) -> None:
    """Remove a public key. Stops signed by it are then refused."""
    from tocsin.schemas.key_folder import keys_folder, retire_key

    key = retire_key(keys_folder(os.environ), key_id)
    typer.echo(f"removed {key.path}, key id {key.key_id}: trainings refuse stops signed by it")


def _as_json(keys: list[FolderKey]) -> list[dict[str, str]]:
    return [
        {"name": key.name, "id": key.key_id, "role": key.role, "path": str(key.path)}
        for key in keys
    ]


_MEANINGS = {
    "signs": "signs",
    "next": "will sign after `tocsin keys rotate`",
    "retiring": "signed before the last rotation, still valid; `tocsin keys retire` removes it",
    "trusted": "trusted; its private key is not here",
}
