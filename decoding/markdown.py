"""Tables in Markdown, and the blocks of documents that programs write."""

import pathlib
from collections.abc import Sequence

from specax.decoding.errors import InvalidRequestError


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *map(list, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_block(path: pathlib.Path, name: str, text: str, dry_run: bool = False) -> None:
    """Puts text between the lines `<!-- NAME:begin -->` and `<!-- NAME:end -->` of a file.

    Raises:
      InvalidRequestError: no such file, or not one pair of markers in it.
    """
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    try:
        old = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"--update: can't read {path}: {error.strerror}") from error
    head, begin, rest = old.partition(first)
    _, end, tail = rest.partition(last)
    if not begin or not end:
        raise InvalidRequestError(f"--update: {path} has no lines {first} and {last} to write between")
    if not dry_run:
        path.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")
