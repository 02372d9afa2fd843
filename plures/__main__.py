"""`python -m plures` is the program `plures`."""

from plures.cli.start import main

if __name__ == "__main__":
    main()
