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


def _hashing(ignored: list[Path], *, ignore_git_paths: bool) -> hashing.Config:
    config = hashing.Config()  # type: ignore[no-untyped-call]  # as above
    return config.set_ignored_paths(paths=ignored, ignore_git_paths=ignore_git_paths)
