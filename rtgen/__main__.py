"""`python -m rtgen` is the command line."""

from rtgen.cli import main

raise SystemExit(main())
