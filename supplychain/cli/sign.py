"""`secure-train sign`."""

from __future__ import annotations

from pathlib import Path

import click

from supplychain.artifact import Manifest, differences, read_manifest
from supplychain.cli import options
from supplychain.cli.output import Console
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
@options.key_option
@options.json_option
def command(folder: Path, kind: str | None, add: bool, key: str | None, as_json: bool) -> int:
    """Make the manifest of FOLDER and sign it: every file, by name, size, mode and digest.

    Nothing is left out, and there is no way to leave something out. Signatures that stood there covered
    another manifest and are replaced.
    """
    console = Console(as_json)
    if add == bool(kind):
        raise click.UsageError("Give the folder a --kind, or --add a signature to a manifest that is there.")
    signer = options.signer(key)
    with console.progress(f"signing {folder}") as progress:
        if kind:
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
    console.text(f"  signed by {signer.public.name} (sha256:{signer.public.identifier})")
    console.answer(
        "sign",
        0,
        folder=str(folder),
        kind=manifest.kind,
        manifest=manifest.digest,
        signer=signer.public.identifier,
    )
    return 0
