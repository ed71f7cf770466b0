"""`secure-train sign`."""

from __future__ import annotations

from pathlib import Path

import click

from supplychain.artifact import Manifest, differences, read_manifest
from supplychain.cli import options
from supplychain.cli.output import Console
from supplychain.trust.again import sign_again
from supplychain.trust.signers import add_signature, sign_artifact


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--kind", metavar="KIND", help="What it is: dataset, tokenizer, checkpoint, or a kind of your policy's."
)
@click.option(
    "--add",
    is_flag=True,
    help="Add your signature to the manifest that is there, after comparing every byte with it.",
)
@click.option(
    "--update",
    is_flag=True,
    help="Hash only what changed since you signed it with --update, by the files' times; see docs/trust.md.",
)
@click.option("--paranoid", is_flag=True, help="With --update: hash every file all the same.")
@options.key_option
@options.json_option
def command(
    folder: Path,
    kind: str | None,
    add: bool,
    update: bool,
    paranoid: bool,
    key: str | None,
    as_json: bool,
) -> int:
    """Make the manifest of FOLDER and sign it: every file, by name, size, mode and digest.

    Nothing is left out, and there is no way to leave something out. Signatures that stood there covered
    another manifest and are replaced.
    """
    console = Console(as_json)
    if add == bool(kind):
        raise click.UsageError("Give the folder a --kind, or --add a signature to a manifest that is there.")
    if (update and add) or (paranoid and not update):
        raise click.UsageError("--update goes with --kind, and --paranoid with --update.")
    signer = options.signer(key)
    same = 0
    with console.progress(f"signing {folder}") as progress:
        if kind and update:
            manifest, same = sign_again(folder, kind, signer, paranoid=paranoid, progress=progress)
        elif kind:
            manifest = sign_artifact(folder, kind, signer, progress=progress)
        else:
            manifest = Manifest.parse(read_manifest(folder), where=str(folder))
            found = differences(folder, manifest, progress=progress)
            if found:
                for error in found[1:]:
                    console.error(error)
                raise found[0]
            add_signature(folder, manifest, signer)
    console.text(
        f"{folder}: {manifest.kind}, {len(manifest.files)} files, {manifest.total_bytes} bytes, "
        f"sha256:{manifest.digest}"
    )
    if update:
        console.text(f"  {same} files are as they were, {len(manifest.files) - same} were hashed")
    console.text(f"  signed by {signer.public.name} (sha256:{signer.public.identifier})")
    console.answer(
        "sign",
        0,
        folder=str(folder),
        kind=manifest.kind,
        manifest=manifest.digest,
        signer=signer.public.identifier,
        unchanged=same,
    )
    return 0
