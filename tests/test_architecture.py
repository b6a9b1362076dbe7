"""The rules of ARCHITECTURE.md that can be read off the source: who imports whom, what each plane may touch."""

import ast
import fnmatch
import functools
import os
import pathlib
import re
import tomllib
from collections.abc import Iterator

import pytest

import specax

ROOT = pathlib.Path(__file__).parent.parent

# What each room may import of ours, itself aside.
MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "pallas_kernels": set(),
    "sharding": set(),
    "model": {"pallas_kernels", "sharding"},
    "paged": {"sharding"},
    "decoding": {"configs", "pallas_kernels", "sharding", "model", "paged"},
    "train_drafts": {"configs", "pallas_kernels", "sharding", "model", "paged", "decoding"},
    "specax": {"configs", "pallas_kernels", "sharding", "model", "paged", "decoding", "train_drafts"},
}
# Plain Python and NumPy. `jax` itself: only to register dataclasses as pytrees.
HOST_PLANE = [
    *(
        f"paged/{name}.py"
        for name in (
            "disk_tier", "host_tier", "memory", "namespaces", "page_file", "page_table", "pool", "radix_tree", "tiers",
        )
    ),
    *(
        f"decoding/{name}.py"
        for name in (
            "admission", "batch", "beam_rounds", "beam_search", "buckets", "logprobs", "outputs", "request",
            "sampling_params", "sampling_table", "scheduler", "simulate/cost_model", "simulate/curve", "simulate/loop",
            "simulate/report", "simulate/trace", "stats", "swap_cost", "text", "validation",
        )
    ),
    *sorted(f"decoding/policies/{path.name}" for path in ROOT.glob("decoding/policies/*.py")),
]  # fmt: skip
DEVICE_PLANE = [
    *("model/layers.py", "model/decoder.py", "decoding/sampler.py"),
    # (`deviceless` drives the compiler from outside: it sets what Mosaic reads from the environment. `dispatch` looks,
    # while a program is traced, at the device that it will run on.)
    *sorted(
        str(path.relative_to(ROOT))
        for path in ROOT.glob("pallas_kernels/**/*.py")
        if path.stem not in ("deviceless", "dispatch")
    ),
]
AMBIENT = {"time", "datetime", "os", "random", "secrets", "uuid", "socket"}  # clocks, environment, entropy


def sources(room: str) -> list[pathlib.Path]:
    folder = ROOT / room
    # specax/ links to the other rooms: its own files only.
    return sorted(folder.glob("*.py") if room == "specax" else folder.rglob("*.py"))


@functools.cache
def tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, at the top or inside functions; `from a import b` gives `a.b`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides its room"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def test_every_room_is_known():
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms - {"tests"} <= set(MAY_IMPORT), "a new top-level package: give it a row in MAY_IMPORT"
    linked = {path.name for path in (ROOT / "specax").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert linked == rooms - {"specax", "tests"}, "every room is linked into specax/, and nothing else is"


@pytest.mark.parametrize("room", [room for room in MAY_IMPORT if (ROOT / room).is_dir()])
def test_imports_run_one_way(room):
    wrong = []
    for path in sources(room):
        for line, name in imports(path):
            first, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            if first == "specax" and room != "specax" and target not in MAY_IMPORT[room] | {room}:
                wrong.append(where)  # (also the public names of specax itself, which import everything)
            elif first in (set(MAY_IMPORT) | {"tests"}) - {"specax"}:
                wrong.append(f"{where}: not under its import name")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", HOST_PLANE)
def test_the_host_plane_is_plain_python_and_numpy(file):
    path = ROOT / file
    names = [name for _, name in imports(path)]
    heavy = [n for n in names if n.startswith(("jax.", "flax", "jaxlib")) or n in ("flax", "optax")]
    assert not heavy, f"{file} imports {heavy}"
    uses = {
        ast.unparse(node)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("jax.")
    }
    assert uses <= {"jax.tree_util", "jax.tree_util.register_dataclass"}, f"{file} uses {uses}"


@pytest.mark.parametrize("file", DEVICE_PLANE)
def test_the_device_plane_reads_no_clock_environment_or_global_entropy(file):
    path = ROOT / file
    bad = [name for _, name in imports(path) if name.partition(".")[0] in AMBIENT or name.startswith("numpy.random")]
    calls = [ast.unparse(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)]
    bad += [c for c in calls if c.startswith(("np.random", "numpy.random", "jax.config", "os.environ"))]
    bad += [f"global {', '.join(n.names)}" for n in ast.walk(tree(path)) if isinstance(n, ast.Global)]
    assert not bad, f"{file}: {bad}"


def test_no_path_of_one_machine_in_the_repository():
    # (Spelled so that this file does not hold one.)
    homes = "|".join(("work", "root", "home", "Users", "mnt", "scratch"))
    pattern = re.compile(rf"(?<![\w.:/~$}}])/(?:{homes})/[\w.-]+")
    found = []
    folders = [ROOT / room for room in MAY_IMPORT if room != "specax"] + [ROOT / n for n in ("tests", "scripts", ".ci")]
    files = [path for folder in folders if folder.is_dir() for path in folder.rglob("*")]
    files += [*ROOT.glob("*"), *(ROOT / "specax").glob("*.py")]
    for path in files:
        if path.is_dir() or "__pycache__" in path.parts or path.suffix in (".npz", ".safetensors", ".pyc", ".gguf"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not found, "\n".join(found)


def test_public_names_resolve():
    for name in specax.__all__:
        assert getattr(specax, name).__name__ == name
    assert sorted(specax.__all__, key=str.lower) == sorted(set(specax.__all__), key=str.lower)
    assert set(specax._HOMES) == set(specax.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = specax.no_such_name


def test_only_specax_is_installed():
    """As setuptools finds packages: no generic top-level name lands on a user's machine."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(settings) <= {"packages", "include-package-data", "package-data"}  # no py-modules, no package-dir
    find = settings["packages"]["find"]
    assert find.get("where", ["."]) == ["."]
    packages = []
    for folder, children, files in os.walk(ROOT, followlinks=True):
        children[:] = [c for c in children if "." not in c and c != "__pycache__"]  # setuptools' own rules, and
        name = ".".join(pathlib.Path(folder).relative_to(ROOT).parts)  # fnmatch on the dotted name
        if "__init__.py" in files and any(fnmatch.fnmatchcase(name, pattern) for pattern in find["include"]):
            packages.append(name)
    assert {name.partition(".")[0] for name in packages} == {"specax"}
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"specax", "tests"}
    assert {f"specax.{room}" for room in rooms} <= set(packages)
    assert not any(".tests" in name for name in packages)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert all(name.startswith("specax-") and target.startswith("specax.") for name, target in scripts.items())
