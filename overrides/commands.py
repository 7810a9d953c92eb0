"""Print the reference page of all commands: `python overrides/commands.py > docs/reference/commands.md`."""

from dlcft.cli import app

HEAD = "# Commands\n\nAs `dlcft --help` and `dlcft COMMAND --help` tell them.\n"

if __name__ == "__main__":
    made = app.generate_docs(output_format="markdown")
    print(HEAD + made[made.index("\n## dlcft demo") :])
