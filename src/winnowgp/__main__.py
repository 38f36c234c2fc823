"""`python -m winnowgp` is `winnow`."""

from winnowgp.cli import main

if __name__ == "__main__":
    main()
