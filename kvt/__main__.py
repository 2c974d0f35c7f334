"""`python -m kvt`: the `kvt` command."""

import sys

if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # the working directory comes last, as for `kvt`: no file in it hides a package
    from kvt.commands import main

    main()
