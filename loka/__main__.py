"""`python -m loka`."""

from loka.cli.main import run

if __name__ == "__main__":
    run()
