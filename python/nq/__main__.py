"""`python -m nq` is the program nq."""

from . import main

if __name__ == "__main__":
    main()
