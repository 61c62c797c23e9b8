"""Settings and the state directory: unknown keys, wide permissions, damaged files."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sidecar.compose import _store_settings, running
from sidecar.engines.hello import check_engine_name
from sidecar.settings import load_settings
from sidecar.state import StateDirectory
from storage.shares import Share
from strongroom.errors import Corrupt, Misuse, Refused
from strongroom.log import LogHead
from tests.sidecar.control_plane import FakeControlPlane
from tests.sidecar.harness import harness

PLACES = {
    "STRONGROOM_SIDECAR_STATE_DIRECTORY": "/s",
    "STRONGROOM_SIDECAR_SOCKET_PATH": "/r/s.sock",
    "STRONGROOM_SIDECAR_ENGINE_TOKENS": "/t",
}


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (PLACES | {"STRONGROOM_SIDECAR_HOST_BYTES": "8192"}).items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.host_bytes == 8192
    assert settings.socket_path == Path("/r/s.sock")


TENANT = "0123456789abcdef" * 2


def test_a_tenants_shares_are_a_json_object_by_tenant_and_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = f'{{"{TENANT}": {{"guaranteed_bytes": 1048576, "weight": 2.5, "cap_bytes": 8388608}}}}'
    for name, value in (PLACES | {"STRONGROOM_SIDECAR_HOST_SHARES": told}).items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    share = settings.host_shares[TENANT]
    assert (share.guaranteed_bytes, share.weight, share.cap_bytes) == (1 << 20, 2.5, 8 << 20)
    assert settings.nvme_shares == {}
    built = _store_settings(settings)
    assert dict(built.host_shares) == {TENANT: Share(1 << 20, 2.5, 8 << 20)}
    assert dict(built.nvme_shares) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        '{"somebody": {}}',
        f'{{"{TENANT}": {{"guarantee": 1}}}}',
        f'{{"{TENANT}": {{"weight": 0}}}}',
        f'{{"{TENANT}": {{"guaranteed_bytes": -1}}}}',
        f'{{"{TENANT}": {{"guaranteed_bytes": 2, "cap_bytes": 1}}}}',
    ],
)
def test_a_share_that_is_misspelt_or_makes_no_sense_is_refused(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (PLACES | {"STRONGROOM_SIDECAR_NVME_SHARES": wrong}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError):
        load_settings()


def test_an_unknown_setting_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLACES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("STRONGROOM_SIDECAR_HOST_BITES", "8192")
    with pytest.raises(Misuse) as caught:
        load_settings()
    assert caught.value.field == "STRONGROOM_SIDECAR_HOST_BITES"
    with pytest.raises(ValidationError):
        load_settings({}, state_directory="/s", socket_path="/r", engine_tokens="/t", nonsense=1)


def test_settings_are_frozen_and_bounded() -> None:
    places = {"state_directory": "/s", "socket_path": "/r", "engine_tokens": "/t"}
    settings = load_settings({}, **places)
    with pytest.raises(ValidationError):
        settings.host_bytes = 1  # type: ignore[misc]
    with pytest.raises(ValidationError):
        load_settings({}, **places, fill_deadline_s=0)
    with pytest.raises(ValidationError):
        load_settings({}, **places, region_bytes=2**40)


def test_an_engines_name_is_a_plain_file_name() -> None:
    assert check_engine_name("engine-0.a_b") == "engine-0.a_b"
    for name in ("", "..", "a/b", ".hidden", "a" * 65, "a\n", "é"):
        with pytest.raises(Misuse):
            check_engine_name(name)


def test_keys_are_made_once_and_a_readable_key_file_is_refused(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    with state.locked():
        first = state.keys().signer.public_key
        assert state.keys().signer.public_key == first
        (state.path / "signing.key").chmod(0o640)
        with pytest.raises(Misuse) as caught:
            state.keys()
    assert caught.value.limit == "0600"


def test_a_key_file_of_the_wrong_length_and_damaged_records_are_corrupt(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    with state.locked():
        state.keys()
        state.write_position(LogHead("e", 1, "h"))
        assert state.position() == LogHead("e", 1, "h")
        (state.path / "log.json").write_bytes(b"{")
        with pytest.raises(Corrupt):
            state.position()
        (state.path / "hpke.key").write_bytes(b"short")
        with pytest.raises(Corrupt):
            state.keys()


async def test_a_spent_or_missing_join_token_is_a_clear_error(tmp_path: Path) -> None:
    control = FakeControlPlane()
    async with harness(tmp_path, control) as world:
        settings = world.sidecar.settings
    # Enrolled once, the token is not needed again.
    async with running(settings.model_copy(update={"join_token": None}), transport=control):
        pass
    fresh = {"state_directory": tmp_path / "second"}
    with pytest.raises(Refused):
        async with running(settings.model_copy(update=fresh), transport=control):
            pass
    with pytest.raises(Misuse) as caught:
        async with running(
            settings.model_copy(update=fresh | {"join_token": None}), transport=control
        ):
            pass
    assert caught.value.field == "join_token"
