"""The shape of the project: which way imports point, and what importing costs."""

import ast
import subprocess
import sys
from pathlib import Path

import dlcft

PACKAGE = Path(dlcft.__file__).parent

# Whatever stands further down may import what stands further up, never the reverse.
ORDER = [
    "prepare",
    "linearize",
    "losses",
    "blocks",
    "buffer",
    "augment",
    "ridge_fit",
    "ridge",
    "curvature",
    "memory",
    "classifier",
    "metrics",
    "estimators._geometry",
    "estimators._conv_gram",
    "estimators.grams",
    "estimators.rows",
    "estimators.statistics",
    "estimators",
    "images",
    "files",
    "labels",
    "sources",
    "data",
    "tangent",
    "progress",
    "methods.base",
    "methods.closed_form",
    "methods.distillation",
    "methods.replay",
    "methods.quadratic",
    "methods",
    "recipes",
    "checkpoint._files",
    "checkpoint._lock",
    "checkpoint",
    "assembly",
    "adoption",
    "training",
    "saving",
    "core",
    "learner",
    "trial",
    "forecasts",
    "calibration",
    "updates",
    "pages",
    "pages.drawing",
    "pages.update",
    "bench",
    "bench.backbones.resnet",
    "bench.backbones.files",
    "bench.backbones.packages",
    "bench.backbones",
    "bench.pretrain",
    "bench.datasets.download",
    "bench.datasets.image_set",
    "bench.datasets.unpickle",
    "bench.datasets.pickled",
    "bench.datasets.arrays",
    "bench.datasets.trees",
    "bench.datasets.embedded",
    "bench.datasets.catalogue",
    "bench.datasets",
    "bench.streams",
    "bench.probes",
    "bench.events",
    "bench.experiment",
    "bench.executor",
    "bench.spectrum",
    "bench.scales",
    "bench.paper",
    "bench.planning",
    "bench.tuning",
    "bench.reproduction",
    "bench.report.summary",
    "bench.report.artefacts",
    "bench.report.tables",
    "bench.report.text",
    "bench.report.figures",
    "bench.report.page",
    "bench.report",
    "bench.demo",
    "cli.arguments",
    "cli.answers",
    "cli.bench",
    "cli.demo",
    "cli.opening",
    "cli.model",
    "cli.paper",
    "cli",
    "cli.__main__",
]


def module_name(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path, modules):
    """The modules of this package that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dlcft."):
            base = node.module.removeprefix("dlcft.")
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names & modules if names <= modules else {base} | (names & modules)
    return found


def test_imports_point_one_way():
    place = {name: index for index, name in enumerate(ORDER)}
    files = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    files.pop("")
    assert set(files) == set(ORDER), "every module has its place in ORDER"
    backward = [
        (name, other)
        for name, path in files.items()
        for other in imported(path, set(files))
        if place[other] >= place[name]
    ]
    assert backward == []


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
