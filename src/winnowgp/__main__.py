"""`python -m winnowgp` is `winnow`."""

from winnowgp.cli.app import main

if __name__ == "__main__":
    main()
