"""`python -m epd_operator` is `epd`."""

from .cli import main

main()
