"""`python -m servesim` is the `sim` command."""

import sys

from .cli import main

sys.exit(main())
