"""`python -m memfit`: the same as `memfit`."""

from memfit.commands.main import main

if __name__ == "__main__":
    main()
