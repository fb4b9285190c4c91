"""`python -m strategist` is `strategist`."""

import sys

from strategist.cli import main

sys.exit(main())
