"""BUILD tells the truth about the source tree, and the tree keeps to its layers.

BUILD follows Bazel's syntax, a subset of Python's, so `ast` reads it and no Bazel is needed.
"""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

import hcompile

ROOT = Path(__file__).resolve().parent.parent

# From top to bottom. A module imports only from lines below its own (or, in a folder, beside it).
LAYERS = [
    "hcompile/__init__.py",
    "hcompile/_cli.py",
    "hcompile/_bench/",
    "hcompile/examples/",
    "hcompile/_jit.py",
    "hcompile/_signature.py",
    "hcompile/_region.py",
    "hcompile/_body.py",
    "hcompile/_report.py",
    "hcompile/_plan/",
    "hcompile/_executables.py",
    "hcompile/_progress.py",
    "hcompile/_bodies.py",
    "hcompile/_canonical.py",
    "hcompile/_options.py",
    "hcompile/_logs.py",
    "hcompile/_reuse.py",
    "hcompile/_capture.py",
    "hcompile/_walk.py",
    "hcompile/_paths.py",
    "hcompile/_rebuild.py",
    "hcompile/_code.py",
    "hcompile/_fingerprint.py",
    "hcompile/_errors.py",
    "hcompile/_jax_compat.py",
]
# These use hcompile as everybody else does: they alone import the top, which imports none of them.
USERS = {"hcompile/_cli.py", "hcompile/_bench/", "hcompile/examples/"}
TOP = "hcompile/__init__.py"

PUBLIC_NAMES = {
    "NewRegionError",
    "RegionOptions",
    "Report",
    "ReuseCheckError",
    "ReuseHashError",
    "ReuseLimitError",
    "__version__",
    "cache_info",
    "clear_caches",
    "disabled",
    "jit",
    "nested_compile_region",
    "no_new_regions",
    "region",
}

FRAMEWORKS = ("equinox", "flax", "haiku", "optax")


# The source tree.


def read_files(pattern):
    return {
        path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.glob(pattern))
    }


SOURCES = read_files("hcompile/**/*.py")
TESTS = read_files("tests/test_*.py")
# What the tests share: conftest.py, which pytest loads for each of them, and modules beside it.
SUPPORT = {path: text for path, text in read_files("tests/*.py").items() if path not in TESTS}


def module_name(path):
    """hcompile/_plan/program.py -> hcompile._plan.program; a package's __init__.py -> the package.

    >>> module_name("hcompile/_plan/__init__.py")
    'hcompile._plan'
    """
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# pytest puts tests/ itself on the path, so a module there has no prefix.
FILE_OF_MODULE = {module_name(path): path for path in SOURCES} | {
    module_name(path).removeprefix("tests."): path for path in SUPPORT
}


def imported_files(path, source, file_of_module=FILE_OF_MODULE):
    """The files of this tree which the source at `path` imports, at whatever depth in it."""
    package = module_name(path)
    if not path.endswith("/__init__.py"):
        package = package.rpartition(".")[0]
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = [node.module] if node.module else []
            if node.level:
                # One dot is the package itself, each further dot one package up.
                parents = package.split(".")
                origin = parents[: len(parents) - node.level + 1] + origin
            names += [".".join([*origin, alias.name]) for alias in node.names]
    files = set()
    for name in names:
        # `from hcompile._plan import x`: x is a module, or else a name in hcompile._plan.
        while name and name not in file_of_module:
            name = name.rpartition(".")[0]
        if name:
            files.add(file_of_module[name])
    return files - {path}


IMPORTS = {path: imported_files(path, source) for path, source in SOURCES.items()}


def layer_of(path):
    for layer in LAYERS:
        if path == layer or (layer.endswith("/") and path.startswith(layer)):
            return layer
    raise AssertionError(f"{path} is in no layer: add it to LAYERS in tests/test_layers.py")


