"""`python -m kvt`: the `kvt` command."""

from kvt.commands import main

if __name__ == "__main__":
    main()
