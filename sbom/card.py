"""A model card and transparency report in Markdown, from the same facts as the bill of materials.

Promises that each sentence is a fact of the BOM or says that the fact is not known. Names and values come
from files that others wrote: they are escaped, so that they can neither forge a heading nor a table nor
HTML. The head is what Hugging Face reads from a card.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from sbom.document import PREFIX, Document, components, properties, unknowns
from sbom.inventory import clean

_WORDS = {
    "use": "intended uses and users", "energy": "energy that training took", "parents": "parent models",
    "license": "licence", "producer": "who made it", "collection": "how the data was collected",
    "consent": "consent of those whom the data is about", "sources": "sources of the data", "hash": "digest",
    "version": "version", "identifier": "identifier", "author": "who made this document",
    "datasets": "training data",
}  # fmt: skip


def model_card(document: Document) -> str:
    """The card of the model that `document` (of `sbom.model`) describes."""
    model = document["metadata"]["component"]
    return "".join(f"{line}\n" for line in _lines(document, model))


def _lines(document: Document, model: Document) -> Iterator[str]:
    card, said = model["modelCard"], properties(model)
    data = [item for item in document["components"] if item["bom-ref"].startswith("dataset-")]
    yield from _front_matter(model, data)
    yield f"# {_text(model['name'])}, {_text(model['version'])}"
    yield ""
    verified = said.get(PREFIX + "verified") == ["true"]
    yield (
        "Each statement is taken from what was verified when the model was made; what is not known is said."
        if verified
        else "**Not verified**: this card was made without verifying what it describes."
    )
    yield from _section("Model", [
        ("identity", f"`sha256:{model['hashes'][0]['content']}` (of its signed manifest)"),
        ("architecture", _text(card["modelParameters"]["modelArchitecture"])),
        ("parameters", _known(said, "parameters")),
        ("tokens seen in training", _known(said, "tokens-seen")),
        ("parents", _parents(model, said)),
        ("licence", _licence(model)),
        ("signed by", _text(", ".join(said.get(PREFIX + "signed-by", []))) or "not known"),
    ])  # fmt: skip
    yield from _data(data)
    yield from _training(document, card)
    yield from _evaluation(card)
    yield from _provenance(document, model)
    yield from _unknown(document)


def _front_matter(model: Document, data: Iterable[Document]) -> Iterator[str]:
    """YAML, with JSON strings, which are YAML strings whatever is in them."""
    licences = [item.get("expression") for item in model.get("licenses", []) if item.get("expression")]
    yield "---"
    yield f"license: {json.dumps(licences[0].lower() if licences else 'unknown')}"
    yield "pipeline_tag: text-generation"
    yield "library_name: secure-train"
    yield 'tags: ["llama", "secure-train", "provenance"]'
    yield f"model_name: {json.dumps(model['name'])}"
    yield "metrics: [" + ", ".join(json.dumps(name) for name in _metric_names(model)) + "]"
    yield "datasets_by_digest:"
    for item in data:
        yield f"  - {json.dumps(item['name'] + '@sha256:' + item['hashes'][0]['content'])}"
    yield "---"
    yield ""


def _metric_names(model: Document) -> list[str]:
    analysis = model["modelCard"].get("quantitativeAnalysis", {})
    return list(dict.fromkeys(item["type"] for item in analysis.get("performanceMetrics", [])))


def _section(title: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""
    yield "| | |"
    yield "|---|---|"
    for name, value in rows:
        yield f"| {name} | {value} |"


def _data(data: list[Document]) -> Iterator[str]:
    yield ""
    yield "## Training data"
    if not data:
        yield ""
        yield "Not known."
    for item in data:
        said = properties(item)
        yield ""
        yield f"### {_text(item['name'])}"
        yield ""
        yield f"Identity `sha256:{item['hashes'][0]['content']}`: the signed manifest that binds all."
        yield ""
        yield f"- documents: {_known(said, 'documents')}; tokens: {_known(said, 'tokens')}"
        yield f"- licence: {_licence(item)}"
        yield f"- signed by: {_text(', '.join(said.get(PREFIX + 'signed-by', []))) or 'not known'}"
        for name, values in sorted(said.items()):
            if name.startswith((PREFIX + "split:", PREFIX + "preparation:")):
                yield f"- {_text(name.removeprefix(PREFIX))}: {_text(values[0])}"
        if item.get("components"):
            yield ""
            yield "| source | documents | bytes | sha256 | licence |"
            yield "|---|---|---|---|---|"
        for source in item.get("components", []):
            count = properties(source)
            yield (
                f"| {_text(source['name'])} | {_known(count, 'documents')} | {_known(count, 'bytes')} | "
                f"`{source['hashes'][0]['content']}` | {_licence(source)} |"
            )


def _training(document: Document, card: Document) -> Iterator[str]:
    rows = [
        (_text(item["name"].removeprefix(PREFIX)), _text(item["value"]))
        for item in card.get("properties", [])
    ]
    for formula in document.get("formulation", []):
        for flow in formula["workflows"]:
            rows.insert(0, ("run", _text(flow["uid"])))
            rows.insert(
                1, ("time", f"{flow.get('timeStart', 'not known')} to {flow.get('timeEnd', 'not known')}")
            )
    for item in document["components"]:
        if item["bom-ref"] in ("hardware", "environment", "code", "tokenizer"):
            digest = f" `sha256:{item['hashes'][0]['content']}`" if item.get("hashes") else ""
            rows.append((item["bom-ref"], _text(item["name"]) + digest))
    yield from _section("Training", rows)


def _evaluation(card: Document) -> Iterator[str]:
    measured = card.get("quantitativeAnalysis", {}).get("performanceMetrics", [])
    yield ""
    yield "## Evaluation and limits"
    yield ""
    for item in measured:
        yield f"- {_text(item['type'])} on {_text(item.get('slice', 'unnamed data'))}: {_text(item['value'])}"
    for text in card["considerations"].get("technicalLimitations", []):
        yield f"- {_text(text)}"


def _provenance(document: Document, model: Document) -> Iterator[str]:
    yield ""
    yield "## Provenance"
    yield ""
    links = model.get("externalReferences", [])
    links = links + [link for item in document["components"] for link in item.get("externalReferences", [])]
    if not links:
        yield "No statements are known."
    for link in links:
        digest = link.get("hashes", [{}])[0].get("content", "")
        yield f"- {_text(link.get('comment', link['type']))}: `{_code(link['url'])}` `sha256:{digest}`"
    for claim in document.get("declarations", {}).get("claims", []):
        yield f"- claimed, with evidence: {_text(claim['predicate'])}"


def _unknown(document: Document) -> Iterator[str]:
    yield ""
    yield "## Not known"
    yield ""
    for item in components(document):
        if item["type"] != "file" and (words := sorted(unknowns(item))):
            yield f"- {_text(item['name'])}: {', '.join(_WORDS.get(word, word) for word in words)}"


def _parents(model: Document, said: dict[str, list[str]]) -> str:
    ancestors = model.get("pedigree", {}).get("ancestors", [])
    if ancestors:
        return ", ".join(
            f"{_text(item['name'])} `sha256:{item['hashes'][0]['content']}`" for item in ancestors
        )
    return _known(said, "parents")


def _licence(item: Document) -> str:
    found = [one.get("expression") or one.get("license", {}).get("name") for one in item.get("licenses", [])]
    return _text(", ".join(name for name in found if name)) or "not known"


def _known(said: dict[str, list[str]], name: str) -> str:
    return _text(", ".join(said.get(PREFIX + name, []))) or "not known"


def _text(value: str) -> str:
    """Foreign text for a line or a cell: it stays text."""
    found = clean(value, 500).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return "".join(f"\\{char}" if char in "\\`*_[]|#!" else char for char in found)


def _code(value: str) -> str:
    return clean(value, 500).replace("`", "'")
