"""``python -m llmserve_cli`` is ``llmserve``."""

from llmserve_cli.main import main

if __name__ == "__main__":
    main()
