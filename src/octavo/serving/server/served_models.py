"""The names under which a model can be asked."""

import time
from typing import Any

from fastapi import FastAPI

from octavo.serving.server.api_error import ApiError
from octavo.serving.server.bare_app import ERRORS


class ServedModels:
    """One model by its names, the first of which answers carry; about: what /v1/models adds."""

    def __init__(self, names: tuple[str, ...], **about: Any) -> None:
        self.names = names
        self._about = {"created": int(time.time()), "owned_by": "octavo", **about}

    def check(self, name: str | None) -> None:
        """ApiError unless the model is one that is served here; none at all is the one we have."""
        if name is not None and name not in self.names:
            message = f"expected a model served here ({', '.join(self.names)}), got {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def add_routes(self, app: FastAPI) -> None:
        """OpenAI's two routes."""

        @app.get("/v1/models", responses=ERRORS)
        async def models() -> dict[str, Any]:
            """The names under which the model can be asked."""
            return {"object": "list", "data": [self._entry(name) for name in self.names]}

        @app.get("/v1/models/{name:path}", responses=ERRORS)
        async def model(name: str) -> dict[str, Any]:
            """One of them."""
            self.check(name)
            return self._entry(name)

    def _entry(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", **self._about}
