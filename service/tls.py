"""The service's own TLS: versions and ciphers pinned, certificates exchanged while it serves.

Rules:
- TLS 1.3, or 1.2 with AES-GCM or ChaCha20 and forward secrecy where a setting says so.
- With `tls_client_ca` nobody gets as far as HTTP without a certificate of that authority. It
  says which machine calls; who calls is proven by token or proof all the same.
- The key's file is not for everybody: one that others may read stops the start.
- Files that changed are looked at every `tls_reload_s`. A new context is built aside and takes
  over whole, for new connections; files that do not fit together leave the old one in force.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from pathlib import Path
from typing import Final

from service.settings import ServiceSettings
from strongroom.errors import Misuse

TLS_1_2_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
_ANYBODY: Final = 0o004
_log = logging.getLogger("strongroom.service")

_State = tuple[tuple[int, int, int], ...]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_listen(settings: ServiceSettings) -> None:
    """Refuse an address that others can reach in plain HTTP, unless that was asked for.

    Raises `Misuse`, which says what to do.
    """
    if settings.tls_certificate is not None or is_loopback(settings.host):
        return
    if not settings.listen_beyond_loopback_in_plain_http:
        raise Misuse(
            f"{settings.host} can be reached from other machines and this server would speak plain "
            "HTTP: give --tls-certificate and --tls-key, or, behind a TLS proxy, say "
            "--listen-beyond-loopback-in-plain-http",
            field="host",
        )


class ServerTls:
    """The context that a server listens with; `look` puts changed files in force."""

    def __init__(self, settings: ServiceSettings) -> None:
        if settings.tls_certificate is None or settings.tls_key is None:
            raise Misuse("a certificate and its key belong together", field="tls_key")
        self._certificate, self._key = settings.tls_certificate, settings.tls_key
        self._client_ca = settings.tls_client_ca
        self._least = _VERSIONS[settings.tls_version_min]
        self._state = self._look()
        self.context = self._build()
        self._in_force = self.context
        # Every handshake passes here, also one that names no server.
        self.context.sni_callback = self._hand_over

    def look(self) -> bool:
        """Put changed files in force; whether there were any. Never raises for their content."""
        try:
            state = self._look()
            if state == self._state:
                return False
            self._in_force, self._state = self._build(), state
        except (Misuse, OSError) as error:
            _log.warning("the changed TLS files are not used: %s", error)
            return False
        _log.warning("TLS certificate exchanged")
        return True

    def _hand_over(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        del name, context
        connection.context = self._in_force

    def _look(self) -> _State:
        paths = [self._certificate, self._key, *filter(None, (self._client_ca,))]
        found = [path.stat() for path in paths]
        return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)

    def _build(self) -> ssl.SSLContext:
        _check_key(self._key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self._least
        context.set_ciphers(TLS_1_2_CIPHERS)
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self._certificate, self._key)
            if self._client_ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self._client_ca)
        except (ssl.SSLError, ValueError) as error:
            # The library's text names no secret: it tells which part of the file it did not like.
            raise Misuse(f"the TLS files do not work: {error}", field="tls_certificate") from error
        return context


def _check_key(path: Path) -> None:
    if path.stat().st_mode & _ANYBODY:
        raise Misuse(f"{path} can be read by everybody: run `chmod o-r {path}`", field="tls_key")


def open_tls(settings: ServiceSettings) -> ServerTls | None:
    """What to listen with; None: plain HTTP. Raises `Misuse` for files that do not work."""
    if settings.tls_certificate is None:
        return None
    try:
        return ServerTls(settings)
    except OSError as error:
        raise Misuse(
            f"{error.filename} cannot be read: {error.strerror}", field="tls_certificate"
        ) from error
