"""The local Sigstore is a true one: the reference client works with it, and notices each of its faults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from model_signing import signing, verifying
from sigstore import dsse
from sigstore.errors import VerificationError
from sigstore.models import Bundle, ClientTrustConfig
from sigstore.sign import SigningContext
from sigstore.verify import Verifier, policy

from tests.sigstore.local import LocalSigstore

IDENTITY = "trainer@example.com"
STATEMENT = dsse.StatementBuilder(
    [dsse.Subject(name="checkpoint", digest=dsse.DigestSet({"sha256": "ab" * 32}))],
    "https://slsa.dev/provenance/v1",
    {"a": 1},
).build()


@pytest.fixture(params=[2, 1], ids=["rekor-v2", "rekor-v1"])
def instance(request: pytest.FixtureRequest) -> Iterator[LocalSigstore]:
    with LocalSigstore(rekor_version=request.param) as running:
        yield running


def sign(instance: LocalSigstore, kind: str = "statement", identity: str = IDENTITY, **claims: Any) -> Bundle:
    context = SigningContext.from_trust_config(instance.trust_config())
    with context.signer(instance.token(identity, **claims)) as signer:
        return signer.sign_artifact(b"hello") if kind == "artifact" else signer.sign_dsse(STATEMENT)


def verify(
    instance: LocalSigstore,
    bundle: Bundle,
    kind: str = "statement",
    identity: str = IDENTITY,
    issuer: str | None = None,
) -> None:
    verifier = Verifier(trusted_root=instance.trust_config().trusted_root)
    expected = policy.Identity(identity=identity, issuer=issuer or instance.issuer)
    if kind == "artifact":
        verifier.verify_artifact(b"hello", bundle, expected)
    else:
        verifier.verify_dsse(bundle, expected)


def fails(act: Callable[[], object]) -> bool:
    """The client's errors have no common base, and some no text."""
    try:
        act()
    except Exception:
        return True
    return False


@pytest.mark.parametrize("kind", ["artifact", "statement"])
def test_round_trip(instance: LocalSigstore, kind: str) -> None:
    for _ in range(3):  # several leaves: real inclusion proofs
        bundle = sign(instance, kind)
    bundle = Bundle.from_json(bundle.to_json())
    verify(instance, bundle, kind)
    with pytest.raises(VerificationError, match="SANs"):
        verify(instance, bundle, kind, identity="mallory@example.com")
    with pytest.raises(VerificationError, match="issuer"):
        verify(instance, bundle, kind, issuer="https://other.test")


def test_verification_is_offline() -> None:
    with LocalSigstore() as instance:
        text = sign(instance).to_json()
    verify(instance, Bundle.from_json(text))  # the server is gone


def test_claims_of_a_workflow(instance: LocalSigstore) -> None:
    workflow = "https://github.com/acme/train/.github/workflows/release.yml@refs/heads/main"
    bundle = sign(instance, identity=workflow, repository="acme/train", ref="refs/heads/main", sha="c0ffee")
    verifier = Verifier(trusted_root=instance.trust_config().trusted_root)
    expected: list[policy.VerificationPolicy] = [
        policy.Identity(identity=workflow, issuer=instance.issuer),
        policy.OIDCSourceRepositoryURI("https://github.com/acme/train"),
        policy.OIDCSourceRepositoryRef("refs/heads/main"),
    ]
    verifier.verify_dsse(bundle, policy.AllOf(expected))
    with pytest.raises(VerificationError):
        verifier.verify_dsse(bundle, policy.OIDCSourceRepositoryRef("refs/heads/evil"))


def test_trust_from_tuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with LocalSigstore() as instance:
        (tmp_path / "root.json").write_bytes(instance.tuf_root)
        config = ClientTrustConfig.from_tuf(instance.url + "/tuf", bootstrap_root=tmp_path / "root.json")
        verifier = Verifier(trusted_root=config.trusted_root)
        verifier.verify_dsse(sign(instance), policy.Identity(identity=IDENTITY, issuer=instance.issuer))


@pytest.mark.parametrize("fault", ["no-sct", "bad-sct", "fulcio-500", "rekor-500"])
def test_faults_while_signing(instance: LocalSigstore, fault: str) -> None:
    with instance.fault(fault):
        assert fails(lambda: sign(instance))


@pytest.mark.parametrize(
    "fault", ["expired-cert", "bad-checkpoint", "wrong-root", "tsa-late", "tsa-wrong-message", "no-timestamp"]
)
def test_faults_while_verifying(instance: LocalSigstore, fault: str) -> None:
    made: list[Bundle] = []
    with instance.fault(fault), contextlib.suppress(Exception):
        made.append(sign(instance))
    if not made:
        return  # refused already while the bundle was made
    (bundle,) = made
    if instance.rekor_version == 1 and fault in ("no-timestamp", "tsa-wrong-message"):
        verify(instance, bundle)  # the log's own time is enough
        return
    assert fails(lambda: verify(instance, bundle))


def test_a_bad_signed_entry_timestamp() -> None:
    with LocalSigstore(rekor_version=1) as instance:
        with instance.fault("bad-set"):
            bundle = sign(instance)
        with pytest.raises(VerificationError, match="SET"):
            verify(instance, bundle)


def test_an_entry_of_something_else(instance: LocalSigstore) -> None:
    with instance.fault("wrong-body"):
        bundle = sign(instance, "artifact")
    with pytest.raises(VerificationError, match="inconsistent"):
        verify(instance, bundle, "artifact")


def test_another_instance_is_not_trusted(instance: LocalSigstore) -> None:
    with LocalSigstore() as other:
        bundle = sign(instance)
        with pytest.raises(VerificationError):
            verify(other, bundle)


def test_a_forged_token_gets_no_certificate(instance: LocalSigstore) -> None:
    with LocalSigstore() as other:
        context = SigningContext.from_trust_config(instance.trust_config())

        def forge() -> None:
            with context.signer(other.token(IDENTITY)) as signer:
                signer.sign_dsse(STATEMENT)

        assert fails(forge)


def test_model_signing_works_with_it(instance: LocalSigstore, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_bytes(b"x" * 100_000)
    trust = instance.write_trust_config(tmp_path / "trust.json")
    signer = signing.Config()  # type: ignore[no-untyped-call]  # its constructors have no annotations
    signer.use_sigstore_signer(identity_token=instance.raw_token(IDENTITY), trust_config=trust)
    signer.sign(model, tmp_path / "model.sig")
    verifier = verifying.Config()  # type: ignore[no-untyped-call]  # as above
    verifier.use_sigstore_verifier(identity=IDENTITY, oidc_issuer=instance.issuer, trust_config=trust)
    verifier.verify(model, tmp_path / "model.sig")
    (model / "weights").write_bytes(b"y" * 100_000)
    with pytest.raises(ValueError, match="mismatch"):
        verifier.verify(model, tmp_path / "model.sig")
