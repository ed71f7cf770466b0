"""The bill of materials of a dataset: what it was made from, with which tokenizer, in which proportions.

Plain dictionaries, because the library has no model of data. The digest is that of the signed manifest, which
binds every shard; what the preparation did not record (licence, who collected it, consent) is named as
unknown, never invented.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass

from packageurl import PackageURL

from sbom import document
from sbom.document import Document
from sbom.environment import component, metadata
from sbom.inventory import clean


@dataclass(frozen=True)
class Source:
    """A file or corpus that a dataset was made from; counts as text."""

    name: str
    sha256: str
    documents: str
    size: str


@dataclass(frozen=True)
class Dataset:
    """A signed dataset. `manifest` is the sha256 of its manifest, `signers` who vouch for it; `settings` is
    how it was prepared.
    """

    name: str
    manifest: str
    documents: str = ""
    tokens: str = ""
    vocabulary: str = ""
    tokenizer: str = ""
    splits: Sequence[tuple[str, str]] = ()  # name and tokens
    sources: Sequence[Source] = ()
    settings: Sequence[tuple[str, str]] = ()
    signers: Sequence[str] = ()
    verified: bool = False


def dataset_bom(
    data: Dataset, *, time: dt.datetime, tool_version: str, authors: Sequence[str] = (), spec: str = "1.6"
) -> Document:
    """The BOM of one dataset."""
    root = dataset_component(data, "dataset")
    refs = [source["bom-ref"] for source in root["components"]] if "components" in root else []
    content: Document = {
        "metadata": metadata(root, "post-build", authors, tool_version),
        "components": [],
        "dependencies": [{"ref": "dataset", "dependsOn": refs} if refs else {"ref": "dataset"}],
        "compositions": [{"aggregate": "complete" if refs else "unknown", "assemblies": ["dataset"]}],
    }
    return document.finish(content, spec, time)


def dataset_component(data: Dataset, ref: str) -> Document:
    """The data component, with its sources nested in it."""
    about = [
        ("verified", "true" if data.verified else "false"),
        ("documents", data.documents),
        ("tokens", data.tokens),
        ("vocabulary", data.vocabulary),
        ("tokenizer:sha256", data.tokenizer),
        *((f"split:{name}", f"{tokens} tokens") for name, tokens in data.splits),
        *((f"preparation:{name}", value) for name, value in data.settings),
        *(("signed-by", signer) for signer in data.signers),
    ]
    sources = [
        component(
            "data",
            f"{ref}#source-{number}",
            clean(source.name, 200),
            source.sha256[:16],
            hashes=[("SHA-256", source.sha256)],
            purl=_purl(source.name, source.sha256),
            properties=[("documents", source.documents), ("bytes", source.size)],
            data=[{"type": "dataset", "name": clean(source.name, 200)}],
        )
        for number, source in enumerate(data.sources, 1)
    ]
    unknown = ["collection", "consent", *([] if sources else ["sources"])]
    return component(
        "data",
        ref,
        clean(data.name, 200),
        data.manifest[:16],
        hashes=[("SHA-256", data.manifest)],
        purl=_purl(data.name, data.manifest),
        properties=about,
        unknown=unknown,
        data=[{"type": "dataset", "name": clean(data.name, 200)}],
        components=sources,
    )


def _purl(name: str, sha256: str) -> str:
    return PackageURL(
        "generic", None, clean(name, 200), sha256[:16], {"checksum": f"sha256:{sha256}"}
    ).to_string()
