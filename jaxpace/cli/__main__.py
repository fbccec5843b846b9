"""`python -m jaxpace.cli`, for where the `jaxpace` script is not on PATH."""

from jaxpace.cli.main import entry_point

if __name__ == "__main__":
  entry_point()
