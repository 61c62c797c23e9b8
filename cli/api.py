"""The admin client: the service's HTTP API with a token, problems turned into typed errors."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from strongroom.errors import Misuse, Refused, StrongroomError, Unavailable

TIMEOUT_S = 60.0


class ApiProblem(StrongroomError):
    """The service answered with a problem (RFC 9457)."""

    code = "problem"

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        detail = problem.get("detail") or problem.get("title") or "no detail"
        super().__init__(
            f"{status}: {detail}", field=problem.get("field"), limit=problem.get("limit")
        )
        self.status = status
        self.problem = problem


def read_token(path: Path) -> str:
    """The bearer token in a file; `Refused` if others than its owner can read it."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise Refused(
            f"no token at {path}: run `strongroom token` beside the service, or give --token-file",
            field="token_file",
        ) from error
    if mode & 0o077:
        raise Refused(f"{path} can be read by others: chmod 600 {path}", field="token_file")
    return path.read_text().strip()


def system_tls() -> ssl.SSLContext:
    """The system's authorities, or those of the file that `SSL_CERT_FILE` names."""
    return ssl.create_default_context()


class Api:
    """One service, one caller. Use as a context manager."""

    def __init__(self, url: str, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        # No proxy from the environment: the token is for the service alone.
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_s,
            trust_env=False,
            verify=system_tls(),
        )
        self._url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: str | int | None) -> Any:
        """`GET`; parameters that are None are left out."""
        given = {name: value for name, value in params.items() if value is not None}
        return self._call("GET", path, params=given)

    def items(self, path: str, **params: str | int | None) -> Iterator[dict[str, Any]]:
        """Every item of a listing, page by page."""
        cursor: str | None = None
        while True:
            page = self.get(path, cursor=cursor, **params)
            yield from page["items"]
            cursor = page.get("next_cursor")
            if not cursor:
                return

    def post(
        self, path: str, body: dict[str, Any], *, headers: dict[str, str] | None = None
    ) -> Any:
        """`POST` with a JSON body."""
        return self._call("POST", path, json=body, headers=headers)

    def etag(self, path: str) -> str:
        """The `ETag` of what is at `path` now."""
        return str(self._response("GET", path).headers["ETag"])

    def change(self, method: str, path: str, body: dict[str, Any], *, etag: str) -> Any:
        """`PUT` or `POST` what is to take the place of the state that `etag` names."""
        return self._call(method, path, json=body, headers={"If-Match": etag})

    def delete(self, path: str) -> Any:
        """`DELETE`."""
        return self._call("DELETE", path)

    def text(self, path: str, **params: str | int | None) -> str:
        """`GET` of something that is no JSON."""
        given = {name: value for name, value in params.items() if value is not None}
        return self._response("GET", path, params=given).text

    def download(self, path: str, target: Path, **params: str | int | None) -> int:
        """`GET` into a new file, however long it is; returns how many bytes there are."""
        given = {name: value for name, value in params.items() if value is not None}
        count = 0
        with self._stream("GET", path, params=given, timeout=None) as response:
            try:
                with target.open("xb") as file:
                    for chunk in response.iter_bytes():
                        count += file.write(chunk)
            except OSError as error:
                raise Misuse(f"{target} cannot be written", field="export") from error
        return count

    def lines(self, path: str, body: dict[str, Any], **params: str | int | None) -> Iterator[str]:
        """`POST` whose answer comes line by line."""
        with self._stream("POST", path, json=body, params=params, timeout=None) as response:
            yield from response.iter_lines()

    @contextlib.contextmanager
    def _stream(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, **options) as response:
                if not response.is_success:
                    response.read()
                    raise _problem(response)
                yield response
        except httpx.TransportError as error:
            raise Unavailable(f"the service at {self._url} went away", field="url") from error

    def _call(self, method: str, path: str, **options: Any) -> Any:
        response = self._response(method, path, **options)
        return response.json() if response.content else None

    def _response(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise Unavailable(
                f"no service at {self._url} ({type(error).__name__}): start it with "
                "`strongroom serve` or give --url",
                field="url",
            ) from error
        if response.is_success:
            return response
        raise _problem(response)


def _problem(response: httpx.Response) -> ApiProblem:
    try:
        problem = response.json()
    except ValueError:
        problem = {"title": response.reason_phrase}
    return ApiProblem(response.status_code, problem)
