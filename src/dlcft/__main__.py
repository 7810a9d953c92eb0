"""The command `dlcft`, and `python -m dlcft`: an interruption at any moment is one line and exit code 130."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

_LINE = b"dlcft: interrupted.\n"
_INTERRUPTED = 130  # exit code


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _unraisable
    code: Any = 0
    try:
        from dlcft.cli import main as run

        run()
    except KeyboardInterrupt:
        _leave()
    except SystemExit as stopped:
        code = stopped.code or 0
    finally:  # nothing is left that could be interrupted
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # threads of torch.distributed may end Python with an abort, and Python itself by a signal after an interruption
    if code == _INTERRUPTED or ("torch.distributed" in sys.modules and "RANK" in os.environ):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, once: who presses again wants to leave now, and no file is ever half-written."""
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch.__spec__, "_initializing", False):
        _leave()  # its C++ code does not survive an exception while it is imported
    signal.signal(signal.SIGINT, _leave)
    raise KeyboardInterrupt


def _leave(*_: Any) -> None:
    os.write(2, _LINE)
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()
    os._exit(_INTERRUPTED)


def _unraisable(unraisable: Any) -> None:
    """Leave where Python would only print that an interruption was ignored, such as in a destructor."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    main()
