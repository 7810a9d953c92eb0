"""`python -m dlcft.cli`."""

from dlcft.cli import main

main()
