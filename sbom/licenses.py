"""The licence of a distribution as an SPDX expression, or explicitly not.

In this order: `License-Expression` (PEP 639), the `License` field if it is an expression or a well-known
name of one, trove classifiers that mean exactly one licence. A classifier such as "BSD License" means
several: it stays a name, and the expression stays unknown. Nothing is guessed from texts.
"""

from __future__ import annotations

from dataclasses import dataclass

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from sbom.inventory import Installed, clean

# Classifiers that mean one SPDX licence each; ambiguous ones are left out on purpose.
_TROVE = {
    "Apache Software License": "Apache-2.0",
    "Boost Software License 1.0 (BSL-1.0)": "BSL-1.0",
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication": "CC0-1.0",
    "Eclipse Public License 2.0 (EPL-2.0)": "EPL-2.0",
    "European Union Public Licence 1.2 (EUPL 1.2)": "EUPL-1.2",
    "GNU Affero General Public License v3": "AGPL-3.0-only",
    "GNU Affero General Public License v3 or later (AGPLv3+)": "AGPL-3.0-or-later",
    "GNU General Public License v2 (GPLv2)": "GPL-2.0-only",
    "GNU General Public License v2 or later (GPLv2+)": "GPL-2.0-or-later",
    "GNU General Public License v3 (GPLv3)": "GPL-3.0-only",
    "GNU General Public License v3 or later (GPLv3+)": "GPL-3.0-or-later",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.0-or-later",
    "GNU Lesser General Public License v3 (LGPLv3)": "LGPL-3.0-only",
    "GNU Lesser General Public License v3 or later (LGPLv3+)": "LGPL-3.0-or-later",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "MIT No Attribution License (MIT-0)": "MIT-0",
    "Mozilla Public License 1.1 (MPL 1.1)": "MPL-1.1",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
    "Universal Permissive License (UPL)": "UPL-1.0",
    "zlib/libpng License": "Zlib",
}
# What people write into the `License` field and mean one licence by.
_COMMON = {
    "apache 2.0": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd-3": "BSD-3-Clause",
    "3-clause bsd": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "new bsd license": "BSD-3-Clause",
    "isc license": "ISC",
    "mit license": "MIT",
    "the mit license": "MIT",
    "mpl 2.0": "MPL-2.0",
    "mozilla public license 2.0": "MPL-2.0",
    "the unlicense": "Unlicense",
}


@dataclass(frozen=True)
class Licence:
    """`expression` is SPDX or empty; `name` is what was said instead; `source` is the field it came from."""

    expression: str = ""
    name: str = ""
    source: str = ""


def expression(text: str) -> str:
    """`text` as a canonical SPDX expression; empty if it is none."""
    if not text or len(text) > 1000:
        return ""
    try:
        return str(canonicalize_license_expression(text))
    except (InvalidLicenseExpression, ValueError, RecursionError):
        return ""


def licence_of(item: Installed) -> Licence:
    """The declared licence of a distribution."""
    if found := expression(item.first("license-expression")):
        return Licence(found, source="License-Expression")
    said = item.first("license")
    if "\n" not in said and (found := expression(said) or _COMMON.get(said.strip().lower(), "")):
        return Licence(found, source="License")
    trove = [
        line.rpartition(" :: ")[2]
        for line in item.fields.get("classifier", ())
        if line.startswith("License ::") and line != "License :: OSI Approved"
    ]
    known = {_TROVE.get(name, "") for name in trove}
    if len(known) == 1 and (found := known.pop()):
        return Licence(found, source="Classifier")
    if trove:
        return Licence(name=clean("; ".join(trove), 200), source="Classifier")
    if said and said.lower() != "unknown":
        return Licence(name=clean(said.split("\n")[0], 200), source="License")
    return Licence()