def upward_imports(imports):
    """The imports, as 'a imports b', against the order of LAYERS."""
    found = []
    for path, imported in sorted(imports.items()):
        layer = layer_of(path)
        for other in sorted(imported):
            below = layer_of(other)
            if layer == TOP:
                allowed = below not in USERS
            elif below == TOP:
                allowed = layer in USERS
            else:
                allowed = LAYERS.index(layer) <= LAYERS.index(below)
            if not allowed:
                found.append(f"{path} imports {other}")
    return found


# BUILD.


@dataclass(frozen=True)
class Target:
    kind: str
    name: str
    srcs: tuple[str, ...]
    deps: tuple[str, ...]


def read_build():
    targets = []
    for statement in ast.parse((ROOT / "BUILD").read_text()).body:
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
            continue
        kind = ast.unparse(statement.value.func)
        if kind not in ("py_library", "py_test"):
            continue
        fields = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in statement.value.keywords
            if keyword.arg in ("name", "srcs", "deps")
        }
        targets.append(
            Target(kind, fields["name"], tuple(fields["srcs"]), tuple(fields.get("deps", ())))
        )
    return targets


TARGETS = read_build()
LIBRARY_OF_FILE = {
    file: f":{target.name}"
    for target in TARGETS
    if target.kind == "py_library"
    for file in target.srcs
}


def sources_of(kind):
    return sorted(file for target in TARGETS if target.kind == kind for file in target.srcs)


def test_target_names_are_unique():
    names = [target.name for target in TARGETS]
    assert sorted(set(names)) == sorted(names)


def test_every_module_is_in_exactly_one_library():
    assert sources_of("py_library") == sorted([*SOURCES, *SUPPORT])


def test_every_library_is_one_layer():
    libraries = [t for t in TARGETS if t.kind == "py_library" and t.name != "test_support"]
    layers = [{layer_of(file) for file in target.srcs} for target in libraries]
    assert sorted(map(sorted, layers)) == sorted([layer] for layer in LAYERS)


def test_every_test_file_is_in_exactly_one_test():
    assert sources_of("py_test") == sorted(TESTS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_deps_are_the_imports(target):
    texts = SOURCES | TESTS | SUPPORT
    imported = set().union(*(imported_files(file, texts[file]) for file in target.srcs))
    if target.kind == "py_test":
        imported |= set(SUPPORT)
    needed = {LIBRARY_OF_FILE[file] for file in imported} - {f":{target.name}"}
    assert sorted(needed) == sorted(target.deps), f"the left side belongs in BUILD, {target.name}"


# The layers.


def test_no_module_imports_upward():
    assert not upward_imports(IMPORTS)


def test_no_import_cycles():
    # Between the modules, which is stricter than between the targets: a target can be a folder.
    list(graphlib.TopologicalSorter(IMPORTS).static_order())
    list(graphlib.TopologicalSorter({f":{t.name}": t.deps for t in TARGETS}).static_order())


def test_no_module_hides_an_import():
    # Only import statements count above, so there must be no other way in.
    hidden = re.compile(r"\b(import_module|__import__)\(")
    assert not [path for path, source in SOURCES.items() if hidden.search(source)]


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("hcompile/_jit.py", "from . import _region", {"hcompile/_region.py"}),
        ("hcompile/_jit.py", "from ._plan.program import Program", {"hcompile/_plan/program.py"}),
        ("hcompile/_jit.py", "from ._plan import program", {"hcompile/_plan/program.py"}),
        ("hcompile/_jit.py", "from ._plan import Plan", {"hcompile/_plan/__init__.py"}),
        ("hcompile/_jit.py", "import hcompile as hc", {"hcompile/__init__.py"}),
        ("hcompile/_jit.py", "import hcompile._region", {"hcompile/_region.py"}),
        ("hcompile/_plan/program.py", "from .. import _region", {"hcompile/_region.py"}),
        ("hcompile/_plan/__init__.py", "from .program import A", {"hcompile/_plan/program.py"}),
        ("hcompile/_jit.py", "def f():\n  from hcompile import jit", {"hcompile/__init__.py"}),
        ("hcompile/_jit.py", "import jax, hcompiler\nfrom jax import jit", set()),
        ("tests/test_jit.py", "from hcompile._jit import jit", {"hcompile/_jit.py"}),
    ],
)
def test_imports_are_found(path, source, expected):
    files = [
        "hcompile/__init__.py",
        "hcompile/_jit.py",
        "hcompile/_region.py",
        "hcompile/_plan/__init__.py",
        "hcompile/_plan/program.py",
    ]
    assert imported_files(path, source, {module_name(file): file for file in files}) == expected


