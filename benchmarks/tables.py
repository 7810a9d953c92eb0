"""Put the tables that benchmarks have kept into the documents.

    python benchmarks/tables.py           # rewrite them
    python benchmarks/tables.py --check   # say which documents differ, and exit with 1 if one does

A document marks the place: `<!-- benchmark linearize: step -->`, the table, `<!-- end -->`. It is the table `step` of
`results/benchmarks/linearize.json`, with the command and the machine that it was measured by below it. A file may have
tables of several runs: each has its own command.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from measure import markdown

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "results" / "benchmarks"
PLACE = re.compile(r"(<!-- benchmark ([\w-]+): ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """A document with the kept tables at their places."""
    return PLACE.sub(lambda found: f"{found[1]}\n{shown(found[2], found[3])}\n\n{found[4]}", text)


def shown(benchmark: str, name: str) -> str:
    kept = json.loads((KEPT / f"{benchmark}.json").read_text())
    table, machine = kept["tables"][name], kept["machine"]
    where = f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, {machine['day']}"
    return f"{markdown(table['header'], table['rows'])}\n\n*`{table.get('command', kept['command'])}`; {where}.*"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    stale = [document for document in documents() if filled(document.read_text()) != document.read_text()]
    for document in stale:
        print(f"{document.relative_to(ROOT)} {'differs from results/benchmarks' if options.check else 'is rewritten'}.")
        if not options.check:
            document.write_text(filled(document.read_text()))
    raise SystemExit(1 if options.check and stale else 0)


if __name__ == "__main__":
    main()
