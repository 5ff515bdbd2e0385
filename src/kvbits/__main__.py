"""`python -m kvbits` is `kvbits`."""

from .cli import main

main()
