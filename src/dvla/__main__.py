"""``python -m dvla``: see `dvla.command`."""

from dvla.command import main

if __name__ == "__main__":
    main()
