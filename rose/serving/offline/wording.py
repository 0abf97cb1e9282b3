"""How numbers are said."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number with its noun: `1 text`, `2,000 texts`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