@pytest.mark.parametrize(
    ("path", "imported", "allowed"),
    [
        ("hcompile/_jit.py", "hcompile/_region.py", True),
        ("hcompile/_region.py", "hcompile/_jit.py", False),
        ("hcompile/_plan/a.py", "hcompile/_plan/b.py", True),
        ("hcompile/_jit.py", "hcompile/__init__.py", False),
        ("hcompile/_jit.py", "hcompile/examples/gpt.py", False),
        ("hcompile/examples/gpt.py", "hcompile/__init__.py", True),
        ("hcompile/__init__.py", "hcompile/_jit.py", True),
        ("hcompile/__init__.py", "hcompile/_cli.py", False),
    ],
)
def test_upward_imports_are_found(path, imported, allowed):
    assert upward_imports({path: {imported}}) == ([] if allowed else [f"{path} imports {imported}"])


# What hcompile takes from JAX, and from nobody else.


def jax_names(source):
    """Every dotted name under jax in the text, and what `from jax import ...` imports.

    >>> sorted(jax_names("from jax import extend" + chr(10) + "x = jax.numpy.ones"))
    ['jax.extend', 'jax.numpy.ones']
    """
    names = set(re.findall(r"\bjax(?:\.\w+)+", source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "jax" and not node.level:
            names |= {f"jax.{alias.name}" for alias in node.names}
    return names


def test_nothing_private_of_jax_is_used():
    private = {path for path, source in SOURCES.items() if "jax._src" in source}
    private |= {
        path
        for path, source in SOURCES.items()
        if any(re.match(r"jax\._(?!_)", name) for name in jax_names(source))
    }
    assert not private


@pytest.mark.parametrize(
    "name", ["__version__", "__version_info__", "version", "extend", "interpreters"]
)
def test_only_jax_compat_sees_the_changing_parts_of_jax(name):
    users = {
        path
        for path, source in SOURCES.items()
        if any(found.split(".")[1] == name for found in jax_names(source))
    }
    assert users <= {"hcompile/_jax_compat.py"}


def frameworks_loaded_by(statements):
    """Which of FRAMEWORKS a fresh interpreter has loaded after the statements."""
    code = f"{statements}\nimport sys\nprint(*[n for n in {FRAMEWORKS} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_import_loads_no_framework():
    assert frameworks_loaded_by("import hcompile") == []


def test_a_loaded_framework_would_be_found():
    assert "flax" in frameworks_loaded_by("import hcompile\nimport flax")


# The rest.


def test_public_names():
    public = {
        name
        for name, value in vars(hcompile).items()
        # A submodule becomes an attribute once anybody imports it.
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public | {"__version__"} == PUBLIC_NAMES
    assert set(getattr(hcompile, "__all__", PUBLIC_NAMES)) == PUBLIC_NAMES


def test_top_imports_public_names_only():
    for node in ast.walk(ast.parse(SOURCES[TOP])):
        if isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                # `import jit as jit` is how a type checker knows that the name is passed on.
                assert alias.name in PUBLIC_NAMES
                assert alias.asname == alias.name


def test_version_is_the_project_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert hcompile.__version__ == project["version"]


@pytest.mark.parametrize("path", SOURCES)
def test_module_is_short_enough_to_read(path):
    assert len(SOURCES[path].splitlines()) <= 600
