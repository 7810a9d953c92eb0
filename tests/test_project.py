"""The shape of the project: which way imports point, and what importing costs."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import dlcft

PACKAGE = Path(dlcft.__file__).parent

# A folder imports only folders to its left.
ORDER = [
    "network",
    "curvature",
    "closed_form",
    "data",
    "methods",
    "store",
    "learner",
    "backbones",
    "pages",
    "update",
    "comparison",
    "integrations",
    "bench",
    "cli",
]


def imports():
    """The modules of this package that each module imports, also inside functions."""
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in files.items():
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        named = [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
        parts = [text.removeprefix("dlcft.").split(".") for text in named if text.startswith("dlcft.")]
        prefixes = {".".join(part[:length]) for part in parts for length in range(1, len(part) + 1)}
        found[name] = {target for target in prefixes if target in files}
    return found


def test_folders_import_in_one_direction():
    assert sorted(path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_") == sorted(ORDER)
    order = {name: place for place, name in enumerate(ORDER)}
    edges = [(name.split(".")[0], target.split(".")[0]) for name, targets in imports().items() for target in targets]
    assert [edge for edge in edges if edge[0] in order and order[edge[0]] < order[edge[1]]] == []


def test_no_import_cycles():
    assert len(list(graphlib.TopologicalSorter(imports()).static_order())) > 90


def loaded(code):
    program = f"import sys; {code}; print(' '.join(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    return set(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_the_library_is_light():
    heavy = {
        "PIL",
        "sklearn",
        "scipy",
        "pandas",
        "matplotlib",
        "cyclopts",
        "rich",
        "torchvision",
        "timm",
        "jinja2",
        "joblib",
        "mlflow",
        "huggingface_hub",
        "onnx",
        "onnxruntime",
        "onnxscript",
    }
    names = "; ".join(f"dlcft.{name}" for name in dlcft.__all__)
    assert not loaded(f"import dlcft; {names}") & heavy
    assert "torch" not in loaded("import dlcft")


def test_help_does_not_import_torch():
    quiet = "import io; kept, sys.stdout = sys.stdout, io.StringIO()"
    code = "from dlcft.cli import app; app(['--help'], result_action='return_value'); sys.stdout = kept"
    modules = loaded(f"{quiet}; {code}")
    assert "cyclopts" in modules
    assert not modules & {"torch", "sklearn", "numpy"}


def test_public_names():
    assert set(dir(dlcft)) == set(dlcft.__all__)
    assert all(getattr(dlcft, name) is not None for name in dlcft.__all__)
