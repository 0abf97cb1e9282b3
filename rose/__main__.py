"""`python -m rose` is `rose`."""

from rose.serving.cli import main

main()
