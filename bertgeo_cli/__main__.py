"""`python -m bertgeo_cli` is `bertgeo`."""

from .cli import main

if __name__ == "__main__":
    main()
