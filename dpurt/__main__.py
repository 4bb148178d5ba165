"""`python -m dpurt` is `dpurt`."""

import sys

from dpurt.cli import main

sys.exit(main())
