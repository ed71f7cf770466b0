"""RFC 3161 timestamps: proof that a signature existed at a moment, by an authority that the policy names.

A timestamp covers the signature's bytes. Asking an authority is the one network access; checking is offline.
A timestamp of an authority that is not trusted proves nothing and is passed over, so that a signature then
has to hold at the present moment.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from supplychain.errors import SecureTrainError
from supplychain.trust import certificates
from supplychain.trust.bundle import Bundle
from supplychain.trust.roots import Authority

TIMEOUT = 20  # seconds
MAX_RESPONSE = 1 << 16  # bytes


def proven_time(found: Bundle, authorities: Sequence[Authority], *, where: str) -> dt.datetime | None:
    """The earliest moment that a trusted authority puts on the bundle's signature; None if none does. ST-S03
    for a timestamp that cannot be read.
    """
    if not found.timestamps or not authorities:
        return None
    moments = [
        moment
        for raw in found.timestamps
        for authority in authorities
        if (moment := _check(raw, found.signature, authority, where)) is not None
    ]
    return min(moments, default=None)


def _check(raw: bytes, message: bytes, authority: Authority, where: str) -> dt.datetime | None:
    from rfc3161_client import VerificationError, VerifierBuilder, decode_timestamp_response

    try:
        response = decode_timestamp_response(raw)
    except ValueError:
        raise SecureTrainError(
            "ST-S03", "a timestamp of the bundle cannot be read", where=where, next_step="sign again"
        ) from None
    chain = certificates.load_pem(authority.pem, where=f"the timestamp authority {authority.name}")
    builder = VerifierBuilder().tsa_certificate(chain[0]).add_root_certificate(chain[-1])
    for certificate in chain[1:-1]:
        builder = builder.add_intermediate_certificate(certificate)
    try:
        builder.build().verify_message(response, message)
    except (VerificationError, ValueError):
        return None
    moment: dt.datetime = response.tst_info.gen_time
    valid = chain[0].not_valid_before_utc <= moment <= chain[0].not_valid_after_utc
    return moment if valid else None


def request(url: str, signature: bytes) -> bytes:
    """Have the authority at `url` timestamp a signature; ST-S11 if it does not answer as it should."""
    import requests
    from rfc3161_client import TimestampRequestBuilder, decode_timestamp_response

    builder = TimestampRequestBuilder().data(signature).nonce(nonce=True)
    query = builder.cert_request(cert_request=True).build()
    try:
        answer = requests.post(
            url,
            data=query.as_bytes(),
            headers={"Content-Type": "application/timestamp-query"},
            timeout=TIMEOUT,
            stream=True,
        )
        answer.raise_for_status()
        data: bytes = answer.raw.read(MAX_RESPONSE, decode_content=True)
        response = decode_timestamp_response(data)
        if response.tst_info.nonce != query.nonce:
            raise ValueError("it answers another question")
    except (requests.RequestException, ValueError, OSError) as error:
        raise SecureTrainError(
            "ST-S11",
            f"the timestamp authority did not answer: {type(error).__name__}",
            where=url,
            next_step="check the address, or sign without a timestamp",
        ) from None
    return data
