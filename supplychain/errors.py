"""Every error a user can meet: its code, its exit code and the text of `secure-train explain CODE`.

Owns the catalogue and the one exception class. Promises that an error always carries a code, a subject, what
was expected and found, and what to do next, so that one place (the CLI) can render it as text or as JSON.
Standard library only: it is imported on both sides of the gate.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

# Exit codes, the same for every verb.
DONE = 0
BUG = 1
USAGE = 2
REFUSED_INTEGRITY = 3
REFUSED_POLICY = 4
UNDECIDED = 5
UNSIGNED = 6


_GRAVEST_FIRST = (REFUSED_INTEGRITY, REFUSED_POLICY, USAGE, UNDECIDED)


def gravest(codes: Collection[int], default: int) -> int:
    """The exit code of several refusals: integrity before policy before usage before cannot-decide."""
    return next((code for code in _GRAVEST_FIRST if code in codes), default)


@dataclass(frozen=True)
class Code:
    """One row of the catalogue: the exit code it leads to, a short title and the long explanation."""

    exit_code: int
    title: str
    text: str


CODES: dict[str, Code] = {
    # --- usage and malformed input --------------------------------------------------------------------------
    "ST-U01": Code(
        USAGE,
        "no such file",
        "A path on the command line, or one that a request names, does not exist. Nothing was started.",
    ),
    "ST-U02": Code(
        USAGE,
        "malformed input",
        "A file could not be parsed: it is not the JSON or TOML it should be, is larger or deeper than "
        "allowed, repeats a key, or has a field of the wrong type. Foreign bytes are parsed strictly, "
        "because a file that two programs read differently is a way past a check.",
    ),
    "ST-U03": Code(
        USAGE,
        "unknown name",
        "An option, a key, a preset or a kind is not one of those that exist. The message names the "
        "nearest one.",
    ),
    "ST-U04": Code(
        USAGE,
        "folder cannot be written",
        "The folder for the results does not exist and cannot be made, or cannot be written by this user.",
    ),
    "ST-U05": Code(
        USAGE,
        "target exists",
        "The output would replace something that is there already. Results are never overwritten: choose "
        "another name, or remove the old folder yourself.",
    ),
    "ST-U06": Code(
        USAGE,
        "unsafe path or file",
        "A folder holds something that an artifact may not: a link, a device, a name with control "
        "characters, a backslash or `..`, two names that differ only by case, a set-uid bit, or a name "
        "that is not valid NFC UTF-8. Such trees mean different things on different machines, so they are "
        "neither signed nor accepted.",
    ),
    "ST-U07": Code(
        USAGE,
        "configuration refused",
        "The trainer does not accept the configuration. Its own message says which setting and why.",
    ),
    # --- artifacts: bytes against a manifest ----------------------------------------------------------------
    "ST-A01": Code(
        REFUSED_INTEGRITY,
        "manifest differs",
        "The manifest of an artifact is not the one whose digest was verified or planned. The artifact was "
        "re-signed, replaced or edited in between.",
    ),
    "ST-A02": Code(
        REFUSED_INTEGRITY,
        "manifest malformed",
        "The manifest is not canonical, or names something that no honest manifest names: a path that "
        "leaves the folder, a duplicate, an impossible size, a wrong mode or digest length. It is refused "
        "before anything it names is opened.",
    ),
    "ST-A03": Code(
        REFUSED_INTEGRITY,
        "file changed",
        "A file's bytes differ from those that were signed. Restore the file from where it was published, "
        "or, if the change was intended, sign the artifact again. `secure-train inspect PATH` shows what "
        "was signed and by whom.",
    ),
    "ST-A04": Code(
        REFUSED_INTEGRITY,
        "file missing",
        "A file that was signed is no longer there. A subset of an artifact is not the artifact.",
    ),
    "ST-A05": Code(
        REFUSED_INTEGRITY,
        "file not signed",
        "The folder holds a file that no signature covers. Verification has no option to ignore files, "
        "because an ignored file is where code hides. Move it away, or sign the artifact again.",
    ),
    "ST-A06": Code(
        REFUSED_INTEGRITY,
        "file size differs",
        "A file is shorter or longer than when it was signed: truncated, or appended to.",
    ),
    "ST-A07": Code(
        REFUSED_INTEGRITY,
        "file mode differs",
        "A file became executable, or stopped being so, since it was signed.",
    ),
    "ST-A08": Code(
        REFUSED_INTEGRITY,
        "block digests differ",
        "The list of block digests of a file does not have the root that the manifest states, so no block "
        "of the file can be checked.",
    ),
    "ST-A09": Code(
        UNDECIDED,
        "artifact is not signed",
        "The folder has no manifest or no signature. Unsigned input is never used: sign it with "
        "`secure-train sign`.",
    ),
    "ST-A10": Code(
        UNDECIDED,
        "file cannot be read",
        "The operating system answered with an error instead of a file's bytes: no permission, a failing "
        "disk, a stale network mount. Nothing can be said about such a file, so it is refused. It is not "
        "evidence of tampering; mend the storage or the permissions and try again.",
    ),
    # --- signatures -----------------------------------------------------------------------------------------
    "ST-S01": Code(
        REFUSED_INTEGRITY,
        "signature is not valid",
        "The signature does not match the signed bytes under the key that it names.",
    ),
    "ST-S02": Code(
        REFUSED_POLICY,
        "signer is not trusted",
        "The artifact is signed, and by somebody whom the policy does not allow to vouch for this kind of "
        "artifact. The message names the key or identity that was found and those that are allowed.",
    ),
    "ST-S03": Code(
        REFUSED_INTEGRITY,
        "bundle malformed",
        "A signature file is not a well-formed Sigstore bundle. Unknown versions and extra signatures are "
        "refused, not guessed at.",
    ),
    "ST-S04": Code(
        REFUSED_INTEGRITY,
        "signature of something else",
        "The signature is valid, and covers another artifact or another kind of statement than the one at "
        "hand.",
    ),
    "ST-S05": Code(UNDECIDED, "no signature", "There is no signature to check."),
    "ST-S06": Code(
        USAGE,
        "key cannot be used",
        "A key file is missing, unreadable, encrypted without a passphrase, of an unsupported type, or "
        "readable by other users.",
    ),
    "ST-S07": Code(
        REFUSED_INTEGRITY,
        "signed outside the signer's time",
        "The key, identity or certificate was not valid at the moment that counts: the one that a trusted "
        "timestamp or log proves, or else the present. A signature without a proof of its time lives only as "
        "long as its signer does; timestamps keep it alive.",
    ),
    "ST-S08": Code(
        REFUSED_INTEGRITY,
        "revoked",
        "The artifact, the statement or its signer was revoked; the message says by what reason. With a "
        "revocation from a date on, signatures stay valid that provably were made before it.",
    ),
    "ST-S09": Code(
        REFUSED_INTEGRITY,
        "root of trust refused",
        "A trusted root or the signed trust metadata is not the pinned one, lacks signatures, contradicts "
        "itself, or is older than what this host has seen already. Old metadata may hide a revocation.",
    ),
    "ST-S10": Code(
        UNDECIDED,
        "trust metadata expired",
        "The trust metadata is past its expiry, so that nobody can tell whether something was revoked since. "
        "Get the current one from whoever maintains it.",
    ),
    "ST-S11": Code(
        UNDECIDED,
        "signing service unavailable",
        "A Sigstore instance, a timestamp authority or a hardware module did not sign. Nothing was written.",
    ),
    # --- policy ---------------------------------------------------------------------------------------------
    "ST-P01": Code(
        REFUSED_POLICY,
        "policy expired",
        "The policy's expiry date has passed. An old policy may trust keys that were revoked since. Renew "
        "it and sign it again.",
    ),
    "ST-P02": Code(
        UNDECIDED,
        "policy is not trusted",
        "The policy is not signed by a key that this host trusts for policies, and no digest was given to "
        "pin it. Without a trusted policy nothing can be decided.",
    ),
    "ST-P03": Code(
        USAGE,
        "policy malformed",
        "The policy file cannot be read: a key is unknown, of the wrong type or missing. A policy that is "
        "not understood whole is not applied in part.",
    ),
    "ST-P04": Code(
        REFUSED_POLICY,
        "kind not allowed",
        "The artifact is of another kind than the run needs, or of a kind that the policy has no rule for.",
    ),
    "ST-P05": Code(
        REFUSED_POLICY,
        "format not allowed",
        "An artifact holds a file whose content is not of an allowed format (safetensors, JSON, token "
        "shards). Formats that can execute code when they are loaded, such as pickle, are never allowed, "
        "whatever the file is called.",
    ),
    "ST-P06": Code(
        REFUSED_POLICY,
        "environment too weak",
        "The training environment is an editable or shared one, and the policy asks for a sealed one.",
    ),
    "ST-P07": Code(
        REFUSED_POLICY,
        "reads not allowed",
        "The run asks to read data with weaker checks than the policy allows. `always` checks each block "
        "whenever it is read.",
    ),
    "ST-P08": Code(
        REFUSED_POLICY,
        "isolation not available",
        "The policy asks for training processes that can read only verified inputs and write only results,"
        " and this kernel cannot do that for a process without privileges.",
    ),
    # --- environment ----------------------------------------------------------------------------------------
    "ST-E01": Code(
        USAGE,
        "lock malformed",
        "A lock must pin every package with == and at least one sha256 hash. Anything else (a range, a "
        "URL, an option) is refused with file and line.",
    ),
    "ST-E02": Code(
        REFUSED_INTEGRITY,
        "environment was built from another lock",
        "The environment's packages are not those of the lock given. Build it again: `secure-train env "
        "build`.",
    ),
    "ST-E03": Code(
        REFUSED_INTEGRITY,
        "installed file changed",
        "A file of an installed package differs from the one in its hash-checked wheel. Treat the machine "
        "as compromised until you know why; `secure-train env build` makes a clean environment.",
    ),
    "ST-E04": Code(
        REFUSED_INTEGRITY,
        "file that no package explains",
        "The environment holds a file that came from no locked wheel. Python may run such a file at "
        "start-up.",
    ),
    "ST-E05": Code(
        UNDECIDED,
        "no training environment",
        "No training environment was found. Build one with `secure-train env build`, or name it with --env.",
    ),
    "ST-E06": Code(
        USAGE,
        "wrong Python",
        "The interpreter is older than 3.11, or another one than the environment was built for.",
    ),
    "ST-E07": Code(
        REFUSED_INTEGRITY,
        "wheel differs from the lock",
        "A wheel's bytes do not have a hash that the lock allows, or its own RECORD does not describe its "
        "contents.",
    ),
    "ST-E08": Code(
        UNDECIDED,
        "package not obtainable",
        "A locked package could not be had from the configured index or the given wheelhouse.",
    ),
    "ST-E09": Code(
        REFUSED_INTEGRITY,
        "interpreter changed",
        "The Python under the environment, its shared library or its standard library is not the one that "
        "the environment was built on. After an update of the system's Python build the environment again;"
        " without one, find out who changed it.",
    ),
    "ST-E10": Code(
        REFUSED_INTEGRITY,
        "environment reads from outside",
        "The environment also imports packages from outside itself (the system's site packages), so what "
        "is installed there runs as well. Build a closed one: `secure-train env build`.",
    ),
    # --- data: the corpus, preparation, datasets and the loader ------------------------------------------
    "ST-D01": Code(
        REFUSED_INTEGRITY,
        "corpus changed",
        "The text that is packaged with secure-train, or the archive that it is made from, is not the one"
        " that was released. Its digests stand in trainer/corpus/manifest.json.",
    ),
    "ST-D02": Code(
        USAGE,
        "source malformed",
        "A file that datasets are prepared from is not what its name says: broken or truncated "
        "compression, text that is not UTF-8, a JSON line without the text, or a format that is not "
        "known. Nothing was written; records are never left out silently.",
    ),
    "ST-D03": Code(
        USAGE,
        "no documents",
        "The sources hold no text, or none of it falls into a split that was asked for, so there is no "
        "dataset to write.",
    ),
    "ST-D04": Code(
        USAGE,
        "tokenizer cannot be used",
        "The tokenizer file cannot be loaded, has no token that ends a document, or could not be trained "
        "to the size asked for.",
    ),
    "ST-D05": Code(
        REFUSED_INTEGRITY,
        "source changed meanwhile",
        "A source file was written to while it was being prepared, so no digest describes what was read. "
        "Prepare from a folder that nobody changes.",
    ),
    "ST-D06": Code(
        REFUSED_INTEGRITY,
        "dataset malformed",
        "dataset.json is not well-formed, or does not agree with the files beside it: sizes, counts, "
        "names, splits, token type. A dataset that was signed can still be wrong; it is refused before "
        "any of it is used.",
    ),
    "ST-D07": Code(
        REFUSED_INTEGRITY,
        "document index malformed",
        "The document ends in an .idx file do not increase, or do not end where the shard ends.",
    ),
    "ST-D08": Code(
        USAGE,
        "data schedule cannot be used",
        "The stages, weights, seed or batch of a run make no order: stages must begin at sample 0 and "
        "follow each other, weights are positive integers, and each stage draws from datasets that the "
        "run has.",
    ),
    "ST-D09": Code(
        USAGE,
        "datasets do not fit together",
        "The datasets of a run were made with different tokenizers, or one is too small for a single "
        "sample of the sequence length.",
    ),
    "ST-D10": Code(
        REFUSED_INTEGRITY,
        "loader state does not fit the run",
        "The state of the data loader was saved under another seed, sequence length, dataset or schedule "
        "than the run has now, or was changed. Going on would repeat or lose samples silently. What came "
        "before a resumed sample cannot be changed; what comes after can, by a new stage.",
    ),
    "ST-D11": Code(
        REFUSED_INTEGRITY,
        "token outside the vocabulary",
        "A shard holds a token that the dataset's own vocabulary size excludes. The data was made with "
        "another tokenizer than it says, or is hostile.",
    ),
    "ST-D12": Code(
        USAGE,
        "preparation is running",
        "Another process prepares a dataset into the same folder.",
    ),
    "ST-D13": Code(
        USAGE,
        "preparation worker died",
        "A worker process of the preparation ended without a word, most often because the machine ran out"
        " of memory and its kernel killed it. Nothing was left under the final name.",
    ),
    "ST-D14": Code(
        USAGE,
        "transform returned no sample",
        "A user's transform must return as many integers as it was given, each inside the vocabulary. "
        "Transforms change samples one for one; what leaves samples out belongs into preparation.",
    ),
    "ST-D15": Code(
        USAGE,
        "dataset not packed",
        "The run asks for packed rows of a length that the dataset was not packed into. Packing is done "
        "once, by `data prepare --pack`, and signed with the dataset.",
    ),
    "ST-D16": Code(
        USAGE,
        "dataset cannot be adopted",
        "The folder holds no token files of a form that is known, or does not say enough about them: the "
        "token type, the vocabulary, or which file is which split.",
    ),
    "ST-D17": Code(
        USAGE,
        "optional package missing",
        "What was asked for needs a package that is not in this environment. It is an optional extra, so "
        "that environments which do not need it need not trust it.",
    ),
    "ST-D18": Code(
        UNDECIDED,
        "object store does not answer",
        "The store that holds a dataset could not be reached, or refused. Nothing was decided about the "
        "data; resume when it answers again.",
    ),
    "ST-E11": Code(
        UNDECIDED,
        "wheels not at hand",
        "Before an environment is signed, its files are compared with the wheels that the lock names, "
        "because until then nothing else vouches for them. The wheels are no longer where the build kept "
        "them.",
    ),
    # --- runs -----------------------------------------------------------------------------------------------
    "ST-R01": Code(
        REFUSED_INTEGRITY,
        "plan differs",
        "The plan that the trainer was given is not the one that the gate decided on.",
    ),
    "ST-R02": Code(USAGE, "nothing to resume", "The run has no signed checkpoint to go on from."),
    "ST-R03": Code(
        REFUSED_INTEGRITY,
        "chain broken",
        "A checkpoint, or the statement about it, was removed, reordered, exchanged or rolled back since "
        "the run wrote it.",
    ),
    "ST-R04": Code(
        UNSIGNED,
        "trained, but not signed",
        "Training went on to its end, and signing or attesting its result failed. The checkpoints are "
        "complete; sign them with `secure-train sign`.",
    ),
    "ST-R05": Code(USAGE, "run is in use", "Another secure-train process works on this run folder."),
    "ST-R06": Code(
        REFUSED_INTEGRITY,
        "run differs from its statements",
        "The plan, decision or result in a run folder is not the one that its signed statements describe.",
    ),
    "ST-R07": Code(
        BUG,
        "trainer ended unexpectedly",
        "The training process ended without an outcome and without a report: it was killed (often for want"
        " of memory), or failed in a way it could not describe. The exit code is its own. The ranks' logs "
        "are in the run folder.",
    ),
    # --- bills of materials ---------------------------------------------------------------------------------
    "ST-M01": Code(
        USAGE,
        "no bill of materials",
        "The file is not a CycloneDX document in JSON or XML of a version that is supported (1.6 and 1.7),"
        " or something that one should be made from cannot be read.",
    ),
    "ST-M02": Code(
        USAGE,
        "bill of materials breaks its schema",
        "The official CycloneDX schema refuses the document, so other tools may read it as something else.",
    ),
    "ST-M03": Code(
        REFUSED_INTEGRITY,
        "bill of materials contradicts itself",
        "The document follows the schema and cannot be true: a reference to nothing, one reference for two "
        "things, a purl of another package, a hash of the wrong length, a locked package that is missing, or "
        "a change after it got its serial number.",
    ),
    "ST-M04": Code(
        USAGE,
        "format cannot hold this",
        "The format asked for has no place for what the bill of materials says, and nothing is dropped "
        "silently. JSON holds everything.",
    ),
    "ST-M05": Code(
        REFUSED_POLICY,
        "bill of materials changed alarmingly",
        "A package has other bytes than before under an unchanged version, or its hash is no longer known. "
        "Releases do not change: the package, the index or the file was replaced. Find out which before you "
        "use it.",
    ),
    "ST-M06": Code(
        REFUSED_POLICY,
        "licence not allowed",
        "A component has a licence that the policy's lists deny, or that they neither allow nor except. "
        "`secure-train sbom licenses` shows each component with its verdict.",
    ),
    "ST-M07": Code(
        REFUSED_POLICY,
        "bill of materials is incomplete",
        "Required facts are missing and not even declared unknown. `secure-train sbom score` shows which.",
    ),
    "ST-M08": Code(
        UNDECIDED,
        "not checked",
        "A check that was asked for could not be made here, for want of a program or a file. It is not "
        "passed over: what was not checked is not accepted.",
    ),
    # --- bugs -----------------------------------------------------------------------------------------------
    "ST-B01": Code(
        BUG, "internal error", "This is a fault of secure-train. The traceback above belongs in a bug report."
    ),
}


def printable(text: str) -> str:
    """Foreign text (a file's name, a field of a bundle) in one line: it neither steers the terminal nor
    forges a line of the message.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class SecureTrainError(Exception):
    """A refusal or a usage error, with everything that a person or a program needs to act on it.

    `code` is a key of `CODES` and decides the exit code; `what` is one sentence; `where` names the file, key
    or line; `expected` and `found` are short texts (digests, names, counts); `next_step` is a command or an
    action. Each is one line: characters that do not print are escaped.
    """

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        next_step: str | None = None,
    ) -> None:
        super().__init__(printable(what))
        self.code = code
        self.what = printable(what)
        self.where = where and printable(where)
        self.expected = expected and printable(expected)
        self.found = found and printable(found)
        self.next_step = next_step and printable(next_step)
        self.exit_code = CODES[code].exit_code if code in CODES else BUG

    @staticmethod
    def reported(report: dict[str, Any]) -> SecureTrainError:
        """The error that another process of ours reported, as `as_dict` writes it; its codes may be of
        another catalogue.
        """
        texts = {name: report.get(name) for name in ("where", "expected", "found", "next_step")}
        error = SecureTrainError(
            str(report.get("code")),
            str(report.get("what")),
            **{name: None if text is None else str(text) for name, text in texts.items()},
        )
        code = report.get("exit_code")
        error.exit_code = code if isinstance(code, int) and 0 < code < 256 else BUG
        return error

    def as_dict(self) -> dict[str, str | int | None]:
        return {
            "code": self.code,
            "title": CODES[self.code].title if self.code in CODES else "",
            "what": self.what,
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "next_step": self.next_step,
            "exit_code": self.exit_code,
        }

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}"]
        labels = (
            ("where", self.where),
            ("expected", self.expected),
            ("found", self.found),
            ("next", self.next_step),
        )
        lines += [f"  {label}: {value}" for label, value in labels if value is not None]
        return "\n".join(lines)
