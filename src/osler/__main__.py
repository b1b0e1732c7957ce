"""``python -m osler``."""

from osler.cli.main import main

if __name__ == "__main__":
    main()
