"""`secure-train sbom environment|model|dataset|validate|diff|score|licenses`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from sbom.document import properties
from sbom.sarif import Result
from supplychain import boms
from supplychain.cli import options
from supplychain.cli.output import Console
from supplychain.errors import CODES, SecureTrainError

_FILE = click.Path(path_type=Path)
_out = click.option("-o", "--output", type=_FILE, metavar="FILE", help="Write it there [default: stdout].")
_spec = click.option(
    "--spec", type=click.Choice(["1.6", "1.7"]), default="1.6", show_default=True, help="CycloneDX version."
)
_sarif = click.option("--sarif", type=_FILE, metavar="FILE", help="Also write the findings as SARIF there.")
_author = click.option("--author", "authors", multiple=True, metavar="NAME", help="Who makes this BOM.")


@click.group()
def command() -> None:
    """Write, check and compare bills of materials (CycloneDX).

    With SOURCE_DATE_EPOCH the same inputs give the same bytes.
    """


@command.command()
@options.env_option
@click.option(
    "--lock",
    type=_FILE,
    metavar="FILE",
    help="With --env: the lock that it must have been built from. Alone: what is described.",
)
@_out
@click.option("--format", "form", type=click.Choice(["json", "xml"]), default="json", show_default=True)
@_spec
@_author
@click.option(
    "--manifest",
    metavar="HEX",
    help="Manifest that `env verify` has just passed: only what is read here is hashed again.",
)
@click.option(
    "--unverified", is_flag=True, help="Describe an environment that is not verified; the BOM says so."
)
@click.option("--sign", is_flag=True, help="Also write FILE.sigstore.json, an attestation with this BOM.")
@options.key_option
@options.json_option
def environment(
    environment: Path | None,
    lock: Path | None,
    output: Path | None,
    form: Literal["json", "xml"],
    spec: str,
    authors: tuple[str, ...],
    manifest: str | None,
    unverified: bool,
    sign: bool,
    key: str | None,
    as_json: bool,
) -> int:
    """Describe an environment: every package with hash, licence, producer and true dependencies.

    It is verified first, and refused if anything differs.
    """
    from dataclasses import replace

    from sbom.environment import environment_bom

    console = Console(as_json)
    signer = _signer(sign, unverified, output, key)
    with boms.our_errors():
        inventory, subject = _inventory(console, environment, lock, manifest, unverified)
        named = authors or ((signer.public.name,) if signer else ())
        document = environment_bom(
            inventory.installed,
            replace(inventory.setting, authors=named),
            time=boms.now(),
            tool_version=boms.tool_version(),
            spec=spec,
        )
        if signer and subject is None:
            raise SecureTrainError("ST-M08", "a lock alone is not attested", next_step="name an environment")
        written = boms.write(document, form, output)
        if signer and output and subject:
            boms.attest(document, subject, signer, output)
    return _written(console, "sbom environment", document, written, output, as_json)


def _inventory(
    console: Console, environment: Path | None, lock: Path | None, manifest: str | None, unverified: bool
) -> tuple[boms.Inventory, str | None]:
    """What is to be described, and the digest of the manifest that vouches for it."""
    from supplychain.artifact import Manifest, read_manifest
    from supplychain.environment.verify import find_environment, verify_environment

    pins = boms.read_lock(lock) if lock else None
    if pins and environment is None:
        return boms.locked_inventory(pins), None
    if unverified:
        found = boms.unverified_inventory(environment or find_environment(None))
        return (boms.with_lock(found, pins) if pins else found), None
    prefix = find_environment(environment)
    if manifest is not None:
        found = boms.verified_inventory(prefix, manifest, every_file=False)
        return (boms.with_lock(found, pins) if pins else found), manifest
    digest = Manifest.parse(read_manifest(prefix), where=str(prefix)).digest
    with console.progress(f"verifying {prefix.name}") as progress:
        facts = verify_environment(prefix, digest, lock.read_bytes() if lock else None, progress=progress)
    for finding in facts.findings[1:]:
        console.error(finding)
    facts.require()
    return boms.verified_inventory(prefix, digest, every_file=True), digest


@command.command()
@click.argument("path", type=_FILE)
@_out
@click.option("--card", type=_FILE, metavar="FILE", help="Also write the model card (Markdown) there.")
@_spec
@_author
@options.policy_option
@options.pin_option
@click.option("--unverified", is_flag=True, help="Describe what no policy vouches for; the BOM says so.")
@click.option("--sign", is_flag=True, help="Also write FILE.sigstore.json, an attestation with this BOM.")
@options.key_option
@options.json_option
def model(
    path: Path,
    output: Path | None,
    card: Path | None,
    spec: str,
    authors: tuple[str, ...],
    policy: Path | None,
    pin: str | None,
    unverified: bool,
    sign: bool,
    key: str | None,
    as_json: bool,
) -> int:
    """Describe a checkpoint, or the last one of a run: its data, settings, measurements, statements and
    parents.

    PATH is verified under the policy first: a run to its last input.
    """
    from sbom.card import model_card
    from sbom.model import model_bom
    from supplychain import runbom

    console = Console(as_json)
    signer = _signer(sign, unverified, output, key)
    with boms.our_errors():
        checker = None if unverified else _checker(console, policy, pin)
        facts = runbom.read_model(path.absolute(), checker)
        named = authors or ((signer.public.name,) if signer else ())
        document = model_bom(
            facts, time=boms.now(), tool_version=boms.tool_version(), authors=named, spec=spec
        )
        written = boms.write(document, "json", output)
        if card:
            boms.write_file(card, model_card(document).encode())
        if signer and output:
            boms.attest(document, facts.manifest, signer, output)
    return _written(console, "sbom model", document, written, output, as_json)


@command.command()
@click.argument("path", type=_FILE)
@_out
@_spec
@_author
@options.policy_option
@options.pin_option
@click.option("--unverified", is_flag=True, help="Describe what no policy vouches for; the BOM says so.")
@click.option("--sign", is_flag=True, help="Also write FILE.sigstore.json, an attestation with this BOM.")
@options.key_option
@options.json_option
def dataset(
    path: Path,
    output: Path | None,
    spec: str,
    authors: tuple[str, ...],
    policy: Path | None,
    pin: str | None,
    unverified: bool,
    sign: bool,
    key: str | None,
    as_json: bool,
) -> int:
    """Describe a dataset: its sources by digest, how it was prepared, who signed it. It is verified first."""
    from sbom.dataset import dataset_bom
    from supplychain import runbom

    console = Console(as_json)
    signer = _signer(sign, unverified, output, key)
    with boms.our_errors():
        checker = None if unverified else _checker(console, policy, pin)
        facts = runbom.read_dataset(path.absolute(), checker)
        named = authors or ((signer.public.name,) if signer else ())
        document = dataset_bom(
            facts, time=boms.now(), tool_version=boms.tool_version(), authors=named, spec=spec
        )
        written = boms.write(document, "json", output)
        if signer and output:
            boms.attest(document, facts.manifest, signer, output)
    return _written(console, "sbom dataset", document, written, output, as_json)


def _signer(sign: bool, unverified: bool, output: Path | None, key: str | None) -> Any:
    """Who attests, if anybody: only what was verified, and only beside a file."""
    if not sign:
        return None
    if output is None:
        raise click.UsageError("--sign needs --output FILE, beside which the attestation is written.")
    if unverified:
        raise SecureTrainError(
            "ST-M08", "what was not verified is not attested", next_step="leave out --unverified or --sign"
        )
    return options.signer(key)


def _checker(console: Console, policy: Path | None, pin: str | None) -> Any:
    from supplychain import policy as policies
    from supplychain.lineage import Checker
    from supplychain.trust import roots

    file = options.policy_path(policy)
    return Checker.by_policy(policies.load(file, trusted=roots.policy_keys().list(), pinned=pin))


def _written(
    console: Console, verb: str, document: dict[str, Any], data: bytes, output: Path | None, as_json: bool
) -> int:
    """The answer of a verb that writes a BOM: the BOM itself, or where it lies."""
    if output is None and not as_json:
        click.echo(data.decode(), nl=False)
    root = document["metadata"]["component"]
    if output is not None:
        verified = ", ".join(properties(root).get("secure-train:verified", ["not known"]))
        parts = len(document["components"])
        console.text(f"{output}: {root['name']} {root['version']}, {parts} components, verified: {verified}")
    shown: dict[str, Any] = {} if output else {"bom": document}
    console.answer(verb, 0, file=str(output) if output else None, serial=document["serialNumber"], **shown)
    return 0


@command.command()
@click.argument("file", type=_FILE)
@click.option("--lock", type=_FILE, metavar="FILE", help="Every package that it pins must be there.")
@_sarif
@options.json_option
def validate(file: Path, lock: Path | None, sarif: Path | None, as_json: bool) -> int:
    """Check FILE against the official schema, and for what a schema cannot say: references, purls, hashes,
    the lock.
    """
    console = Console(as_json)
    pins = boms.pinned(boms.read_lock(lock)) if lock else None
    with boms.our_errors():
        from sbom import validate as rules

        document, found, as_written = boms.read(file)
        found = found or rules.validate(document, pins, as_written=as_written)
    code = 0
    for finding in found:
        name = "ST-M02" if finding.rule == "schema" else "ST-M03"
        code = code or CODES[name].exit_code
        place = f"{file}: {finding.where}"
        console.error(SecureTrainError(name, finding.what, where=place, expected=f"rule {finding.rule}"))
    if not found:
        console.text(f"{file}: valid CycloneDX {document['specVersion']}, and it agrees with itself")
    _report(sarif, [Result(item.rule, item.what, str(file), item.where) for item in found])
    console.answer("sbom validate", code, file=str(file), findings=[finding.as_dict() for finding in found])
    return code


@command.command()
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@_sarif
@options.json_option
def diff(before: Path, after: Path, sarif: Path | None, as_json: bool) -> int:
    """What changed from BEFORE to AFTER. Other bytes under an unchanged version are an alarm: exit code 4."""
    from sbom.diff import diff as compare

    console = Console(as_json)
    with boms.our_errors():
        changes = compare(boms.read_valid(before), boms.read_valid(after))
    for change in changes:
        mark = "ALARM " if change.alarm else ""
        before_after = f"{change.before or '-'} -> {change.after or '-'}"
        console.text(f"  {mark}{change.kind:8} {change.component}: {before_after}")
    alarms = [change for change in changes if change.alarm]
    code = CODES["ST-M05"].exit_code if alarms else 0
    if alarms:
        first = alarms[0]
        console.error(
            SecureTrainError(
                "ST-M05",
                f"{len(alarms)} components have other bytes under an unchanged version",
                where=first.component,
                expected=first.before,
                found=first.after,
                next_step="find out who replaced it before you use it",
            )
        )
    elif not changes:
        console.text("nothing changed")
    results = [
        Result("ST-M05", f"{item.before} -> {item.after}", str(after), item.component) for item in alarms
    ]
    _report(sarif, results)
    console.answer("sbom diff", code, changes=[change.as_dict() for change in changes])
    return code


@command.command()
@click.argument("file", type=_FILE)
@click.option(
    "--yardstick",
    type=click.Choice(["cisa-2026", "g7-ai"]),
    default="cisa-2026",
    show_default=True,
    help="Minimum elements to count.",
)
@click.option("--require", is_flag=True, help="Exit with 4 unless every field is met or declared unknown.")
@options.json_option
def score(file: Path, yardstick: str, require: bool, as_json: bool) -> int:
    """Count what FILE says of the minimum elements: met, declared unknown, partial, missing."""
    from sbom import score as scores

    console = Console(as_json)
    with boms.our_errors():
        document = boms.read_valid(file)
        count = scores.cisa if yardstick == "cisa-2026" else scores.g7
        fields = count(document, signed=boms.is_attested(file, document))
    good = sum(field.state in (scores.MET, scores.DECLARED) for field in fields)
    for field in fields:
        console.text(f"  {field.state:9} {field.name}" + (f": {field.note}" if field.note else ""))
    met = sum(field.state == scores.MET for field in fields)
    console.text(f"{good} of {len(fields)} met or declared ({met} met), {yardstick}")
    code = 0
    if require and good < len(fields):
        code = CODES["ST-M07"].exit_code
        wanting = [field.name for field in fields if field.state not in (scores.MET, scores.DECLARED)]
        console.error(
            SecureTrainError(
                "ST-M07", "required facts are missing", where=str(file), found=", ".join(wanting)
            )
        )
    shown = [field.as_dict() for field in fields]
    console.answer("sbom score", code, yardstick=yardstick, fields=shown, good=good, met=met)
    return code


@command.command()
@click.argument("file", type=_FILE)
@options.policy_option
@options.pin_option
@_sarif
@options.json_option
def licenses(file: Path, policy: Path | None, pin: str | None, sarif: Path | None, as_json: bool) -> int:
    """Hold every licence in FILE against the lists of the policy: allowed, for review, denied (exit code
    4).
    """
    from sbom.allowed import ALLOWED, judge
    from supplychain import policy as policies
    from supplychain.trust import roots

    console = Console(as_json)
    path = options.policy_path(policy)
    trusted = policies.load(path, trusted=roots.policy_keys().list(), pinned=pin)
    if trusted.document.licenses is None:
        raise SecureTrainError(
            "ST-M08", "the policy says nothing of licences", where=str(path), expected="a section [licenses]"
        )
    with boms.our_errors():
        lists = boms.licence_lists(trusted.document.licenses, str(path))
        verdicts = judge(boms.read_valid(file), lists, boms.now().date())
    for verdict in verdicts:
        note = f" ({verdict.note})" if verdict.note else ""
        console.text(f"  {verdict.verdict:8} {verdict.component}: {verdict.licence or 'unknown'}{note}")
    refused = [verdict for verdict in verdicts if verdict.verdict != ALLOWED]
    code = CODES["ST-M06"].exit_code if refused else 0
    if refused:
        console.error(
            SecureTrainError(
                "ST-M06",
                f"{len(refused)} of {len(verdicts)} components have a licence that is denied or for review",
                where=refused[0].component,
                found=refused[0].licence or "unknown",
                next_step="replace it, or add an exception with a reason and an end to the policy",
            )
        )
    results = [
        Result("ST-M06", f"licence {item.licence or 'unknown'}: {item.verdict}", str(file), item.component,
               item.verdict == "denied") for item in refused
    ]  # fmt: skip
    _report(sarif, results)
    console.answer("sbom licenses", code, verdicts=[verdict.as_dict() for verdict in verdicts])
    return code


def _report(path: Path | None, results: list[Result]) -> None:
    """Write the SARIF report, where one was asked for; one without findings says that there are none."""
    if path is not None:
        from sbom.sarif import sarif

        boms.write_file(path, sarif(results, boms.tool_version()))
