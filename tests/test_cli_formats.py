"""Every format that is read goes through every command."""

from __future__ import annotations

from pathlib import Path

import pytest

import foreign
from commands import run


@pytest.mark.parametrize("kind", foreign.WRITERS)
def test_commands(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = foreign.written(kind, tmp_path)
    told = run("show", path, "--discover", "--json").json
    names = {storage["name"] for storage in told["storages"]}
    assert names
    assert told["missed"] == []
    assert run("show", path).out.splitlines()[-1].startswith("ties     none recorded")
    for name in ("packed.safetensors", "shards"):
        assert run("pack", path, name, "--checksum").code == 0
        assert run("verify", name).code == 0
        assert run("diff", path, name, "--bits").code == 0
    assert run("verify", path).code == 0
    assert run("report", path).code == 0
    assert run("convert", path, "again.pt").code == 0
    assert run("diff", path, "again.pt", "--bits").code == 0
    loaded = {tensor["name"] for tensor in run("show", "again.pt", "--json").json["storages"]}
    assert loaded == names
