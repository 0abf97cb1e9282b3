"""Errors of a request on its way through a runtime."""


class RequestError(ValueError):
    """A request that cannot be served: the caller's mistake. `field` names what is wrong."""

    def __init__(self, message: str, field: str | None = None) -> None:
        """Keep the message and the name of the field at fault."""
        super().__init__(message)
        self.field = field


class NonFiniteError(ArithmeticError):
    """The model computed a NaN or an infinity for an item. `field` names the item."""

    def __init__(self, message: str, field: str | None = None) -> None:
        """Keep the message and the name of the item."""
        super().__init__(message)
        self.field = field


class RuntimeClosedError(RuntimeError):
    """The runtime was closed while work was on its way."""
