"""How long `import dlcft` and `dlcft --help` take: medians, in units of bare Python and of `import torch`.

Rounds are interleaved, so that a busy machine slows all of them alike: `python benchmarks/startup.py --rounds 9`.
"""

import argparse
import statistics
import subprocess
import sys
import time

PROGRAMS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import dlcft": ["-c", "import dlcft"],
    "dlcft.Learner": ["-c", "import dlcft; dlcft.Learner"],
    "dlcft --help": ["-m", "dlcft", "--help"],
}


def seconds(arguments):
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    taken = {name: [] for name in PROGRAMS}
    for number in range(rounds + 1):
        for name, arguments in PROGRAMS.items():
            found = seconds(arguments)
            if number:  # the first round fills the disk's cache
                taken[name].append(found)
    median = {name: statistics.median(found) for name, found in taken.items()}
    print(f"{'':14} {'of python':>10} {'of import torch':>16}")
    for name, found in median.items():
        print(f"{name:14} {found / median['python']:10.2f} {found / median['import torch']:16.2f}")


if __name__ == "__main__":
    main()
