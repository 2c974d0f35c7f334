"""`python -m kvt`: the `kvt` command."""

from kvt.cli.main import main

if __name__ == "__main__":
    main()
