"""Settings of the whole suite; README and docs belong to it."""

import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser
from tests.support.documents import SHELL, clear, inline_commands, prepare

# these import packages that need not be there
collect_ignore = [f"src/dlcft/integrations/{name}.py" for name in ("avalanche", "huggingface", "lightning")]

torch.set_num_threads(1)  # small tensors: more threads only wait for each other

pytest_collect_file = Sybil(
    [PythonCodeBlockParser(), SHELL, inline_commands],
    patterns=["README.md", "docs/*.md", "CONTRIBUTING.md"],
    setup=prepare,
    teardown=clear,
).pytest()
