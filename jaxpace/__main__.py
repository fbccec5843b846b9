"""`python -m jaxpace`, for where the `jaxpace` script is not on PATH."""

import sys

from jaxpace.cli.main import main

if __name__ == "__main__":
  sys.exit(main())
