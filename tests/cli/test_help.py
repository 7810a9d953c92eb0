"""Help, suggestions, one line for a mistake, and completion in the shell."""

import subprocess
import sys

import pytest

from dlcft.cli import COMMANDS, main
from tests.support.commands import dlcft_process

HEAVY = {"torch", "numpy", "sklearn", "scipy", "matplotlib", "PIL", "jinja2", "joblib", "safetensors", "submitit"}


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_has_an_example_and_imports_nothing_heavy(command):
    asked = [*([] if command is None else [command]), "--help"]
    program = f"import sys\nfrom dlcft.cli import main\ntry:\n    main({asked})\n"
    program += "finally:\n    print('modules:', *{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    text, _, modules = done.stdout.partition("modules:")
    assert done.returncode == 0, done.stderr
    assert f"Example: dlcft {command or 'demo'}" in " ".join(text.split())
    assert "cyclopts" in modules.split()
    assert not set(modules.split()) & HEAVY


def test_every_command_is_listed_in_our_order():
    text = dlcft_process("--help").stdout
    places = [text.index(f"│ {name} ") for name in COMMANDS]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["dmo"], 'Did you mean "demo"?'),
        (["demo", "--epohcs", "3"], "Did you mean --epochs? See dlcft demo --help."),
        (["demo", "--epochs", "many"], 'unable to convert "many" into int'),
        (["run", "--scenario", "class"], 'Did you mean "class-il"?'),
        (["run", "--method", "dlfct"], "did you mean 'dlcft'?"),
        (["run", "--dataset", "seq-cifar1000"], "did you mean 'seq-cifar100'"),
        (["run", "--dataset", "seq-cifar10", "--data", "."], "or fetch it: dlcft run --download"),
        (["run", "--backbone", "shiped"], "Did you mean 'shipped'?"),
        (["run", "--cluster", "timeout_min"], "--cluster is 'timeout_min'; key=value is needed."),
        (["run", "--cluster", "timeout_min=3"], "'timeout_min' is for an executor"),
        (["run", "--jobs", "0"], "jobs is 0"),
        (["list", "method"], 'Did you mean "methods"?'),
        (["reproduce", "data-il", "--scale", "mini"], 'Choose from: "smoke", "small", "paper"'),
        (["reproduce", "data-li"], 'Did you mean "data-il"?'),
        (["list"], "See dlcft list --help."),
        (["pretrain", "--data", "digits", "--save", "x.pth"], "a file whose name ends in .safetensors"),
        (["pretrain", "--data", "digits", "--save", "x.safetensors", "--convert", "no.pth"], "there is no such file"),
        (["pretrain", "--data", "digits", "--save", "x.safetensors", "--size", "0"], "--size is 0"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(arguments, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("dlcft: ")
    assert sentence in said.err
    assert not list(tmp_path.iterdir())


def test_a_reader_who_has_seen_enough_is_no_mistake():
    command = f"{sys.executable} -m dlcft list methods | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


BASH = """
source "$HOME/.local/share/bash-completion/completions/dlcft"
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMP_LINE="${{COMP_WORDS[*]}}"; COMP_POINT=${{#COMP_LINE}}
function=$(complete -p dlcft | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function" dlcft "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("bash", ".local/share/bash-completion/completions/dlcft"),
        ("zsh", ".zsh/completions/_cyclopts_dlcft"),
        ("fish", ".config/fish/completions/dlcft.fish"),
    ],
)
def test_completion_is_installed(shell, file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    done = dlcft_process("--install-completion", "--shell", shell)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / file).read_text()
    assert all(name in script for name in (*COMMANDS, "per-class", "class-il"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [("dlcft pre", {"predict", "pretrain"}), ("dlcft run --per", {"--per-class"}), ("dlcft list back", {"backbones"})],
)
def test_bash_completes(words, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    dlcft_process("--install-completion", "--shell", "bash")
    done = subprocess.run(["bash", "-c", BASH.format(words=words)], capture_output=True, text=True, check=False)
    assert set(done.stdout.split()) == expected, done.stderr
