"""What rendering says about a resource that it cannot render."""


class RenderError(ValueError):
    """A valid resource that asks for what cannot be rendered.

    `path` is the field as a person writes it (`spec.engine.type`), `message` what to do about it.
    """

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message
