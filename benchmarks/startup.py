"""How long `import dlcft` and `dlcft --help` take, in units of bare Python and of `import torch`.

python benchmarks/startup.py
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from measure import arguments, reported, timed

PROGRAMS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import dlcft": ["-c", "import dlcft"],
    "dlcft.Learner": ["-c", "import dlcft; dlcft.Learner"],
    "dlcft --help": ["-m", "dlcft", "--help"],
}


def run(options: list[str]) -> None:
    subprocess.run([sys.executable, *options], check=True, capture_output=True)


def main() -> None:
    options = arguments(__doc__).parse_args()
    with reported(options.out) as output:
        times = timed({name: partial(run, given) for name, given in PROGRAMS.items()}, options.rounds)
        units = ("python", "import torch")
        rows = [[name, *(str(times.ratio(name, unit)) for unit in units)] for name in PROGRAMS]
        output.table("startup", "Time to start", ["", *(f"of `{unit}`" for unit in units)], rows)


if __name__ == "__main__":
    main()
