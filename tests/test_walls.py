"""The walls between the packages, and the things that no file of ours may do. Read from the sources, nothing
imported.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("supplychain", "trainer", "sbom", "policies")
# Imported on both sides of the gate, or run alone: the standard library and the named modules of ours,
# nothing else.
STANDARD_LIBRARY_ONLY = {
    "supplychain/__init__.py": (),
    "supplychain/errors.py": (),
    "supplychain/artifact": ("supplychain.artifact", "supplychain.errors"),
    "supplychain/environment/__init__.py": (),
    "supplychain/environment/interpreter.py": ("supplychain.errors",),
    "supplychain/environment/lock.py": ("supplychain.errors",),
    "supplychain/environment/verify.py": (
        "supplychain.artifact",
        "supplychain.environment",
        "supplychain.errors",
    ),
    "supplychain/environment/__main__.py": ("supplychain.environment",),
    "bootstrap.py": (),
}
# Guarded imports inside a function, with the reason.
ALLOWED_LATE = {
    ("supplychain/environment/lock.py", "packaging"): "markers are evaluated where packaging is installed",
    ("supplychain/environment/interpreter.py", "packaging"): "asked by `env build` only, which has it",
    # Only a second process, started by the gate, imports it.
}
# The gate's part of supplychain.artifact writes signatures; it is imported by the gate alone.
GATE_PART = ("supplychain/artifact/oms.py",)
FORBIDDEN_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
FORBIDDEN_CALLS = {
    "eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen",
    "pickle.load", "pickle.loads", "pickle.dump", "pickle.dumps", "numpy.load", "np.load", "__import__",
    "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip


def sources(*tops: str) -> Iterator[tuple[str, ast.Module]]:
    for top in tops:
        path = ROOT / top
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_bytes(), str(file))


def imports(file: str, tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, as a full name, and whether the import stands at the top level."""
    top = {id(node) for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))}
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for node in ast.walk(function)
        if id(node) in top
    }
    package = file.removesuffix(".py").removesuffix("/__init__").split("/")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, id(node) not in inner
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package if file.endswith("__init__.py") else package[:-1]
                module = ".".join([*base[: len(base) - node.level + 1], *([module] if module else [])])
            yield module, id(node) not in inner
            for name in node.names:  # `from supplychain import gate` imports a module, too
                if (ROOT / module.replace(".", "/") / f"{name.name}.py").is_file():
                    yield f"{module}.{name.name}", id(node) not in inner


def within(module: str, allowed: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def test_supplychain_never_imports_the_trainer_or_torch() -> None:
    for file, tree in sources("supplychain", "policies"):
        for module, _ in imports(file, tree):
            assert not within(module, ("trainer", "torch", "numpy", "safetensors", "tokenizers")), (
                f"{file}: {module}"
            )


def test_the_trainer_imports_only_the_artifact_package_of_ours() -> None:
    for file, tree in sources("trainer"):
        for module, _ in imports(file, tree):
            if within(module, PACKAGES):
                assert within(module, ("trainer", "supplychain.artifact")), f"{file}: {module}"


def test_sbom_imports_neither() -> None:
    for file, tree in sources("sbom"):
        for module, _ in imports(file, tree):
            assert not within(module, ("trainer", "supplychain.gate", "supplychain.cli", "torch")), (
                f"{file}: {module}"
            )
            assert not within(module, ("supplychain",)), f"{file}: {module}"


@pytest.mark.parametrize("place", STANDARD_LIBRARY_ONLY)
def test_what_both_sides_import_needs_the_standard_library_only(place: str) -> None:
    allowed = STANDARD_LIBRARY_ONLY[place]
    for file, tree in sources(place):
        if file in GATE_PART:
            continue
        for module, at_top in imports(file, tree):
            known = module.split(".")[0] in sys.stdlib_module_names or module == "__future__"
            late = not at_top and (file, module.split(".")[0]) in ALLOWED_LATE
            assert known or late or within(module, allowed), f"{file}: {module}"


def test_the_walls_hold_at_run_time() -> None:
    """Importing the trainer's view of the artifact package, and the verifier, brings in nothing that is
    installed.
    """
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import supplychain.artifact, supplychain.errors, supplychain.environment.verify\n"
        "outside = {name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(sorted(outside - {'supplychain', '__main__', '__mp_main__'}))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_nothing_that_executes_is_data() -> None:
    for file, tree in sources(*PACKAGES, "bootstrap.py", "requirements/lock.py"):
        for module, _ in imports(file, tree):
            assert module.split(".")[0] not in FORBIDDEN_MODULES, f"{file}: {module}"
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in FORBIDDEN_CALLS, f"{file}:{node.lineno}: {called}"
            for keyword in node.keywords:
                shell = keyword.arg == "shell" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                )
                assert not shell, f"{file}:{node.lineno}: shell=True"
                weights = keyword.arg in ("allow_pickle", "trust_remote_code", "weights_only")
                assert not weights, f"{file}:{node.lineno}: {keyword.arg}"


def test_bootstrap_can_be_read_by_an_old_python() -> None:
    """So that it reaches the sentence that refuses it."""
    ast.parse((ROOT / "bootstrap.py").read_text(), feature_version=(3, 8))


def test_every_package_is_in_the_wheel_and_every_dependency_has_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    settings = tomllib.loads(text)
    assert tuple(sorted(settings["tool"]["pdm"]["build"]["includes"])) == tuple(sorted(PACKAGES))
    extras = settings["project"]["optional-dependencies"].values()
    stated = [*settings["project"]["dependencies"], *(line for extra in extras for line in extra)]
    for requirement in stated:
        lines = [line for line in text.splitlines() if f'"{requirement}"' in line]
        assert lines
        assert all("#" in line.split(f'"{requirement}"')[1] for line in lines), f"{requirement}: no reason"


def test_actions_are_pinned_by_commit_and_get_no_rights() -> None:
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        text = file.read_text()
        uses = re.findall(r"uses:\s*(\S.*)", text)
        assert uses
        for line in uses:
            pinned = re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v[0-9.]+", line)
            assert pinned or line == "./", f"{file.name}: {line}"  # ./ is the action of this checkout
        assert text.count("persist-credentials: false") == text.count("actions/checkout@")
        assert "\npermissions: {}\n" in text
        assert "pull_request_target" not in text


def test_the_repository_names_no_registry_and_no_machine() -> None:
    """A lock or a script with a host or a path of one machine works on that machine only."""
    words = [
        "pypi" + ".org",
        "python" + "hosted",
        "download.pyt" + "orch",
        "/opt" + "/wheels",
        "/opt" + "/pypi",
    ]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        path = ROOT / name
        if path.is_file():
            text = path.read_bytes()
            assert not [word for word in words if word.encode() in text], name
