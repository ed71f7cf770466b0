"""model-signing, the reference implementation of the signature format, as an oracle: it says what it accepts.

Used through its public Python interface and in its default configuration, as its documentation shows it.
"""

from __future__ import annotations

from pathlib import Path

from model_signing import hashing, signing, verifying

from supplychain.trust.keys import VerifyingKey


def accepts(root: Path, bundle: Path, key: VerifyingKey, *, git_paths: bool = False) -> bool:
    """Does model-signing accept the folder with this bundle? `git_paths`: do not ignore `.git*`."""
    pem = bundle.parents[2].parent / f"{key.name}.pub"
    pem.write_bytes(key.pem)
    config = verifying.Config()  # type: ignore[no-untyped-call]  # its constructors have no annotations
    config.use_elliptic_key_verifier(public_key=pem)
    if git_paths:
        config.set_hashing_config(_hashing([], ignore_git_paths=False))
    return _accepts(config, root, bundle)


def accepts_certificate(root: Path, bundle: Path, authority: bytes) -> bool:
    """The same with a certificate's signature, and the authority's root in PEM form."""
    pem = bundle.parents[2].parent / "authority.pem"
    pem.write_bytes(authority)
    config = verifying.Config()  # type: ignore[no-untyped-call]  # as above
    config.use_certificate_verifier(certificate_chain=[pem])
    return _accepts(config, root, bundle)


def accepts_identity(root: Path, bundle: Path, identity: str, issuer: str, trust_config: Path) -> bool:
    """The same with a Sigstore identity's signature."""
    config = verifying.Config()  # type: ignore[no-untyped-call]  # as above
    config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer, trust_config=trust_config)
    return _accepts(config, root, bundle)


def _accepts(config: verifying.Config, root: Path, bundle: Path) -> bool:
    try:
        config.verify(root, bundle)
    except Exception:  # it raises whatever its parts raise
        return False
    return True


def sign(root: Path, bundle: Path, private_key: Path) -> None:
    """Sign as model-signing documents it: `model.sig` lies inside the model, ignored by the signature."""
    config = signing.Config()  # type: ignore[no-untyped-call]  # as above
    config.use_elliptic_key_signer(private_key=private_key)
    config.set_hashing_config(_hashing([bundle], ignore_git_paths=True))
    config.sign(root, bundle)


def sign_certificate(root: Path, bundle: Path, key: Path, certificate: Path, chain: list[Path]) -> None:
    config = signing.Config()  # type: ignore[no-untyped-call]  # as above
    config.use_certificate_signer(private_key=key, signing_certificate=certificate, certificate_chain=chain)
    config.set_hashing_config(_hashing([bundle], ignore_git_paths=True))
    config.sign(root, bundle)


def sign_identity(root: Path, bundle: Path, token: str, trust_config: Path) -> None:
    config = signing.Config()  # type: ignore[no-untyped-call]  # as above
    config.use_sigstore_signer(identity_token=token, trust_config=trust_config)
    config.set_hashing_config(_hashing([bundle], ignore_git_paths=True))
    config.sign(root, bundle)


def _hashing(ignored: list[Path], *, ignore_git_paths: bool) -> hashing.Config:
    config = hashing.Config()  # type: ignore[no-untyped-call]  # as above
    return config.set_ignored_paths(paths=ignored, ignore_git_paths=ignore_git_paths)
