"""`python -m jaxgpt`, equal to the command `jaxgpt`."""

from jaxgpt.cli.main import main

if __name__ == "__main__":
    main()
