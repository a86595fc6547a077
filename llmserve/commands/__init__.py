"""What the commands of llmserve share, ours and those of plugins: options, tables, progress.

from llmserve.commands import Status, asks_a_server, print_table

@click.command()
@click.argument("model")
@asks_a_server
def weigh(model: str, url: str | None, repository: Path | None, openai: str | None) -> None:
    with Status("weighing") as status:
        ...
"""

from llmserve.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
